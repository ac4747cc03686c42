"""The push baseline: each (token, rank) pushed once, grouped GEMMs, one row pushed back.

The conventional design on the same fabric, tiles and matmul as mok, so that the two differ only in
who moves tokens when. On the host fabric this is the twin of kernels/protocol.h.
"""

from typing import TYPE_CHECKING, ClassVar

from mokbench import twin
from mokbench.systems import InPhases, Setup, expect_options, options_of
from mokbench.systems.gemm_choice import host_gemm_reason
from mokbench.systems.options import PushOptions
from mokbench.systems.twin_system import TwinSystem, twin_config
from mokbench.workload import Cell, Workload

if TYPE_CHECKING:
    from torch import Tensor

    from mokbench._twin import TwinConfig


class Push(InPhases, TwinSystem["twin.PushRank"]):
    """The push protocol on the host twin; a pass raises the twin's Fault when a wait expires."""

    name: ClassVar[str] = "push"
    traffic: ClassVar[str | None] = "per_rank"
    signal: ClassVar[str | None] = "push"

    @classmethod
    def supports(cls, cell: Cell) -> str | None:
        """Any host cell whose ranks share one host."""
        options = expect_options(options_of(cell), PushOptions)
        if options.num_sms != "auto":
            return "num_sms limits GPU kernels; the host fabric has none: leave it out"
        return host_gemm_reason(options, "ours") or super().supports(cell)

    @staticmethod
    def num_threads(cell: Cell) -> int:
        """The caller does everything, phase after phase."""
        return 1

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
        block_m = expect_options(setup.options, PushOptions).block_m
        config = _config(setup.workload, block_m, setup.max_tokens)
        capacity = twin.PushRank.capacity_rows(config)
        self._start(
            setup, config, twin.PushRank, x_rows=capacity, hidden_rows=block_m, y_rows=capacity
        )

    def dispatch(self, x: "Tensor", topk_idx: "Tensor", topk_weights: "Tensor") -> None:
        """Push rows, counts and flags; returns when every peer's rows are here."""
        self._num_tokens = x.shape[0]
        self.rank.dispatch(x, topk_idx, topk_weights)

    def compute(self) -> None:
        """Expert-sort the received rows and run the GEMMs."""
        self.rank.compute()

    def combine(self) -> "Tensor":
        """Push partial sums back and add what the peers pushed."""
        y = self._y[: self._num_tokens]
        self.rank.combine(y)
        return y


def _config(work: Workload, block_m: int, max_tokens: int) -> "TwinConfig":
    return twin_config(work, {"block_m": block_m}, max_tokens)
