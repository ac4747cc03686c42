"""NCCL all_to_all_single around the expert MLPs on GPUs: what plain PyTorch gives.

Each (token, rank) pair crosses once, with its expert ids and weights; the destination sums its
experts' outputs and sends one row back. all_to_all_single takes its row counts from the CPU, so
every pass waits for the device once: that is part of this system, and no CUDA graph can hold it.
"""

from typing import TYPE_CHECKING, Any, ClassVar

from mokbench.errors import UnsupportedError
from mokbench.gpus import read_gpus
from mokbench.machine import version
from mokbench.systems import Setup, expect_options, options_of
from mokbench.systems.grouped_experts import (
    compiled,
    compiler_problem,
    shape_problem,
    weighted_experts,
)
from mokbench.systems.options import AlltoallOptions
from mokbench.workload import Cell, Dtype

if TYPE_CHECKING:
    from torch import Tensor

# Older ones refuse a second rank on a GPU ("Duplicate GPU detected").
_SHARED_GPU_NCCL = (2, 30)


class Alltoall:
    """Dispatch and combine by all_to_all_single over an NCCL group of its own."""

    name: ClassVar[str] = "alltoall"
    deterministic: ClassVar[bool] = True
    traffic: ClassVar[str | None] = "per_rank"
    signal: ClassVar[str | None] = None

    @staticmethod
    def supports(cell: Cell) -> str | None:
        """BF16 without a graph; ranks that share a GPU need NCCL 2.30."""
        work, options = cell.workload, expect_options(options_of(cell), AlltoallOptions)
        if work.dtype is not Dtype.BF16:
            return f"alltoall on the cuda fabric is BF16 only, found {work.dtype}; set dtype: bf16"
        if cell.graph:
            return (
                "alltoall takes its row counts from the CPU in every pass, which a CUDA graph "
                "cannot hold; set graph: false"
            )
        if options.block_m != AlltoallOptions().block_m:
            return (
                "block_m is a tile of the host's GEMMs; on the cuda fabric torch's grouped GEMM "
                "chooses its own: leave block_m out"
            )
        gpus = read_gpus()
        if gpus.visible() and gpus.ranks_per_gpu(work.ranks) > 1:
            found = version("nvidia-nccl-cu13") or version("nvidia-nccl-cu12")
            if found and (problem := _nccl_problem(tuple(map(int, found.split(".")[:2])))):
                return problem
        problem = compiler_problem() if options.compile else None
        return problem or shape_problem("alltoall", work.model.hidden, work.model.intermediate)

    @staticmethod
    def workspace_bytes(cell: Cell) -> int:
        """Rows sent, received, sorted, between and behind the GEMMs, and back: balanced routing."""
        work = cell.workload
        pairs = work.tokens_per_rank * min(work.model.top_k, work.ranks)
        routes = work.tokens_per_rank * work.model.top_k
        elements = 4 * pairs * work.model.hidden
        elements += routes * (2 * work.model.hidden + 3 * work.model.intermediate)
        return elements * work.dtype.num_bytes

    def __init__(self) -> None:
        self._group: Any = None

    def prepare(self, setup: Setup) -> None:
        """The NCCL group and the weights; rows are allocated per pass, as counts come with it."""
        import torch
        import torch.distributed as dist

        options = expect_options(setup.options, AlltoallOptions)
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        problem = _nccl_problem(nccl[:2]) if setup.fabric.ranks_per_gpu > 1 else None
        if problem:
            raise UnsupportedError(problem)
        self._ranks, self._num_local = setup.workload.ranks, setup.num_local_experts
        self._first_expert = setup.rank * setup.num_local_experts
        self._w13, self._w2 = setup.w13, setup.w2
        self._experts: Any = compiled(weighted_experts) if options.compile else weighted_experts
        self._sum: Any = compiled(sum_partials) if options.compile else sum_partials
        self._group = dist.new_group(backend="nccl")

    def run(self, x: "Tensor", topk_idx: "Tensor", topk_weights: "Tensor") -> "Tensor":
        """See System.run."""
        self.dispatch(x, topk_idx, topk_weights)
        self.compute()
        return self.combine()

    def dispatch(self, x: "Tensor", topk_idx: "Tensor", topk_weights: "Tensor") -> None:
        """Counts, then rows with their expert ids and weights, grouped by destination rank."""
        import torch

        self._shape, self._top_k = x.shape, topk_idx.shape[1]
        self._goes, mine = destinations(topk_idx, self._num_local, self._ranks)
        theirs = torch.empty_like(mine)
        self._all_to_all(theirs, mine, None, None)
        # The one wait for the device: rows and routes, to send and to receive.
        counts = torch.stack([mine[:, 0], theirs[:, 0], theirs[:, 1]]).tolist()
        self._send, self._recv = counts[0], counts[1]
        self._num_routes = sum(counts[2])
        order = torch.argsort(self._goes.logical_not().reshape(-1), stable=True)
        tokens = order[: sum(self._send)] % max(1, x.shape[0])
        routing = torch.cat([topk_idx, topk_weights.view(torch.int32)], dim=1)
        self._x = self._exchange(x[tokens], self._send, self._recv)
        self._routing = self._exchange(routing[tokens], self._send, self._recv)

    def compute(self) -> None:
        """Local experts of every received row, summed per row."""
        import torch

        if self._num_routes == 0:
            self._y = torch.zeros_like(self._x)
            return
        self._y = self._experts(
            self._x,
            self._routing[:, : self._top_k],
            self._routing[:, self._top_k :].view(torch.float32),
            self._w13,
            self._w2,
            self._first_expert,
            self._num_routes,
        )

    def combine(self) -> "Tensor":
        """Partial sums back, added in fixed rank order in FP32."""
        partial = self._exchange(self._y, self._recv, self._send)
        if partial.shape[0] == 0:
            return partial.new_zeros(self._shape)
        y: Tensor = self._sum(partial, self._goes)
        return y

    def _exchange(self, rows: "Tensor", send: list[int], recv: list[int]) -> "Tensor":
        out = rows.new_empty((sum(recv), rows.shape[1]))
        self._all_to_all(out, rows.contiguous(), recv, send)
        return out

    def _all_to_all(
        self, out: "Tensor", rows: "Tensor", recv: list[int] | None, send: list[int] | None
    ) -> None:
        import torch.distributed as dist

        dist.all_to_all_single(out, rows, recv, send, group=self._group)

    def close(self) -> None:
        """Leave the NCCL group."""
        import torch.distributed as dist

        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


