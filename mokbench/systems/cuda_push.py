"""The push baseline on the cuda fabric: kernels/push around torch's grouped GEMMs, no CPU sync."""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mokbench import jit
from mokbench.device_kernel import DeviceKernel
from mokbench.fabric.cuda import CudaFabric, SymmetricBuffer
from mokbench.workload import Model

_SOURCE = "push/push.cuh"
_THREADS = 512  # kPushThreads
_MAX_RANKS = 128  # kMaxRanks
_KERNELS = ("plan", "send", "sort", "give_back", "reduce")


class PushArgs(ctypes.Structure):
    """PushArgs of push.cuh."""

    _fields_ = (
        ("segments", ctypes.c_uint64 * _MAX_RANKS),
        ("rank", ctypes.c_uint32),
        ("num_tokens", ctypes.c_uint32),
        ("wait_bound_ns", ctypes.c_uint64),
        ("x", ctypes.c_uint64),
        ("topk_idx", ctypes.c_uint64),
        ("topk_weights", ctypes.c_uint64),
        ("y", ctypes.c_uint64),
        ("epoch", ctypes.c_uint64),
        ("finished", ctypes.c_uint64),
        ("barrier", ctypes.c_uint64),
        ("slot_of", ctypes.c_uint64),
        ("num_sent", ctypes.c_uint64),
        ("chunk_rows", ctypes.c_uint64),
        ("row_of", ctypes.c_uint64),
        ("expert_ends", ctypes.c_uint64),
        ("x_rows", ctypes.c_uint64),
        ("y_rows", ctypes.c_uint64),
    )


@dataclass(frozen=True)
class PushShape:
    """What a workspace is made for: BF16, ``max_tokens`` of one rank."""

    model: Model
    ranks: int
    max_tokens: int

    @property
    def local_experts(self) -> int:
        """Experts of each rank."""
        return self.model.experts // self.ranks

    @property
    def capacity_rows(self) -> int:
        """push_capacity_rows of protocol.h: the most rows one rank's experts can get."""
        return self.ranks * self.max_tokens * min(self.model.top_k, self.local_experts)

    @property
    def segment_bytes(self) -> int:
        """At least push_layout's segment: rows and meta received, partial sums, flags, counts."""
        rows = self.ranks * self.max_tokens
        meta_bytes = (2 + 2 * self.model.top_k) * 4
        return rows * (2 * self.model.hidden * 2 + meta_bytes) + self.ranks * 512 + (1 << 16)

    @property
    def config(self) -> str:
        """The kernels' template argument."""
        model = self.model
        return (
            f"mokbench::Config{{.num_ranks={self.ranks},.num_experts={model.experts},"
            f".top_k={model.top_k},.max_tokens={self.max_tokens},.hidden={model.hidden},"
            f".intermediate={model.intermediate}}}"
        )


class CudaPush:
    """One rank's push workspace; ``run`` is collective and queues everything on torch's stream.

    w13 [local experts, 2 I, H] and w2 [local experts, H, I] are BF16 on the rank's GPU.
    """

    def __init__(self, fabric: CudaFabric, shape: PushShape, w13: Tensor, w2: Tensor) -> None:
        self._fabric, self._shape = fabric, shape
        self._w13_t, self._w2_t = w13.transpose(1, 2), w2.transpose(1, 2)
        self._buffer: SymmetricBuffer = fabric.allocate(shape.segment_bytes)
        words: dict[str, Any] = {"dtype": torch.int32, "device": fabric.device}
        ranks, tokens = shape.ranks, shape.max_tokens
        self._epoch, self._finished, self._barrier = (torch.zeros(1, **words) for _ in range(3))
        self._slot_of = torch.zeros(tokens * ranks, **words)
        self._num_sent = torch.zeros(ranks, **words)
        self._chunk_rows = torch.zeros(fabric.num_sms * shape.local_experts, **words)
        self._row_of = torch.zeros(ranks * tokens * shape.model.top_k, **words)
        self._expert_ends = torch.zeros(shape.local_experts, **words)
        rows: dict[str, Any] = {"dtype": torch.bfloat16, "device": fabric.device}
        self._x_rows = torch.zeros(shape.capacity_rows, shape.model.hidden, **rows)
        self._y = torch.empty(tokens, shape.model.hidden, **rows)
        self._kernels = {
            name: DeviceKernel(
                jit.build(_SOURCE, f"mokbench::push_{name}<{shape.config}>", fabric.arch)
            )
            for name in _KERNELS
        }
        fabric.barrier()

    def run(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        """One pass: x [T, H] BF16, topk_idx [T, K] int32, topk_weights [T, K] float32 -> y."""
        y = self._y[: x.shape[0]]
        arguments = self._arguments(x, topk_idx, topk_weights, y)
        self._launch("plan", self._shape.ranks, arguments)
        self._launch("send", self._fabric.num_sms, arguments)
        self._launch("sort", self._fabric.num_sms, arguments, cooperative=True)
        y_rows = self._experts()
        arguments.y_rows = y_rows.data_ptr()
        self._launch("give_back", self._fabric.num_sms, arguments)
        self._launch("reduce", self._fabric.num_sms, arguments)
        return y

    def check(self) -> None:
        """Raise the fault that a wait of this rank recorded; synchronizes."""
        torch.cuda.synchronize()
        if fault := self._buffer.fault():
            raise fault

    def _experts(self) -> Tensor:
        gate_up = torch._grouped_mm(self._x_rows, self._w13_t, self._expert_ends)
        gate, up = gate_up.chunk(2, dim=1)
        hidden = torch.nn.functional.silu(gate.float()).mul_(up).to(torch.bfloat16)
        y_rows: Tensor = torch._grouped_mm(hidden, self._w2_t, self._expert_ends)
        return y_rows

    def _launch(self, name: str, grid: int, arguments: PushArgs, cooperative: bool = False) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self._kernels[name].launch(grid, _THREADS, [arguments], stream, cooperative)

    def _arguments(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, y: Tensor) -> PushArgs:
        return PushArgs(
            segments=(ctypes.c_uint64 * _MAX_RANKS)(*self._buffer.pointers),
            rank=self._fabric.rank,
            num_tokens=x.shape[0],
            wait_bound_ns=int(self._fabric.wait_bound_s * 1e9),
            x=x.data_ptr(),
            topk_idx=topk_idx.data_ptr(),
            topk_weights=topk_weights.data_ptr(),
            y=y.data_ptr(),
            epoch=self._epoch.data_ptr(),
            finished=self._finished.data_ptr(),
            barrier=self._barrier.data_ptr(),
            slot_of=self._slot_of.data_ptr(),
            num_sent=self._num_sent.data_ptr(),
            chunk_rows=self._chunk_rows.data_ptr(),
            row_of=self._row_of.data_ptr(),
            expert_ends=self._expert_ends.data_ptr(),
            x_rows=self._x_rows.data_ptr(),
        )
