"""One rank on a GPU, no exchange: the layer as one torch.compile'd function around grouped GEMMs.

Gather into expert order, gate and up, SwiGLU, down, weighted sum per token. Routes are sorted on
the device, so the CPU never waits and a CUDA graph can hold the pass. With our grouped GEMM what is
before it and what is behind it are compiled apart.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

from mokbench.errors import UnsupportedError
from mokbench.systems import Setup, expect_options, options_of
from mokbench.systems.gemm_choice import choose, expert_gemm_bytes, gemm_reason
from mokbench.systems.gpu_support import DEFAULT_BLOCK_M, compiler_reason, grouped_mm_reason
from mokbench.systems.options import LocalOptions
from mokbench.workload import Cell

if TYPE_CHECKING:
    from torch import Tensor

Layer = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]
# torch._grouped_mm has its fast kernels for these; elsewhere it loops over experts on the CPU.
_CAPABILITIES = (9, 10)


class Local:
    """The layer on one rank that holds all experts."""

    name: ClassVar[str] = "local"
    deterministic: ClassVar[bool] = True
    traffic: ClassVar[str | None] = None
    signal: ClassVar[str | None] = None

    def __init__(self) -> None:
        self.notes: Sequence[str] = ()
        self._layer: Layer | None = None

    @staticmethod
    def supports(cell: Cell) -> str | None:
        """One rank, shapes that grouped GEMMs take, and a compiler where it is asked for."""
        options = expect_options(options_of(cell), LocalOptions)
        if cell.workload.ranks != 1:
            return f"local has no exchange and runs with ranks: 1 only, not {cell.workload.ranks}"
        if options.gemm == "torch":
            reason = grouped_mm_reason(cell, options.compile)
        else:
            reason = compiler_reason(options.compile)
        return tile_reason(options.block_m) or gemm_reason(cell, options) or reason

    @staticmethod
    def workspace_bytes(cell: Cell) -> int:
        """Per route: input and output rows, gate and up, hidden, sort keys; and y."""
        work, model = cell.workload, cell.workload.model
        plain = layer_bytes(work.tokens_per_rank, model.top_k, cell)
        if expect_options(options_of(cell), LocalOptions).gemm == "torch":
            return plain
        rows = work.tokens_per_rank * model.top_k
        return plain + expert_gemm_bytes(rows, model.experts, model.hidden, model.intermediate)

    def prepare(self, setup: Setup) -> None:
        """Weights, and rows for our GEMM; the first pass compiles."""
        from mokbench.systems import grouped_experts as parts

        options = expect_options(setup.options, LocalOptions)
        build = parts.compiled if options.compile else parts.as_written
        if options.gemm == "torch":
            require_fast_kernels()
            layer: Any = build(parts.expert_layer)
            weights = setup.w13, setup.w2
            self._layer = lambda x, ids, k_weights: cast(
                "Tensor", layer(x, ids, k_weights, *weights, 0, ids.numel())
            )
        else:
            self._layer = self._with_our_gemm(setup, options, build)

    def _with_our_gemm(self, setup: Setup, options: LocalOptions, build: Any) -> Layer:
        from mokbench.systems import grouped_experts as parts
        from mokbench.systems.expert_gemms import ExpertGemms

        work, fabric = setup.workload, setup.fabric
        choice = choose(work, options, fabric.num_sms)
        capacity = max(1, setup.max_tokens * work.model.top_k)
        gemms = ExpertGemms(setup.w13, setup.w2, capacity, choice, fabric.num_sms, fabric.arch)
        gather, add = build(parts.gather_rows), build(parts.sum_slots)
        self.notes = gemms.notes

        def layer(x: "Tensor", ids: "Tensor", k_weights: "Tensor") -> "Tensor":
            x_rows, ends, slots = gather(x, ids, 0, work.model.experts, ids.numel())
            return cast("Tensor", add(gemms(x_rows, ends), slots, ends[-1], k_weights))

        return layer

    def run(self, x: "Tensor", topk_idx: "Tensor", topk_weights: "Tensor") -> "Tensor":
        """See System.run."""
        import torch

        if x.shape[0] == 0:
            return torch.empty_like(x)
        assert self._layer is not None, "prepare() comes first"
        return self._layer(x, topk_idx, topk_weights)

    def close(self) -> None:
        """Drop the buffers of our GEMM; compiled code serves the next row of this shape."""
        self._layer = None


def tile_reason(block_m: int) -> str | None:
    """A variant's label must not name a tile height that nothing uses."""
    if block_m == DEFAULT_BLOCK_M:
        return None
    return "torch._grouped_mm picks its own tiles on the cuda fabric; leave block_m out there"


def layer_bytes(rows: int, routes_per_row: int, cell: Cell) -> int:
    """What ``expert_layer`` allocates for ``rows`` of x with that many routes each."""
    model = cell.workload.model
    by_route = (2 * model.hidden + 3 * model.intermediate) * cell.workload.dtype.num_bytes + 3 * 8
    return rows * (routes_per_row * by_route + model.hidden * cell.workload.dtype.num_bytes)


def require_fast_kernels() -> None:
    """UnsupportedError on a GPU where torch._grouped_mm would go through the CPU."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    if major not in _CAPABILITIES:
        raise UnsupportedError(
            f"torch._grouped_mm has no grouped kernel for sm_{major}{minor}; use sm_90 or sm_100"
        )
