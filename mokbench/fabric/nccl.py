"""NCCL as it is mapped into this process, and an NCCL group over a fabric's ranks.

torch.cuda.nccl.version() is the version torch was compiled with; the library that is mapped may be
a newer one, put before torch's own on sys.path, so the library itself is asked.
"""

import ctypes
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist

from mokbench.errors import UnsupportedError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from mokbench.fabric.cuda import CudaFabric

# In the first pass a peer may wait in a collective while another rank compiles.
_COMPILE_BOUND_S = 120.0
# NCCL takes no more by itself.
_MAX_CTAS = 32


def mapped_libraries(maps: str | None = None) -> list[str]:
    """Files of libnccl mapped into this process, each once; ``maps`` is /proc/self/maps."""
    if maps is None:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    lines = (line.split() for line in maps.splitlines() if "libnccl.so" in line)
    return sorted({fields[-1] for fields in lines})


def runtime_version() -> tuple[int, ...] | None:
    """(major, minor, patch) of the mapped library; None where several are.

    Where none is, NCCL is a part of torch, and torch's own.
    """
    libraries = mapped_libraries()
    if not libraries:
        from torch.cuda import nccl

        return tuple(nccl.version()[:3])  # type: ignore[no-untyped-call]
    if len(libraries) > 1:
        return None
    number = ctypes.c_int()
    if ctypes.CDLL(libraries[0]).ncclGetVersion(ctypes.byref(number)) != 0:
        return None
    return split_version(number.value)


def split_version(number: int) -> tuple[int, int, int]:
    """nccl.h's NCCL_VERSION_CODE from 2.9 on: 23004 is (2, 30, 4)."""
    return number // 10_000, number // 100 % 100, number % 100


def connect(fabric: "CudaFabric") -> "ProcessGroup":
    """An NCCL group over all ranks that has moved something; raises alike on every rank."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=max(_COMPILE_BOUND_S, 2 * fabric.wait_bound_s))
    if fabric.ranks_per_gpu > 1:
        # All ranks' kernels must fit on the GPU together, since each waits for the others.
        options.config.max_ctas = min(_MAX_CTAS, fabric.num_sms)
    group = dist.new_group(backend="nccl", timeout=options._timeout, pg_options=options)
    problem = None
    try:
        dist.all_reduce(torch.zeros(1, device=fabric.device), group=group)
        torch.cuda.synchronize()
    except RuntimeError as error:
        problem = str(error)
    if problems := fabric.problems(problem):
        raise UnsupportedError(f"NCCL does not connect these ranks: {problems}")
    return cast("ProcessGroup", group)
