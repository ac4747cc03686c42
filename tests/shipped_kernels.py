"""The kernels that mokbench ships, as the tests compile them for sm_90a without a GPU."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

from mokbench.cells import expand
from mokbench.config import load
from mokbench.fabric.cuda_signal import SignalArgs
from mokbench.fabric.overlap import OverlapArgs
from mokbench.gemm_config import SOURCE, TILE_ROWS, GemmConfig, most_stages
from mokbench.measure.gpu_timing import AlignArgs, StampArgs
from mokbench.mok_config import SOURCE as MOK_SOURCE
from mokbench.mok_config import MokConfig, least_hidden_ring_tiles
from mokbench.systems.cuda_push import PushShape
from mokbench.systems.cuda_push_workspace import KERNELS, PushArgs, kernel_sources
from mokbench.systems.expanded_rows import RowsArgs
from mokbench.workload import Model

PUSH_CONFIG = (
    "mokbench::Config{.num_ranks=4,.num_experts=128,.top_k=8,.max_tokens=4096,.hidden=7168,"
    ".intermediate=2048}"
)
# (hidden, intermediate, experts, top_k) of DeepSeek-V3, Qwen3-30B and -235B, Mixtral, gpt-oss.
_LAYERS = [
    (7168, 2048, 256, 8),
    (2048, 768, 128, 8),
    (4096, 1536, 128, 8),
    (4096, 14336, 8, 2),
    (2880, 2880, 128, 4),
]
# Push at the published shapes: what compiles without spills at one may not at another.
PUSH_KERNELS = [
    (
        f"push/{file}.cuh",
        f"mokbench::push_{name}<mokbench::Config{{.num_ranks=8,.num_experts={experts},"
        f".top_k={top_k},.max_tokens=4096,.hidden={hidden},.intermediate={intermediate}}}>",
    )
    for hidden, intermediate, experts, top_k in _LAYERS
    for name, file in KERNELS.items()
]

# What the systems may ask for: every tile height, with and without SwiGLU and row weights.
GEMM_KERNELS = [
    (SOURCE, GemmConfig(rows, most_stages(rows), 8, swiglu, row_weights).expression)
    for rows in TILE_ROWS
    for swiglu in (False, True)
    for row_weights in (False, True)
] + [
    (SOURCE, GemmConfig(swiglu=swiglu, row_weights=row_weights, split_k=True).expression)
    for swiglu in (False, True)
    for row_weights in (False, True)
]


def mok_config(
    layer: tuple[int, int, int, int], ranks: int = 8, tile_rows: int = 128, stamps: bool = False
) -> MokConfig:
    hidden, intermediate, experts, top_k = layer
    model = Model("layer", hidden, intermediate, experts, top_k)
    least = least_hidden_ring_tiles(model, 8, 132)
    tiles = GemmConfig(tile_rows, most_stages(tile_rows))
    return MokConfig(model, ranks, 4096, tiles, 32, least + 16, 4, 132, stamps)


# Mok at the published shapes, at every tile height, and with rows of 16-byte pieces that fill no
# warp.
MOK_KERNELS = [
    (MOK_SOURCE, config.expression)
    for config in [
        *(mok_config(layer) for layer in _LAYERS),
        *(mok_config(_LAYERS[0], ranks=1, tile_rows=rows) for rows in (32, 64, 128)),
        *(mok_config(_LAYERS[4], ranks=4, tile_rows=rows) for rows in (32, 64)),
        mok_config((192, 192, 32, 16), ranks=1),
        mok_config(_LAYERS[0], stamps=True),
    ]
]


@dataclass(frozen=True)
class Shipped:
    """A kernel: its source, C++ expression and argument struct.

    ``segments`` says whether it reaches any rank's segment, ``local`` whether it also tells CTAs
    of its own rank something through its own segment, which needs no more than GPU scope.
    """

    source: str
    name: str
    args: type[ctypes.Structure] | type[ctypes.c_uint64]
    segments: bool = True
    local: bool = False

    @property
    def expression(self) -> str:
        return f"mokbench::{self.name}"


def _signal(ranks: int) -> list[Shipped]:
    names = {
        "signal_hop<{n}>": False,
        "signal_local_hop<{n}>": True,
        "signal_entry<{n}>": False,
        "signal_ready<{n}, mokbench::Transfer::kPull>": True,
        "signal_ready<{n}, mokbench::Transfer::kPush>": True,
    }
    return [
        Shipped("signal.cuh", name.format(n=ranks), SignalArgs, local=local)
        for name, local in names.items()
    ]


SHIPPED = [
    *_signal(2),
    *_signal(8),
    Shipped("overlap.cuh", "overlap_probe", OverlapArgs, segments=False),
    Shipped("timing.cuh", "align_ranks<4>", AlignArgs),
    Shipped("timing.cuh", "stamp_clocks", StampArgs, segments=False),
    Shipped("timing.cuh", "delay", ctypes.c_uint64, segments=False),
    *(
        Shipped("expanded_rows.cuh", name, RowsArgs, segments=False)
        for name in ("weighted_swiglu<2048>", "quantize_rows<7168>", "dequantize_rows<7168>")
    ),
    *(
        Shipped(
            f"push/{file}.cuh",
            f"push_{name}<{PUSH_CONFIG}>",
            PushArgs,
            segments=name not in ("plan", "swiglu"),
        )
        for name, file in KERNELS.items()
    ),
]


def _config_kernels() -> list[tuple[str, str]]:
    """What the shipped configs launch beyond: alignment, signaling, and push at their shapes.

    A model and number of ranks is taken once, with its most tokens. Mok's kernel is left out: nine
    more of them take a minute and a half.
    """
    configs = sorted((Path(__file__).parents[1] / "configs").glob("h200-*.yaml"))
    cells = [cell for path in configs for cell in expand(load(str(path)), fabric="cuda")]
    kernels = []
    for ranks in sorted({cell.workload.ranks for cell in cells}):
        kernels.append(("timing.cuh", f"mokbench::align_ranks<{ranks}>"))
        # One rank alone has no peer to signal to.
        own = [s for s in _signal(ranks) if ranks > 1 or s.name.startswith("signal_local_hop")]
        kernels += [(signal.source, signal.expression) for signal in own]
    works = sorted(
        (cell.workload for cell in cells if cell.system == "push"),
        key=lambda work: work.tokens_per_rank,
    )
    most = {(work.model, work.ranks): work.tokens_per_rank for work in works}
    for (model, ranks), tokens in most.items():
        kernels += kernel_sources(PushShape(model, ranks, tokens))
    shipped = {(shipped.source, shipped.expression) for shipped in SHIPPED}
    return [kernel for kernel in dict.fromkeys(kernels) if kernel not in shipped]


CONFIG_KERNELS = _config_kernels()
