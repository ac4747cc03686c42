"""One rank, no exchange: gather, grouped GEMMs, scatter. What a layer costs without a network."""

from typing import TYPE_CHECKING, ClassVar

from mokbench.systems import Setup, expect_options, host_only, options_of
from mokbench.systems.gemm_choice import host_gemm_reason
from mokbench.systems.options import LocalOptions, TiledOptions
from mokbench.workload import Cell

if TYPE_CHECKING:
    from torch import Tensor


class Local:
    """The layer on one rank that holds all experts."""

    name: ClassVar[str] = "local"
    deterministic: ClassVar[bool] = True
    traffic: ClassVar[str | None] = None
    signal: ClassVar[str | None] = None
    host_link: ClassVar[str] = "none"

    @staticmethod
    def supports(cell: Cell) -> str | None:
        """One rank only: there is nothing to exchange."""
        if cell.workload.ranks != 1:
            return f"local has no exchange and runs with ranks: 1 only, not {cell.workload.ranks}"
        options = expect_options(options_of(cell), LocalOptions)
        return host_gemm_reason(options, "torch") or host_only(cell, "local")

    @staticmethod
    def num_threads(cell: Cell) -> int:
        """The caller."""
        return 1

    @staticmethod
    def workspace_bytes(cell: Cell) -> int:
        """Sorted input rows, output rows per route, one tile of hidden."""
        work = cell.workload
        block_m = expect_options(options_of(cell), TiledOptions).block_m
        routes = work.tokens_per_rank * work.model.top_k
        hidden_tile = block_m * 3 * work.model.intermediate
        return (3 * routes * work.model.hidden + hidden_tile) * work.dtype.num_bytes

    def prepare(self, setup: Setup) -> None:
        """Weights only; rows are allocated per pass, as torch code would."""
        from mokbench.systems.expert_mlp import ExpertMlp

        options = expect_options(setup.options, TiledOptions)
        self._mlp = ExpertMlp(setup.w13, setup.w2, options.block_m)
        self._num_experts = setup.num_local_experts

    def run(self, x: "Tensor", topk_idx: "Tensor", topk_weights: "Tensor") -> "Tensor":
        """See System.run."""
        from mokbench.systems.expert_mlp import run_experts

        return run_experts(self._mlp, x, topk_idx, topk_weights, 0, self._num_experts)

    def close(self) -> None:
        """Nothing is held outside torch."""
