"""The project's grouped GEMM on sm_90 (kernels/gemm): out[r] = x[r] @ w[expert of r].T, in BF16.

Rows are sorted by expert and the experts' row counts are read on the device, so a call only queues
work and a CUDA graph can hold it. Sums are FP32 and added in a fixed order. Without ``split_k``
what a row gets depends on neither the tile it fell into nor the number of SMs; with it, rows of the
last tiles are sums of parts, whose number depends on both.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from mokbench import jit
from mokbench.device_kernel import DeviceKernel
from mokbench.errors import UnsupportedError
from mokbench.gemm_config import (
    BLOCK_K,
    HALF_COLS,
    PART_BYTES,
    PARTS_A_CTA,
    SOURCE,
    GemmConfig,
    gemm_problem,
)
from mokbench.tensor_map import TensorMap, tensor_map

THREADS = 384  # kGemmThreads
_PACKED_ROWS = 8
_MAX_MAPS = 64


class GemmArgs(ctypes.Structure):
    """GemmArgs of gemm/grouped.cuh."""

    _fields_ = (
        ("row_ends", ctypes.c_uint64),
        ("row_weights", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("next", ctypes.c_uint64),
        ("parts", ctypes.c_uint64),
        ("parts_there", ctypes.c_uint64),
        ("num_experts", ctypes.c_uint32),
        ("n", ctypes.c_uint32),
        ("k", ctypes.c_uint32),
    )


def pack_gate_up(w13: Tensor) -> Tensor:
    """Weights for the SwiGLU epilogue: [E, 2 I, H], gate rows then up rows, to 8 and 8 in turn.

    A thread of the kernel then holds gate and up of the same column. I is a multiple of 64.
    """
    experts, rows, hidden = w13.shape
    halves = w13.view(experts, 2, rows // 2 // _PACKED_ROWS, _PACKED_ROWS, hidden)
    return halves.transpose(1, 2).contiguous().view(experts, rows, hidden)


class GroupedGemm:
    """Calls with one set of weights [E, N, K] (packed by ``pack_gate_up`` for SwiGLU).

    ``num_sms`` is the grid, so that ranks that share a GPU leave each other room. Calls of one
    object must not overlap: they share a counter.
    """

    def __init__(self, weights: Tensor, config: GemmConfig, num_sms: int, arch: str) -> None:
        experts, n, k = weights.shape
        if problem := gemm_problem(experts, n, k):
            raise UnsupportedError(problem)
        _expect(weights, (experts, n, k), torch.bfloat16)
        self.config, self.num_sms = config, num_sms
        self._weights = weights
        self._columns = n // 2 if config.swiglu else n
        cubin = jit.build(SOURCE, config.expression, arch)
        self._kernel = DeviceKernel(cubin, config.shared_bytes)
        self._next = torch.zeros(2, dtype=torch.int32, device=weights.device)
        self._arguments = GemmArgs(next=self._next.data_ptr(), num_experts=experts, n=n, k=k)
        if config.split_k:
            parts = PARTS_A_CTA * num_sms
            self._parts = torch.empty(parts * PART_BYTES, dtype=torch.uint8, device=weights.device)
            self._parts_there = torch.zeros(2 * parts, dtype=torch.int32, device=weights.device)
            self._arguments.parts = self._parts.data_ptr()
            self._arguments.parts_there = self._parts_there.data_ptr()
        self._maps: dict[tuple[int, int, int, int], ctypes.Array[ctypes.c_ubyte]] = {}

    def __call__(
        self, x: Tensor, row_ends: Tensor, out: Tensor, row_weights: Tensor | None = None
    ) -> Tensor:
        """Queue out [M, N] (N / 2 by SwiGLU) from x [M, K]; rows behind the last end keep theirs.

        ``row_ends`` [E] int32 rises to at most M; expert e has the rows from row_ends[e - 1] on.
        ``row_weights`` [M] FP32 where the config asks for them.
        """
        rows = x.shape[0]
        _expect(x, (rows, self._weights.shape[2]), torch.bfloat16)
        _expect(out, (rows, self._columns), torch.bfloat16)
        _expect(row_ends, (self._weights.shape[0],), torch.int32)
        if rows == 0:
            return out
        arguments = self._arguments
        if self.config.row_weights != (row_weights is not None):
            raise ValueError("row_weights belong to configs with row_weights, and only to them")
        if row_weights is not None:
            _expect(row_weights, (rows,), torch.float32)
            arguments.row_weights = row_weights.data_ptr()
        arguments.row_ends, arguments.out = row_ends.data_ptr(), out.data_ptr()
        stream = torch.cuda.current_stream().cuda_stream
        self._kernel.launch(self.num_sms, THREADS, [self._maps_of(x, out), arguments], stream)
        return out

    def _maps_of(self, x: Tensor, out: Tensor) -> ctypes.Array[ctypes.c_ubyte]:
        """Encoding takes microseconds on the CPU; a system calls with the same buffers again."""
        key = (x.data_ptr(), x.shape[0], out.data_ptr(), out.shape[0])
        if key not in self._maps:
            while len(self._maps) >= _MAX_MAPS:
                self._maps.pop(next(iter(self._maps)))
            self._maps[key] = gemm_maps(self.config, *map(_matrix, (self._weights, x, out)))
        return self._maps[key]


@dataclass(frozen=True)
class Matrix:
    """BF16 in the GPU's memory: ``rows`` times ``columns``, without gaps."""

    address: int
    rows: int
    columns: int


def gemm_maps(
    config: GemmConfig, weights: Matrix, x: Matrix, out: Matrix
) -> ctypes.Array[ctypes.c_ubyte]:
    """GemmMaps of kernels/gemm/grouped.cuh; all experts' weights are one matrix."""
    maps = [_map_of(out, config.store_rows, config.store_columns)]
    maps += [_map_of(weights, columns, BLOCK_K) for columns in (HALF_COLS, 2 * HALF_COLS)]
    maps += [_map_of(x, rows, BLOCK_K) for rows in config.row_boxes]
    joined = b"".join(bytes(each) for each in maps)
    return (ctypes.c_ubyte * len(joined)).from_buffer_copy(joined)


def _map_of(matrix: Matrix, box_rows: int, box_columns: int) -> TensorMap:
    return tensor_map(matrix.address, matrix.rows, matrix.columns, box_rows, box_columns)


def _matrix(tensor: Tensor) -> Matrix:
    columns = tensor.shape[-1]
    return Matrix(tensor.data_ptr(), tensor.numel() // columns, columns)


def _expect(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Bulk copies start at multiples of 16 bytes and know no strides here."""
    if not tensor.is_cuda:
        raise ValueError(f"found a tensor on {tensor.device}, where one on the GPU belongs")
    found = (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous(), tensor.data_ptr() % 16)
    if found != (shape, dtype, True, 0) and (tensor.numel() or found[:2] != (shape, dtype)):
        raise ValueError(
            f"found {found[0]} of {dtype if dtype == found[1] else found[1]}, contiguous "
            f"{found[2]}, {found[3]} bytes off a 16-byte address, where {shape} of {dtype} belongs"
        )
