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

    @staticmethod
    def num_threads(cell: Cell) -> int:
        """The caller, the pull workers and a thread for each GEMM."""
        return 3 + expect_options(options_of(cell), MokOptions).pull_workers

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
        options = expect_options(setup.options, MokOptions)
        block_m = options.block_m
        self._start(
            setup,
            twin_config(setup.workload, options.model_dump(), setup.max_tokens),
            twin.MokRank,
            x_rows=options.ring_tiles * block_m,
            hidden_rows=options.hidden_ring_tiles * block_m,
            y_rows=block_m,
        )

    def run(self, x: "Tensor", topk_idx: "Tensor", topk_weights: "Tensor") -> "Tensor":
        """See System.run; raises the twin's Fault when a wait expires."""
        y = self._y[: x.shape[0]]
        self.rank.run(x, topk_idx, topk_weights, y)
        return y
