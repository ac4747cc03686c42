"""Loading a cubin and launching it on torch's stream, with structs by value.

cuda-core's own launch takes neither structs nor dynamic shared memory above 48 KiB, so the driver's
cuLaunchKernelEx is called with packed arguments.
"""

import ctypes
from typing import Any

from mokbench.errors import MokbenchError
from mokbench.jit import Cubin

_STATIC_SHARED_LIMIT = 48 * 1024


class CudaError(MokbenchError):
    """The CUDA driver refused a call; the message names the call and the error."""


def checked(call: str, result: tuple[Any, ...]) -> Any:
    """The value of a cuda.bindings driver call; raises CudaError unless it succeeded."""
    code, *values = result
    if int(code) != 0:
        raise CudaError(f"{call}: {code.name}")
    return values[0] if len(values) == 1 else values


class DeviceKernel:
    """A kernel loaded into torch's current context.

    ``shared_bytes`` is its dynamic shared memory per CTA.
    """

    def __init__(self, cubin: Cubin, shared_bytes: int = 0) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._shared_bytes = shared_bytes
        # Making one takes longer than a launch, and a system launches alike in every pass.
        self._configs: dict[tuple[int, int, int, bool], Any] = {}
        self._module = checked("cuModuleLoadData", driver.cuModuleLoadData(cubin.code))
        self._function = checked(
            "cuModuleGetFunction",
            driver.cuModuleGetFunction(self._module, cubin.symbol.encode()),
        )
        if shared_bytes + cubin.resources.static_shared_bytes > _STATIC_SHARED_LIMIT:
            attribute = driver.CUfunction_attribute
            checked(
                "cuFuncSetAttribute",
                driver.cuFuncSetAttribute(
                    self._function,
                    attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    shared_bytes,
                ),
            )

    def launch(
        self,
        grid: int,
        block: int,
        arguments: list[Any],
        stream: int,
        cooperative: bool = False,
    ) -> None:
        """Queue ``grid`` CTAs of ``block`` threads on ``stream`` (a cudaStream_t as an integer).

        ``arguments`` are ctypes scalars and structures, passed by value.

        ``cooperative`` guarantees that all CTAs run at the same time, or the launch fails.
        """
        driver = self._driver
        key = (grid, block, stream, cooperative)
        config = self._configs.get(key)
        if config is None:
            config = self._configs.setdefault(key, self._config(*key))
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        checked(
            "cuLaunchKernelEx",
            driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(pointers), 0),
        )

    def _config(self, grid: int, block: int, stream: int, cooperative: bool) -> Any:
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes = self._shared_bytes
        config.hStream = driver.CUstream(stream)
        if cooperative:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
            config.attrs, config.numAttrs = [attribute], 1
        return config
