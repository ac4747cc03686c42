"""One rank, no exchange, on a GPU: what a layer costs under torch.compile, without a network."""

from typing import TYPE_CHECKING, Any, ClassVar

from mokbench.systems import Setup, expect_options, options_of
from mokbench.systems.grouped_experts import (
    compiled,
    compiler_problem,
    shape_problem,
    weighted_experts,
)
from mokbench.systems.options import LocalOptions
from mokbench.workload import Cell, Dtype

if TYPE_CHECKING:
    from torch import Tensor


class Local:
    """The layer on one rank that holds all experts; queues work only."""

    name: ClassVar[str] = "local"
    deterministic: ClassVar[bool] = True
    traffic: ClassVar[str | None] = None
    signal: ClassVar[str | None] = None

    @staticmethod
    def supports(cell: Cell) -> str | None:
        """One rank, BF16; ``compile: true`` needs a compiler."""
        work, options = cell.workload, expect_options(options_of(cell), LocalOptions)
        if work.ranks != 1:
            return f"local has no exchange and runs with ranks: 1 only, not {work.ranks}"
        if work.dtype is not Dtype.BF16:
            return f"local on the cuda fabric is BF16 only, found {work.dtype}; set dtype: bf16"
        if options.block_m != LocalOptions().block_m:
            return (
                "block_m is a tile of the host's GEMMs; on the cuda fabric torch's grouped GEMM "
                "chooses its own: leave block_m out"
            )
        problem = compiler_problem() if options.compile else None
        return problem or shape_problem("local", work.model.hidden, work.model.intermediate)

    @staticmethod
    def workspace_bytes(cell: Cell) -> int:
        """Rows sorted, between and behind the GEMMs, all routes of BF16."""
        work = cell.workload
        routes = work.tokens_per_rank * work.model.top_k
        elements = routes * (2 * work.model.hidden + 3 * work.model.intermediate)
        return elements * work.dtype.num_bytes

    def prepare(self, setup: Setup) -> None:
        """Weights only; rows are allocated per pass, as torch code would."""
        options = expect_options(setup.options, LocalOptions)
        self._layer: Any = weighted_experts
        if options.compile:
            # A row's shape never changes; a compiler that knows it makes better code.
            self._layer = compiled(weighted_experts, dynamic=False)
        self._weights = (setup.w13, setup.w2)

    def run(self, x: "Tensor", topk_idx: "Tensor", topk_weights: "Tensor") -> "Tensor":
        """See System.run."""
        if x.shape[0] == 0:
            return x.new_empty(x.shape)
        y: Tensor = self._layer(x, topk_idx, topk_weights, *self._weights)
        return y

    def close(self) -> None:
        """Nothing is held outside torch."""
