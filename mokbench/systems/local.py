"""One rank, no exchange: gather, grouped GEMMs, scatter. What a layer costs without a network."""

from typing import ClassVar

import torch
from torch import Tensor

from mokbench.systems import Setup, expect_options, host_only, options_of
from mokbench.systems.expert_mlp import ExpertMlp, sort_by_expert
from mokbench.systems.options import TiledOptions
from mokbench.workload import Cell


class Local:
    """The layer on one rank that holds all experts."""

    name: ClassVar[str] = "local"
    deterministic: ClassVar[bool] = True
    traffic: ClassVar[str | None] = None
    signal: ClassVar[str | None] = None

    @staticmethod
    def supports(cell: Cell) -> str | None:
        """One rank only: there is nothing to exchange."""
        if cell.workload.ranks != 1:
            return f"local has no exchange and runs with ranks: 1 only, not {cell.workload.ranks}"
        return host_only(cell, "local")

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
        options = expect_options(setup.options, TiledOptions)
        self._mlp = ExpertMlp(setup.w13, setup.w2, options.block_m)
        self._num_experts = setup.num_local_experts

    def run(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        """See System.run."""
        return run_experts(self._mlp, x, topk_idx, topk_weights, 0, self._num_experts)

    def close(self) -> None:
        """Nothing is held outside torch."""


def run_experts(
    mlp: ExpertMlp,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    first_expert: int,
    num_experts: int,
) -> Tensor:
    """Weighted sum over the local experts of each row: y [rows, H] in x's dtype.

    Routes to experts elsewhere, and masked ones, add nothing. The sum runs in fixed k order in
    FP32, so it does not depend on the order in which experts ran.
    """
    num_rows, top_k = topk_idx.shape
    routes, counts = sort_by_expert(topk_idx, first_expert, num_experts)
    x_rows = x[torch.div(routes, top_k, rounding_mode="floor")]
    y_rows = torch.empty_like(x_rows)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            mlp.run(expert, x_rows[start : start + count], y_rows[start : start + count])
            start += count
    y_slots = x.new_zeros(num_rows * top_k, x.shape[1])
    y_slots[routes] = y_rows
    y = torch.zeros(num_rows, x.shape[1], dtype=torch.float32)
    for k, slots in enumerate(y_slots.view(num_rows, top_k, x.shape[1]).unbind(1)):
        y.addcmul_(slots.float(), topk_weights[:, k : k + 1])
    return y.to(x.dtype)
