"""MoK: pull dispatch into a ring, two GEMMs that trail one another, push combine.

On the host fabric this is the twin: kernels/protocol.h with processes for ranks and threads for
warp roles. It shows who waits for whom and what is moved, not how fast a GPU would be.
"""

from typing import TYPE_CHECKING, ClassVar

from mokbench import twin
from mokbench.systems import Setup, expect_options, options_of, twin_only
from mokbench.systems.options import MokOptions
from mokbench.workload import Cell, Workload

if TYPE_CHECKING:
    from torch import Tensor

    from mokbench._twin import MokRank, SharedMemory, TwinConfig


class Mok:
    """The MoK protocol on the host twin."""

    name: ClassVar[str] = "mok"
    deterministic: ClassVar[bool] = True
    traffic: ClassVar[str | None] = "per_route"
    signal: ClassVar[str | None] = "pull"

    def __init__(self) -> None:
        self._rank: MokRank | None = None
        self._memory: SharedMemory | None = None

    @staticmethod
    def supports(cell: Cell) -> str | None:
        """Any host cell whose ranks share one host."""
        return twin_only(cell, "mok")

    @staticmethod
    def workspace_bytes(cell: Cell) -> int:
        """Shared segment, rings and output tile of one rank."""
        options = expect_options(options_of(cell), MokOptions)
        work = cell.workload
        config = twin_config(work, options.model_dump(), work.tokens_per_rank)
        tiles = options.ring_tiles + 1
        rows = options.block_m * tiles * work.model.hidden
        hidden = options.block_m * (options.hidden_ring_tiles + 2) * work.model.intermediate
        return twin.segment_bytes("mok", config) + (rows + hidden) * work.dtype.num_bytes

    def prepare(self, setup: Setup) -> None:
        """Segment, rings and role threads."""
        import torch

        from mokbench.systems.expert_mlp import ExpertMlp

        options = expect_options(setup.options, MokOptions)
        model, dtype = setup.workload.model, setup.w13.dtype
        block_m = options.block_m
        x_ring = torch.empty(options.ring_tiles * block_m, model.hidden, dtype=dtype)
        hidden_ring = torch.empty(
            options.hidden_ring_tiles * block_m, model.intermediate, dtype=dtype
        )
        y_tile = torch.empty(block_m, model.hidden, dtype=dtype)
        mlp = ExpertMlp(setup.w13, setup.w2, block_m)

        def gemm1(expert: int, x_row: int, hidden_row: int, rows: int) -> None:
            mlp.gemm1(
                expert, x_ring[x_row : x_row + rows], hidden_ring[hidden_row : hidden_row + rows]
            )

        def gemm2(expert: int, hidden_row: int, y_row: int, rows: int) -> None:
            mlp.gemm2(
                expert, hidden_ring[hidden_row : hidden_row + rows], y_tile[y_row : y_row + rows]
            )

        config = twin_config(setup.workload, options.model_dump(), setup.max_tokens)
        self._memory = setup.fabric.allocate("mok", config)
        self._rank = twin.MokRank(
            self._memory,
            config,
            setup.rank,
            gemm1,
            gemm2,
            x_ring,
            hidden_ring,
            y_tile,
            wait_bound_s=setup.fabric.wait_bound_s,
        )
        # Construction sets the rank's own counters, which a peer's first pass raises.
        setup.fabric.barrier()
        self._y = torch.empty(setup.max_tokens, model.hidden, dtype=dtype)

    def run(self, x: "Tensor", topk_idx: "Tensor", topk_weights: "Tensor") -> "Tensor":
        """See System.run; raises the twin's Fault when a wait expires."""
        assert self._rank is not None, "prepare() comes first"
        y = self._y[: x.shape[0]]
        self._rank.run(x, topk_idx, topk_weights, y)
        return y

    def close(self) -> None:
        """Join the role threads, then unmap."""
        if self._rank is not None:
            self._rank.close()
            self._rank = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def twin_config(work: Workload, tiles: dict[str, int], max_tokens: int) -> "TwinConfig":
    """The twin's shape for a workload; at least one token, so that no buffer is empty.

    ``tiles`` are the TwinConfig's own tile, ring and worker counts.
    """
    model = work.model
    return twin.TwinConfig(
        num_ranks=work.ranks,
        num_experts=model.experts,
        top_k=model.top_k,
        max_tokens=max(1, max_tokens),
        hidden=model.hidden,
        intermediate=model.intermediate,
        element_bytes=work.dtype.num_bytes,
        **tiles,
    )
