"""The push baseline's memory and launches on one GPU: kernels/push around grouped GEMMs.

Nothing here waits for the GPU or allocates between passes, apart from the outputs of torch's GEMMs,
which its allocator gives; so a pass can be captured in a CUDA graph.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mokbench import jit
from mokbench.device_kernel import DeviceKernel
from mokbench.fabric.cuda import MAX_RANKS, CudaFabric, SymmetricBuffer
from mokbench.systems.cuda_push import PushShape
from mokbench.systems.expert_gemms import ExpertGemms
from mokbench.systems.gemm_choice import GemmChoice

_THREADS = 512  # kPushThreads
# Each kernel's file under kernels/push.
KERNELS = {
    "plan": "dispatch",
    "send": "dispatch",
    "sort": "experts",
    "swiglu": "experts",
    "give_back": "combine",
    "reduce": "combine",
}


class PushArgs(ctypes.Structure):
    """PushArgs of push/pass.cuh."""

    _fields_ = (
        ("segments", ctypes.c_uint64 * MAX_RANKS),
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
        ("gate_up", ctypes.c_uint64),
        ("activated", ctypes.c_uint64),
        ("y_rows", ctypes.c_uint64),
    )


def kernel_sources(shape: PushShape) -> list[tuple[str, str]]:
    """Source and C++ expression of each of ``KERNELS`` for a shape."""
    return [
        (f"push/{file}.cuh", f"mokbench::push_{name}<{shape.config}>")
        for name, file in KERNELS.items()
    ]


@dataclass(frozen=True)
class _Scratch:
    """What the kernels keep on their own rank, int32; all zero before the first pass."""

    epoch: Tensor
    finished: Tensor
    barrier: Tensor
    slot_of: Tensor
    num_sent: Tensor
    chunk_rows: Tensor
    row_of: Tensor
    expert_ends: Tensor

    @classmethod
    def zeros(cls, shape: PushShape, num_sms: int, device: torch.device) -> "_Scratch":
        words = shape.scratch_words(num_sms)
        return cls(
            **{
                name: torch.zeros(count, dtype=torch.int32, device=device)
                for name, count in words.items()
            }
        )


class PushWorkspace:
    """One rank's share of a push layer; every method but ``check`` is collective and only queues.

    ``weights`` are w13 [local experts, 2 I, H] and w2 [local experts, H, I], BF16 on the rank's
    GPU. ``num_sms`` is the grid of the kernels that move rows, the same in every pass. The GEMMs
    are ours as ``choice`` says, or torch's.
    """

    def __init__(
        self,
        fabric: CudaFabric,
        shape: PushShape,
        weights: tuple[Tensor, Tensor],
        num_sms: int,
        choice: GemmChoice | None,
    ) -> None:
        self._fabric, self._shape, self._num_sms = fabric, shape, num_sms
        self._buffer: SymmetricBuffer = fabric.allocate(shape.segment_bytes)
        self._scratch = _Scratch.zeros(shape, num_sms, fabric.device)
        rows: dict[str, Any] = {"dtype": torch.bfloat16, "device": fabric.device}
        model, capacity = shape.model, shape.capacity_rows
        self._x_rows = torch.zeros(capacity, model.hidden, **rows)
        self._y = torch.zeros(shape.max_tokens, model.hidden, **rows)
        self._y_rows: Tensor | None = None
        self._activated, self._ours = None, None
        if choice is None:
            self._torch_weights = [w.transpose(1, 2) for w in weights]
            self._activated = torch.zeros(capacity, model.intermediate, **rows)
        else:
            # All of the rank's SMs: nothing else of it runs meanwhile.
            self._ours = ExpertGemms(*weights, capacity, choice, fabric.num_sms, fabric.arch)
        cubins = jit.build_all(kernel_sources(shape), fabric.arch)
        self._kernels = dict(zip(KERNELS, map(DeviceKernel, cubins), strict=True))
        self._arguments = self._fixed_arguments()
        fabric.barrier()

    def reset(self) -> None:
        """Ready for a first pass again, after a fault; waits for the GPU."""
        torch.cuda.synchronize()
        self._fabric.barrier()
        self._buffer.own.zero_()
        for tensor in vars(self._scratch).values():
            tensor.zero_()
        torch.cuda.synchronize()
        self._fabric.barrier()

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> None:
        """Rows, ids and weights to their experts' ranks; ends when those of all ranks are here."""
        self._take_inputs(x, topk_idx, topk_weights)
        self._launch("plan", self._shape.ranks)
        self._launch("send", self._num_sms)

    def compute(self) -> None:
        """Place the received rows among their experts', gate and up, SwiGLU, down."""
        self._launch("sort", self._num_sms, cooperative=True)
        ends = self._scratch.expert_ends
        # Rows behind the last expert's end are garbage in all outputs; no kernel reads them.
        if self._ours is not None:
            self._y_rows = self._ours(self._x_rows, ends)
            return
        assert self._activated is not None
        w13_t, w2_t = self._torch_weights
        gate_up = torch._grouped_mm(self._x_rows, w13_t, ends)
        self._arguments.gate_up = gate_up.data_ptr()
        self._launch("swiglu", self._num_sms)
        self._y_rows = torch._grouped_mm(self._activated, w2_t, ends)

    def combine(self) -> Tensor:
        """Weighted sums back to their tokens' ranks, and there added: y [T, H]."""
        assert self._y_rows is not None, "compute() comes first"
        self._arguments.y_rows = self._y_rows.data_ptr()
        self._launch("give_back", self._num_sms)
        self._launch("reduce", self._num_sms)
        # Later work of this stream may have the memory; nothing reads it any more by then.
        self._y_rows = None
        return self._y[: self._arguments.num_tokens]

    @property
    def gemm_notes(self) -> Sequence[str]:
        """How our GEMMs' tiles were chosen; none for torch's."""
        return () if self._ours is None else self._ours.notes

    def check(self) -> None:
        """Raise the fault that a wait of this rank recorded; waits for the GPU."""
        torch.cuda.synchronize()
        if fault := self._buffer.fault():
            raise fault

    def _launch(self, name: str, grid: int, cooperative: bool = False) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self._kernels[name].launch(grid, _THREADS, [self._arguments], stream, cooperative)

    def _take_inputs(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> None:
        num_tokens, model = x.shape[0], self._shape.model
        assert num_tokens <= self._shape.max_tokens, f"{num_tokens} tokens do not fit"
        _expect(x, (num_tokens, model.hidden), torch.bfloat16)
        _expect(topk_idx, (num_tokens, model.top_k), torch.int32)
        _expect(topk_weights, (num_tokens, model.top_k), torch.float32)
        arguments = self._arguments
        arguments.num_tokens = num_tokens
        arguments.x = x.data_ptr()
        arguments.topk_idx = topk_idx.data_ptr()
        arguments.topk_weights = topk_weights.data_ptr()

    def _fixed_arguments(self) -> PushArgs:
        scratch = {name: tensor.data_ptr() for name, tensor in vars(self._scratch).items()}
        return PushArgs(
            segments=(ctypes.c_uint64 * MAX_RANKS)(*self._buffer.pointers),
            rank=self._fabric.rank,
            wait_bound_ns=int(self._fabric.wait_bound_s * 1e9),
            y=self._y.data_ptr(),
            x_rows=self._x_rows.data_ptr(),
            activated=0 if self._activated is None else self._activated.data_ptr(),
            **scratch,
        )


def _expect(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """What the kernels take for granted: their loads are 16 bytes wide."""
    found = (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous(), tensor.data_ptr() % 16)
    assert found == (shape, dtype, True, 0), f"{found}, where {shape} of {dtype} belongs"
