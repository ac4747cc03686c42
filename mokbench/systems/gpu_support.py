"""What the plain PyTorch systems need on the cuda fabric, asked without importing torch."""

import os
import re
import shutil
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from mokbench import machine
from mokbench.errors import UnsupportedError
from mokbench.gpus import ranks_a_gpu, visible_gpus
from mokbench.workload import Cell, Dtype

# TMA strides of torch._grouped_mm are multiples of 16 bytes; its group count is below 1024.
_ALIGNED_ELEMENTS = 8
_MAX_GROUPS = 1023
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
MULTI_RANK_NCCL = (2, 30)
DEFAULT_BLOCK_M = 64


def ranks_per_gpu(cell: Cell) -> int:
    """Ranks that share a GPU of this node; 0 where no GPU is visible."""
    work, gpus = cell.workload, visible_gpus()
    return ranks_a_gpu(-(-work.ranks // work.nodes), gpus) if gpus else 0


def grouped_mm_reason(cell: Cell, compile_: bool) -> str | None:
    """Why torch._grouped_mm, compiled or not, cannot run this cell here, or None."""
    work = cell.workload
    if work.dtype is not Dtype.BF16:
        return f"torch._grouped_mm multiplies bf16, not {work.dtype}; set dtype: bf16"
    for name in ("hidden", "intermediate"):
        size = getattr(work.model, name)
        if size % _ALIGNED_ELEMENTS:
            return (
                f"torch._grouped_mm needs rows of a multiple of 16 bytes and {name} is {size}; "
                f"make it a multiple of {_ALIGNED_ELEMENTS}"
            )
    local_experts = work.model.experts // work.ranks
    if local_experts > _MAX_GROUPS:
        return (
            f"torch._grouped_mm takes at most {_MAX_GROUPS} experts a rank, not {local_experts}; "
            "use more ranks"
        )
    return compiler_reason(compile_)


def compiler_reason(compile_: bool) -> str | None:
    """Why torch.compile, where it is asked for, cannot build GPU kernels here, or None."""
    # A plan may be made where there is no GPU: that machine's compilers say nothing.
    return compile_reason() if compile_ and visible_gpus() else None


@cache
def compile_reason() -> str | None:
    """Why torch.compile cannot build GPU kernels on this machine, or None."""
    otherwise = ", or set the system's option compile: false"
    if find_spec("triton") is None:
        return f"torch.compile needs triton: pip install triton{otherwise}"
    # As triton looks for it: its launchers are C, built where they run.
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return f"torch.compile needs a C compiler: install gcc, or point CC at one{otherwise}"
    scheme = sysconfig.get_default_scheme()
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    include = Path(sysconfig.get_paths(scheme=scheme)["include"])
    if not (include / "Python.h").exists():
        return f"torch.compile needs Python.h in {include}: install python3-dev{otherwise}"
    return None


def nccl_version() -> tuple[int, ...] | None:
    """(major, minor, patch) of the NCCL package that torch loads, None where there is none."""
    found = next((text for text in map(machine.version, _NCCL_PACKAGES) if text), None)
    return tuple(map(int, re.findall(r"\d+", found)[:3])) if found else None


def require_share(num_sms: int, share: int, instead: str) -> None:
    """UnsupportedError where a rank asks for more SMs than its GPU has for it."""
    if num_sms > share:
        raise UnsupportedError(
            f"num_sms {num_sms} is more than this rank's share of its GPU, {share} SMs; "
            f"use at most {share}{instead}"
        )


def shared_gpu_reason(found: tuple[int, ...] | None) -> str | None:
    """Why NCCL ``found`` cannot serve several ranks on one GPU; None where it can or is unknown."""
    if found is None or found >= MULTI_RANK_NCCL:
        return None
    return (
        f"several ranks on one GPU need NCCL 2.30 or newer and this is {'.'.join(map(str, found))};"
        " install a torch with a newer NCCL (2.14 has 2.30) or use one GPU per rank"
    )