def destinations(topk_idx: "Tensor", num_local: int, ranks: int) -> tuple["Tensor", "Tensor"]:
    """Which token goes to which rank, bool [ranks, T], and how many (rows, routes) to each.

    ``topk_idx`` is [T, K] with -1 for a masked route; counts are int64 [ranks, 2].
    """
    import torch

    # Rounding down keeps -1 below every rank.
    owner = torch.div(topk_idx, num_local, rounding_mode="floor")
    hits = owner[None] == torch.arange(ranks, device=owner.device)[:, None, None]
    goes = hits.any(dim=2)
    return goes, torch.stack([goes.sum(dim=1), hits.sum(dim=(1, 2))], dim=1)


def sum_partials(partial: "Tensor", goes: "Tensor") -> "Tensor":
    """y [T, H] of partial sums [pairs, H] that lie by rank, then by token, where ``goes`` says."""
    import torch

    place = (goes.reshape(-1).cumsum(0) - 1).clamp(min=0).view(goes.shape)
    y = torch.zeros(goes.shape[1], partial.shape[1], dtype=torch.float32, device=partial.device)
    for here, rows in zip(goes.unbind(0), place.unbind(0), strict=True):
        y = y + torch.where(here[:, None], partial[rows].float(), 0.0)
    return y.to(partial.dtype)


def _nccl_problem(found: tuple[int, ...]) -> str | None:
    """Why an NCCL cannot serve ranks that share a GPU, or None."""
    if found >= _SHARED_GPU_NCCL:
        return None
    needed, here = (".".join(map(str, v)) for v in (_SHARED_GPU_NCCL, found))
    return (
        f"alltoall: several ranks on one GPU need NCCL {needed} or newer, found {here}; use a GPU "
        "per rank, or a torch that comes with a newer NCCL"
    )
