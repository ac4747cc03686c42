"""MoK: pull dispatch into a ring, two GEMMs that trail one another, push combine.

On the host fabric this is the twin: kernels/protocol.h with processes for ranks and threads for
warp roles. It shows who waits for whom and what is moved, not how fast a GPU would be.
"""

from typing import TYPE_CHECKING, ClassVar

from mokbench import twin
from mokbench.systems import Setup, expect_options, options_of
from mokbench.systems.options import MokOptions
from mokbench.systems.twin_system import TwinSystem, twin_config
from mokbench.workload import Cell

if TYPE_CHECKING:
    from torch import Tensor


class Mok(TwinSystem["twin.MokRank"]):
    """The MoK protocol on the host twin."""

    name: ClassVar[str] = "mok"
    traffic: ClassVar[str | None] = "per_route"
    signal: ClassVar[str | None] = "pull"

    @classmethod
    def supports(cls, cell: Cell) -> str | None:
        """Any host cell whose ranks share one host."""
        options = expect_options(options_of(cell), MokOptions)
        return options.cuda_options_reason or super().supports(cell)

    @staticmethod
    def num_threads(cell: Cell) -> int:
        """The caller, the pull workers and a thread for each GEMM."""
        return 3 + expect_options(options_of(cell), MokOptions).pull_workers

    @staticmethod
    def workspace_bytes(cell: Cell) -> int:
        """Shared segment, rings and output tile of one rank."""
        options = expect_options(options_of(cell), MokOptions)
        work = cell.workload
        tiles = options.twin_tiles
        config = twin_config(work, tiles, work.tokens_per_rank)
        rows = options.block_m * (tiles["ring_tiles"] + 1) * work.model.hidden
        hidden = options.block_m * (tiles["hidden_ring_tiles"] + 2) * work.model.intermediate
        return twin.segment_bytes("mok", config) + (rows + hidden) * work.dtype.num_bytes

    def prepare(self, setup: Setup) -> None:
        """Segment, rings and role threads."""
        options = expect_options(setup.options, MokOptions)
        block_m, tiles = options.block_m, options.twin_tiles
        self._start(
            setup,
            twin_config(setup.workload, tiles, setup.max_tokens),
            twin.MokRank,
            x_rows=tiles["ring_tiles"] * block_m,
            hidden_rows=tiles["hidden_ring_tiles"] * block_m,
            y_rows=block_m,
        )

    def run(self, x: "Tensor", topk_idx: "Tensor", topk_weights: "Tensor") -> "Tensor":
        """See System.run; raises the twin's Fault when a wait expires."""
        y = self._y[: x.shape[0]]
        self.rank.run(x, topk_idx, topk_weights, y)
        return y
