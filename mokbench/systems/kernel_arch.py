"""Which GPUs our kernels are written for, asked without importing torch."""

from mokbench.gpus import LEAST_CAPABILITY, arch_of
from mokbench.systems import options_of
from mokbench.systems.options import GemmOptions
from mokbench.workload import Cell

HOPPER = "sm_90a"


def mok_arch_reason(arch: str) -> str | None:
    """Why mok's kernel cannot run on ``arch``, or None."""
    if arch == HOPPER:
        return None
    return (
        f"mok's kernel is for {HOPPER} and the GPU is {arch}, for which it has no path yet; "
        "compare the other systems there"
    )


def gemm_arch_reason(arch: str) -> str | None:
    """Why our grouped GEMM cannot run on ``arch``, or None."""
    if arch == HOPPER:
        return None
    return f"our grouped GEMM is for {HOPPER} and the GPU is {arch}; set gemm: torch"


def planned_reason(cell: Cell, capability: tuple[int, int] | None) -> str | None:
    """Why a cell cannot run on GPUs of ``capability``, where that is known, or None."""
    if cell.fabric != "cuda" or capability is None:
        return None
    arch = arch_of(capability)
    if capability < LEAST_CAPABILITY:
        return f"fabric: cuda needs sm_90 or newer and the GPU is {arch}; use fabric: host"
    if cell.system == "mok":
        return mok_arch_reason(arch)
    chosen = options_of(cell)
    if isinstance(chosen, GemmOptions) and chosen.gemm == "ours":
        return gemm_arch_reason(arch)
    return None
