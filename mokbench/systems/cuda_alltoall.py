"""NCCL all_to_all_single around grouped GEMMs: what plain PyTorch gives on GPUs.

Each (token, rank) pair crosses once, with its expert ids and weights; the destination sums its
experts' outputs and sends one row back. all_to_all_single takes its split sizes from the CPU, so
every pass exchanges row counts first and waits once for them to come down from the device: the
price of this interface, paid inside dispatch. A CUDA graph cannot hold that wait.
"""

import os
from typing import TYPE_CHECKING, ClassVar, cast

from mokbench.errors import UnsupportedError
from mokbench.reach import reach_reason
from mokbench.systems import InPhases, Setup, expect_options, options_of
from mokbench.systems.cuda_local import layer_bytes, require_fast_kernels, tile_reason
from mokbench.systems.gpu_support import (
    grouped_mm_reason,
    nccl_version,
    ranks_per_gpu,
    shared_gpu_reason,
)
from mokbench.systems.options import AlltoallOptions
from mokbench.systems.torch_gemms import TorchGemmLimit
from mokbench.workload import Cell

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from mokbench.fabric.cuda import CudaFabric

MULTI_RANK = "NCCL_MULTI_RANK_GPU_ENABLE"


class Alltoall(InPhases):
    """Dispatch and combine by all_to_all_single over an NCCL group of its own."""

    name: ClassVar[str] = "alltoall"
    deterministic: ClassVar[bool] = True
    traffic: ClassVar[str | None] = "per_rank"
    signal: ClassVar[str | None] = None

    def __init__(self) -> None:
        self._group: ProcessGroup | None = None
        self._limit: TorchGemmLimit | None = None

    @staticmethod
    def supports(cell: Cell) -> str | None:
        """A GPU per rank, or an NCCL that lets ranks share one on a single node; no graphs."""
        options = expect_options(options_of(cell), AlltoallOptions)
        if cell.graph:
            return (
                "alltoall reads row counts on the CPU in every pass, which a CUDA graph cannot "
                "hold; set graph: false"
            )
        reason = tile_reason(options.block_m) or grouped_mm_reason(cell, options.compile)
        reason = reason or reach_reason(cell, "collectives", "alltoall")
        if reason is None and ranks_per_gpu(cell) > 1:
            reason = shared_gpu_reason(nccl_version())
        return reason

    @staticmethod
    def workspace_bytes(cell: Cell) -> int:
        """Rows out, in, back and returned, and the layer on received rows; balanced routing."""
        work = cell.workload
        routes = work.tokens_per_rank * work.model.top_k
        pairs = work.tokens_per_rank * min(work.model.top_k, work.ranks)
        row_bytes = work.model.hidden * work.dtype.num_bytes + 2 * 4 * work.model.top_k
        return 4 * pairs * row_bytes + layer_bytes(routes, 1, cell)

    def prepare(self, setup: Setup) -> None:
        """The NCCL group, which connects now, and what will be compiled in the first pass."""
        from mokbench.fabric.nccl import connect
        from mokbench.systems import grouped_experts as experts

        fabric = cast("CudaFabric", setup.fabric)
        options = expect_options(setup.options, AlltoallOptions)
        require_fast_kernels()
        self._ranks = setup.workload.ranks
        self._num_local = setup.num_local_experts
        self._first_expert = setup.rank * setup.num_local_experts
        self._weights = setup.w13, setup.w2
        maybe_compiled = experts.compiled if options.compile else experts.as_written
        self._plan = maybe_compiled(plan_sends)
        self._layer = maybe_compiled(experts.expert_layer)
        self._sum = maybe_compiled(experts.sum_slots)
        if fabric.ranks_per_gpu > 1:
            _require_shared_gpu()
        self._limit = TorchGemmLimit(fabric)
        self._group = connect(fabric)

    def dispatch(self, x: "Tensor", topk_idx: "Tensor", topk_weights: "Tensor") -> None:
        """Counts, the wait for them, then rows with their expert ids and weights."""
        import torch
        import torch.distributed as dist

        plan = self._plan if x.shape[0] else plan_sends
        order, counts = plan(topk_idx, self._ranks, self._num_local)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self._group)
        sent, recv = torch.stack([counts, received]).tolist()
        self._send_rows = [rows for rows, _ in sent]
        self._recv_rows = [rows for rows, _ in recv]
        self._num_routes = sum(routes for _, routes in recv)
        self._num_tokens = x.shape[0]
        self._order: Tensor = order
        tokens = order[: sum(self._send_rows)] % max(1, x.shape[0])
        routing = torch.cat([topk_idx, topk_weights.view(torch.int32)], dim=1)
        self._x = self._exchange(x[tokens], self._recv_rows, self._send_rows)
        self._routing = self._exchange(routing[tokens], self._recv_rows, self._send_rows)

    def compute(self) -> None:
        """Local experts of every received row, summed per row."""
        import torch

        if self._num_routes == 0:
            self._y = torch.zeros_like(self._x)
            return
        topk_idx, weights = self._routing.chunk(2, dim=1)
        self._y = self._layer(
            self._x,
            topk_idx.contiguous(),
            weights.contiguous().view(torch.float32),
            *self._weights,
            self._first_expert,
            self._num_routes,
        )

    def combine(self) -> "Tensor":
        """Partial sums back, added in fixed rank order in FP32."""
        from mokbench.systems.grouped_experts import inverse

        num_sent = sum(self._send_rows)
        partial = self._exchange(self._y, self._send_rows, self._recv_rows)
        if num_sent == 0:
            return partial.new_zeros(self._num_tokens, partial.shape[1])
        slots = inverse(self._order).view(self._ranks, self._num_tokens).T
        return self._sum(partial, slots, num_sent, None)

    def close(self) -> None:
        """Leave the group, give the GEMMs all SMs again."""
        import torch
        import torch.distributed as dist

        if self._group is not None:
            torch.cuda.synchronize()
            dist.destroy_process_group(self._group)
            self._group = None
        if self._limit is not None:
            self._limit.lift()
            self._limit = None

    def _exchange(self, rows: "Tensor", recv: list[int], send: list[int]) -> "Tensor":
        import torch.distributed as dist

        out = rows.new_empty(sum(recv), rows.shape[1])
        dist.all_to_all_single(out, rows, recv, send, group=self._group)
        return out


def plan_sends(topk_idx: "Tensor", ranks: int, num_local: int) -> tuple["Tensor", "Tensor"]:
    """(rank, token) pairs, those to send ahead, by rank, then token; rows and routes per rank.

    A pair is rank * T + token. Counts are int64 [ranks, 2].
    """
    import torch

    owners = topk_idx // num_local  # floor: masked routes stay -1
    peers = torch.arange(ranks, dtype=owners.dtype, device=owners.device)
    is_routed = owners == peers[:, None, None]
    is_sent = is_routed.any(dim=2)
    counts = torch.stack([is_sent.sum(dim=1), is_routed.sum(dim=(1, 2))], dim=1)
    order = torch.argsort(torch.where(is_sent, 0, 1).int().reshape(-1), stable=True)
    return order, counts


def _require_shared_gpu() -> None:
    """UnsupportedError unless NCCL will take several ranks on one GPU."""
    from mokbench.fabric.nccl import runtime_version

    reason = shared_gpu_reason(runtime_version())
    if reason is None and os.environ.get(MULTI_RANK) != "1":
        reason = f"several ranks on one GPU need {MULTI_RANK}=1 in the ranks' environment"
    if reason:
        raise UnsupportedError(reason)
