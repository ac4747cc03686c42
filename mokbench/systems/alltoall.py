"""torch.distributed all_to_all_single around the expert MLPs: what plain PyTorch gives.

Each (token, rank) pair crosses once, with its expert ids and weights; the destination sums its
experts' outputs and sends one row back. Row counts go first, through the CPU.
"""

from typing import TYPE_CHECKING, ClassVar

from mokbench.systems import InPhases, Setup, expect_options, host_only, options_of
from mokbench.systems.options import AlltoallOptions
from mokbench.workload import Cell

if TYPE_CHECKING:
    from torch import Tensor


class Alltoall(InPhases):
    """Dispatch and combine by all_to_all_single over the worker's gloo group."""

    name: ClassVar[str] = "alltoall"
    deterministic: ClassVar[bool] = True
    traffic: ClassVar[str | None] = "per_rank"
    signal: ClassVar[str | None] = None
    host_link: ClassVar[str] = "tcp"

    @staticmethod
    def supports(cell: Cell) -> str | None:
        """Any host cell."""
        return host_only(cell, "alltoall")

    @staticmethod
    def num_threads(cell: Cell) -> int:
        """The caller; it sleeps while gloo's threads move rows."""
        return 1

    @staticmethod
    def workspace_bytes(cell: Cell) -> int:
        """Rows sent, received, per local route, and back: the worst case of balanced routing."""
        work = cell.workload
        block_m = expect_options(options_of(cell), AlltoallOptions).block_m
        pairs = work.tokens_per_rank * min(work.model.top_k, work.ranks)
        rows = 4 * pairs + 3 * work.tokens_per_rank * work.model.top_k
        hidden_tile = block_m * 3 * work.model.intermediate
        return (rows * work.model.hidden + hidden_tile) * work.dtype.num_bytes

    def prepare(self, setup: Setup) -> None:
        """Weights only; the exchange allocates per pass, since counts are known only then."""
        from mokbench.systems.expert_mlp import ExpertMlp

        options = expect_options(setup.options, AlltoallOptions)
        self._mlp = ExpertMlp(setup.w13, setup.w2, options.block_m)
        self._fabric = setup.fabric
        self._ranks = setup.workload.ranks
        self._num_local = setup.num_local_experts
        self._first_expert = setup.rank * setup.num_local_experts

    def dispatch(self, x: "Tensor", topk_idx: "Tensor", topk_weights: "Tensor") -> None:
        """Counts, then rows, expert ids and weights, grouped by destination rank."""
        import torch

        self._shape, self._dtype = x.shape, x.dtype
        owner = torch.div(topk_idx, self._num_local, rounding_mode="floor")
        owner = torch.where(topk_idx < 0, -1, owner)
        sends = [torch.nonzero((owner == r).any(dim=1)).squeeze(1) for r in range(self._ranks)]
        self._send_tokens = torch.cat(sends)
        self._send_counts = [int(s.numel()) for s in sends]
        recv_counts = torch.empty(self._ranks, dtype=torch.int64)
        ones = [1] * self._ranks
        self._fabric.all_to_all(recv_counts, torch.tensor(self._send_counts), ones, ones)
        self._recv_counts = recv_counts.tolist()
        self._x = self._exchange(x[self._send_tokens], back=False)
        self._topk_idx = self._exchange(topk_idx[self._send_tokens], back=False)
        self._topk_weights = self._exchange(topk_weights[self._send_tokens], back=False)

    def compute(self) -> None:
        """Local experts of every received row, summed per row."""
        from mokbench.systems.expert_mlp import run_experts

        self._y = run_experts(
            self._mlp,
            self._x,
            self._topk_idx,
            self._topk_weights,
            self._first_expert,
            self._num_local,
        )

    def combine(self) -> "Tensor":
        """Partial sums back, added in fixed rank order in FP32."""
        import torch

        partial = self._exchange(self._y, back=True)
        y = torch.zeros(self._shape, dtype=torch.float32)
        start = 0
        for count in self._send_counts:
            tokens = self._send_tokens[start : start + count]
            y[tokens] += partial[start : start + count].float()
            start += count
        return y.to(self._dtype)

    def _exchange(self, rows: "Tensor", back: bool) -> "Tensor":
        """all_to_all_single of whole rows as bytes: gloo has no bf16."""
        import torch

        send, recv = self._send_counts, self._recv_counts
        if back:
            send, recv = recv, send
        out = rows.new_empty((sum(recv), rows.shape[1]))
        self._fabric.all_to_all(
            out.view(torch.uint8), rows.contiguous().view(torch.uint8), recv, send
        )
        return out

    def close(self) -> None:
        """Nothing is held outside torch."""
