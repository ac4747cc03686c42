"""Tensor maps for bulk copies (TMA) of BF16 matrices."""

import ctypes

from mokbench.device_kernel import CudaError

TensorMap = ctypes.Array[ctypes.c_ubyte]

# cuda.h: CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion.
_BFLOAT16 = 9
_SWIZZLES = {64: 2, 128: 3}
_L2_256B = 3
_BYTES, _ALIGNMENT = 128, 128


def tensor_map(address: int, rows: int, columns: int, box_rows: int, box_columns: int) -> TensorMap:
    """A map of [rows, columns] BF16 without gaps at a multiple of 16 bytes.

    A box is swizzled by its own width, 64 or 128 bytes. Beyond the matrix's ends boxes read zeros
    and write nothing.
    """
    raw = ctypes.create_string_buffer(_BYTES + _ALIGNMENT)
    # The driver wants the struct aligned; ctypes promises less.
    encoded = (ctypes.c_ubyte * _BYTES).from_buffer(raw, -ctypes.addressof(raw) % _ALIGNMENT)
    code = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.byref(encoded),
        ctypes.c_uint32(_BFLOAT16),
        ctypes.c_uint32(2),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(columns * 2),
        (ctypes.c_uint32 * 2)(box_columns, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        ctypes.c_uint32(0),
        ctypes.c_uint32(_SWIZZLES[box_columns * 2]),
        ctypes.c_uint32(_L2_256B),
        ctypes.c_uint32(0),
    )
    if code != 0:
        raise CudaError(
            f"cuTensorMapEncodeTiled: error {code} for [{rows}, {columns}] with boxes of "
            f"[{box_rows}, {box_columns}]"
        )
    return encoded
