"""The push baseline: each (token, rank) pushed once, grouped GEMMs, one row pushed back.

The conventional design on the same fabric, tiles and matmul as mok, so that the two differ only in
who moves tokens when. On the host fabric this is the twin of kernels/protocol.h.
"""

from typing import TYPE_CHECKING, ClassVar

from mokbench import twin
from mokbench.systems import Setup, expect_options, options_of, twin_only
from mokbench.systems.mok import twin_config
from mokbench.systems.options import PushOptions
from mokbench.workload import Cell, Workload

if TYPE_CHECKING:
    from torch import Tensor

    from mokbench._twin import PushRank, SharedMemory, TwinConfig


class Push:
    """The push protocol on the host twin."""

    name: ClassVar[str] = "push"
    deterministic: ClassVar[bool] = True
    traffic: ClassVar[str | None] = "per_rank"
    signal: ClassVar[str | None] = "push"

    def __init__(self) -> None:
        self._rank: PushRank | None = None
        self._memory: SharedMemory | None = None

    @staticmethod
    def supports(cell: Cell) -> str | None:
        """Any host cell whose ranks share one host."""
        if expect_options(options_of(cell), PushOptions).num_sms != "auto":
            return "num_sms limits GPU kernels; the host fabric has none: leave it out"
        return twin_only(cell, "push")

    @staticmethod
    def workspace_bytes(cell: Cell) -> int:
        """Shared segment, expert-sorted input and output rows, one tile of hidden."""
        work = cell.workload
        block_m = expect_options(options_of(cell), PushOptions).block_m
        config = _config(work, block_m, work.tokens_per_rank)
        rows = 2 * twin.PushRank.capacity_rows(config) * work.model.hidden
        hidden = 3 * block_m * work.model.intermediate
        return twin.segment_bytes("push", config) + (rows + hidden) * work.dtype.num_bytes

    def prepare(self, setup: Setup) -> None:
        """Segment and row buffers."""
        import torch

        from mokbench.systems.expert_mlp import ExpertMlp

        block_m = expect_options(setup.options, PushOptions).block_m
        model, dtype = setup.workload.model, setup.w13.dtype
        config = _config(setup.workload, block_m, setup.max_tokens)
        capacity = twin.PushRank.capacity_rows(config)
        x_rows = torch.empty(capacity, model.hidden, dtype=dtype)
        y_rows = torch.empty(capacity, model.hidden, dtype=dtype)
        hidden_tile = torch.empty(block_m, model.intermediate, dtype=dtype)
        mlp = ExpertMlp(setup.w13, setup.w2, block_m)

        def gemm1(expert: int, x_row: int, hidden_row: int, rows: int) -> None:
            mlp.gemm1(
                expert, x_rows[x_row : x_row + rows], hidden_tile[hidden_row : hidden_row + rows]
            )

        def gemm2(expert: int, hidden_row: int, y_row: int, rows: int) -> None:
            mlp.gemm2(
                expert, hidden_tile[hidden_row : hidden_row + rows], y_rows[y_row : y_row + rows]
            )

        self._memory = setup.fabric.allocate("push", config)
        self._rank = twin.PushRank(
            self._memory,
            config,
            setup.rank,
            gemm1,
            gemm2,
            x_rows,
            hidden_tile,
            y_rows,
            wait_bound_s=setup.fabric.wait_bound_s,
        )
        # Construction sets the rank's own counters, which a peer's first pass raises.
        setup.fabric.barrier()
        self._y = torch.empty(setup.max_tokens, model.hidden, dtype=dtype)

    def run(self, x: "Tensor", topk_idx: "Tensor", topk_weights: "Tensor") -> "Tensor":
        """See System.run; raises the twin's Fault when a wait expires."""
        self.dispatch(x, topk_idx, topk_weights)
        self.compute()
        return self.combine()

    def dispatch(self, x: "Tensor", topk_idx: "Tensor", topk_weights: "Tensor") -> None:
        """Push rows, counts and flags; returns when every peer's rows are here."""
        assert self._rank is not None, "prepare() comes first"
        self._num_tokens = x.shape[0]
        self._rank.dispatch(x, topk_idx, topk_weights)

    def compute(self) -> None:
        """Expert-sort the received rows and run the GEMMs."""
        assert self._rank is not None, "prepare() comes first"
        self._rank.compute()

    def combine(self) -> "Tensor":
        """Push partial sums back and add what the peers pushed."""
        assert self._rank is not None, "prepare() comes first"
        y = self._y[: self._num_tokens]
        self._rank.combine(y)
        return y

    def close(self) -> None:
        """Stop the rank, then unmap."""
        if self._rank is not None:
            self._rank.close()
            self._rank = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def _config(work: Workload, block_m: int, max_tokens: int) -> "TwinConfig":
    return twin_config(work, {"block_m": block_m}, max_tokens)
