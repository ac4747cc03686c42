"""MoK's memory and launch on one GPU.

Nothing here waits for the GPU or allocates between passes, so a pass can be captured in a CUDA
graph.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from mokbench import jit
from mokbench.device_kernel import DeviceKernel
from mokbench.errors import UnsupportedError
from mokbench.fabric.cuda import MAX_RANKS, CudaFabric, SymmetricBuffer
from mokbench.gemm_config import HALF_COLS
from mokbench.grouped_gemm import Matrix, pack_gate_up
from mokbench.mok_config import BLOCK_K, SOURCE, STAMPS, THREADS, MokConfig
from mokbench.systems.kernel_arch import mok_arch_reason
from mokbench.tensor_map import tensor_map

_SWIGLU_COLUMNS = 32  # of one store: a consumer warpgroup's, behind SwiGLU


class MokArgs(ctypes.Structure):
    """MokArgs of mok/pass.cuh."""

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
        ("staged", ctypes.c_uint64),
        ("barrier", ctypes.c_uint64),
        ("next_item", ctypes.c_uint64),
        ("finished", ctypes.c_uint64),
        ("rings", ctypes.c_uint64),
        ("num_groups", ctypes.c_uint64),
        ("chunk_rows", ctypes.c_uint64),
        ("table", ctypes.c_uint64),
        ("tile_ends", ctypes.c_uint64),
        ("groups", ctypes.c_uint64),
        ("x_ring", ctypes.c_uint64),
        ("hidden_ring", ctypes.c_uint64),
        ("stamps", ctypes.c_uint64),
    )


def mok_maps(
    config: MokConfig, gate_up: Matrix, down: Matrix, x_ring: Matrix, hidden_ring: Matrix
) -> ctypes.Array[ctypes.c_ubyte]:
    """MokMaps of mok/pass.cuh; all experts' weights are one matrix, gate and up packed."""

    def box(matrix: Matrix, rows: int, columns: int) -> bytes:
        return bytes(tensor_map(matrix.address, matrix.rows, matrix.columns, rows, columns))

    maps = [box(hidden_ring, config.tiles.store_rows, _SWIGLU_COLUMNS)]
    for weights, rows in ((gate_up, x_ring), (down, hidden_ring)):
        maps += [box(weights, height, BLOCK_K) for height in (HALF_COLS, 2 * HALF_COLS)]
        maps += [box(rows, height, BLOCK_K) for height in config.tiles.row_boxes]
    joined = b"".join(maps)
    return (ctypes.c_ubyte * len(joined)).from_buffer_copy(joined)


class MokWorkspace:
    """One rank's share of a MoK layer; every method but ``check`` is collective and only queues.

    w13 [local experts, 2 I, H] (packed here, a copy) and w2 [local experts, H, I], BF16.
    """

    def __init__(self, fabric: CudaFabric, config: MokConfig, w13: Tensor, w2: Tensor) -> None:
        if reason := mok_arch_reason(fabric.arch):
            raise UnsupportedError(reason)
        self.config, self._fabric = config, fabric
        self._buffer: SymmetricBuffer = fabric.allocate(config.segment_bytes)
        model, device = config.model, fabric.device
        self._scratch = {
            name: torch.zeros(words, dtype=torch.int32, device=device)
            for name, words in config.scratch_words().items()
        }
        rows: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
        tile_rows = config.tiles.tile_rows
        self._x_ring = torch.zeros(config.ring_tiles * tile_rows, model.hidden, **rows)
        self._hidden_ring = torch.zeros(
            config.hidden_ring_tiles * tile_rows, model.intermediate, **rows
        )
        self._y = torch.zeros(config.max_tokens, model.hidden, **rows)
        self._stamps = torch.zeros(
            config.num_sms if config.stamps else 0, len(STAMPS), dtype=torch.int64, device=device
        )
        self._weights = pack_gate_up(w13), w2
        matrices = map(_matrix, (*self._weights, self._x_ring, self._hidden_ring))
        self._maps = mok_maps(config, *matrices)
        cubin = jit.build(SOURCE, config.expression, fabric.arch)
        self._kernel = DeviceKernel(cubin, config.tiles.shared_bytes)
        self._arguments = self._fixed_arguments()
        # Held, so that no other tensor gets its memory.
        self._staged: tuple[Tensor, int] | None = None
        fabric.barrier()

    def reset(self) -> None:
        """Ready for a first pass again, after a fault; waits for the GPU."""
        torch.cuda.synchronize()
        self._fabric.barrier()
        self._buffer.own.zero_()
        self._staged = None
        for tensor in self._scratch.values():
            tensor.zero_()
        torch.cuda.synchronize()
        self._fabric.barrier()

    def run(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, zero_copy: bool = False
    ) -> Tensor:
        """y [T, H] of a whole pass.

        ``zero_copy``: an x that the pass before had, unchanged since, is not staged again, as if
        the layer before this one had written it into the segment.
        """
        self._take_inputs(x, topk_idx, topk_weights)
        if zero_copy and self._lies_there(x):
            self._arguments.x = 0
        stream = torch.cuda.current_stream().cuda_stream
        arguments = [self._arguments, self._maps]
        self._kernel.launch(self.config.num_sms, THREADS, arguments, stream, cooperative=True)
        return self._y[: x.shape[0]]

    def _lies_there(self, x: Tensor) -> bool:
        """Whether the pass before staged this x; remembers it for the next one."""
        before = self._staged
        # Of an inference tensor no one knows whether it has changed.
        self._staged = None if x.is_inference() else (x, x._version)
        if before is None or self._staged is None:
            return False
        return before[0] is x and before[1] == x._version

    def check(self) -> None:
        """Raise the fault that a wait of this rank recorded; waits for the GPU."""
        torch.cuda.synchronize()
        if fault := self._buffer.fault():
            raise fault

    @property
    def stamps(self) -> Tensor:
        """[CTA, STAMPS] of the last pass, on the CPU; waits for the GPU. Empty without stamps."""
        return self._stamps.cpu()

    def _take_inputs(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> None:
        num_tokens, model = x.shape[0], self.config.model
        assert num_tokens <= self.config.max_tokens, f"{num_tokens} tokens do not fit"
        _expect(x, (num_tokens, model.hidden), torch.bfloat16)
        _expect(topk_idx, (num_tokens, model.top_k), torch.int32)
        _expect(topk_weights, (num_tokens, model.top_k), torch.float32)
        arguments = self._arguments
        arguments.num_tokens = num_tokens
        arguments.x = x.data_ptr()
        arguments.topk_idx = topk_idx.data_ptr()
        arguments.topk_weights = topk_weights.data_ptr()

    def _fixed_arguments(self) -> MokArgs:
        scratch = {name: tensor.data_ptr() for name, tensor in self._scratch.items()}
        return MokArgs(
            segments=(ctypes.c_uint64 * MAX_RANKS)(*self._buffer.pointers),
            rank=self._fabric.rank,
            wait_bound_ns=int(self._fabric.wait_bound_s * 1e9),
            y=self._y.data_ptr(),
            x_ring=self._x_ring.data_ptr(),
            hidden_ring=self._hidden_ring.data_ptr(),
            stamps=self._stamps.data_ptr(),
            **scratch,
        )


def _matrix(tensor: Tensor) -> Matrix:
    columns = tensor.shape[-1]
    return Matrix(tensor.data_ptr(), tensor.numel() // columns, columns)


def _expect(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """What the kernel takes for granted: its loads are 16 bytes wide."""
    found = (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous(), tensor.data_ptr() % 16)
    assert found == (shape, dtype, True, 0), f"{found}, where {shape} of {dtype} belongs"
