"""Launches of kernels/expanded_rows.cuh: SwiGLU with weights, BF16 to FP8 and back."""

import ctypes

import torch
from torch import Tensor

from mokbench import jit
from mokbench.device_kernel import DeviceKernel
from mokbench.fabric.cuda import CudaFabric
from mokbench.systems.deepep_support import FP8_BLOCK

SOURCE = "expanded_rows.cuh"
_THREADS = 512  # kRowThreads


class RowsArgs(ctypes.Structure):
    """RowsArgs of expanded_rows.cuh."""

    _fields_ = (
        ("last_end", ctypes.c_uint64),
        ("num_rows", ctypes.c_uint32),
        ("input", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("weights", ctypes.c_uint64),
        ("scales", ctypes.c_uint64),
    )


class ExpandedRows:
    """Kernels over rows of ``hidden`` and ``intermediate`` BF16 elements; calls only queue.

    ``row_ends`` [E] int32: rows from the last one's value on are neither read nor written.
    """

    def __init__(self, hidden: int, intermediate: int, fabric: CudaFabric, fp8: bool) -> None:
        self._num_sms = fabric.num_sms
        names = {"weighted_swiglu": intermediate}
        if fp8:
            names |= {"quantize_rows": hidden, "dequantize_rows": hidden}
        sources = [(SOURCE, f"mokbench::{name}<{size}>") for name, size in names.items()]
        cubins = jit.build_all(sources, fabric.arch)
        self._kernels = dict(zip(names, map(DeviceKernel, cubins), strict=True))

    def swiglu(self, gate_up: Tensor, weights: Tensor, row_ends: Tensor, out: Tensor) -> Tensor:
        """out [M, I] = silu(gate) * up * weight of gate_up [M, 2 I], weights [M] FP32."""
        _expect(weights, (gate_up.shape[0],), torch.float32)
        arguments = RowsArgs(
            last_end=_last_end(row_ends),
            input=gate_up.data_ptr(),
            out=out.data_ptr(),
            weights=weights.data_ptr(),
        )
        self._launch("weighted_swiglu", arguments)
        return out

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] BF16 as E4M3 and its scales [T, H / 128] FP32, each amax / 448."""
        rows, hidden = x.shape
        values = torch.empty(rows, hidden, dtype=torch.float8_e4m3fn, device=x.device)
        scales = torch.empty(rows, hidden // FP8_BLOCK, dtype=torch.float32, device=x.device)
        if rows:
            arguments = RowsArgs(
                num_rows=rows,
                input=x.data_ptr(),
                out=values.data_ptr(),
                scales=scales.data_ptr(),
            )
            self._launch("quantize_rows", arguments)
        return values, scales

    def dequantize(
        self, values: Tensor, scales: Tensor, row_ends: Tensor | None, out: Tensor
    ) -> Tensor:
        """out [M, H] BF16 of E4M3 values [M, H] and scales [M, H / 128]; all rows without ends."""
        rows, hidden = values.shape
        _expect(scales, (rows, hidden // FP8_BLOCK), torch.float32)
        arguments = RowsArgs(
            last_end=0 if row_ends is None else _last_end(row_ends),
            num_rows=rows,
            input=values.data_ptr(),
            out=out.data_ptr(),
            scales=scales.data_ptr(),
        )
        self._launch("dequantize_rows", arguments)
        return out

    def _launch(self, name: str, arguments: RowsArgs) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self._kernels[name].launch(self._num_sms, _THREADS, [arguments], stream)


def _last_end(row_ends: Tensor) -> int:
    assert row_ends.dtype == torch.int32, f"row ends are {row_ends.dtype}, not int32"
    return row_ends.data_ptr() + 4 * (row_ends.numel() - 1)


def _expect(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    found = (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous())
    assert found == (shape, dtype, True), f"{found}, where {shape} of {dtype} belongs"
