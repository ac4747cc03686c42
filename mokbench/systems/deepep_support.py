"""What DeepEP needs of a machine and of a cell, asked without importing torch or deep_ep.

Limits are those of DeepEP 2.1.0 (github.com/deepseek-ai/DeepEP): of ElasticBuffer from its kernels'
assertions, of the legacy Buffer from docs/legacy.md and its launch tables. docs/deepep.md has them.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from mokbench import deep_ep_package, machine
from mokbench.deep_ep_package import DeepEpPackage
from mokbench.gpus import visible_gpus
from mokbench.reach import maps_peers, reach_reason
from mokbench.systems.gemm_choice import gemm_reason
from mokbench.systems.gpu_support import grouped_mm_reason, nccl_version
from mokbench.systems.options import DeepepOptions
from mokbench.workload import Cell, Dtype, Workload

INSTALL = "install it as github.com/deepseek-ai/DeepEP says, or leave deepep out"
# Its symmetric windows on several ranks of one GPU, and its device communicators.
LEAST_NCCL = (2, 30, 4)
FP8_BLOCK = 128  # channels that share a scale, kScaleBlock
_NICS = machine.NICS
_HIDDEN_UNIT = 256  # combine's elements
_MAX_TOP_K, _MAX_EXPERTS, _MAX_LOCAL_EXPERTS = 32, 2048, 256
_NORMAL_RANKS = (2, 4, 8)
_LOW_LATENCY_HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
_LOW_LATENCY_TOP_K = 11
# Kernels are compiled anew for every capacity, so that token counts below one share it.
_LEAST_CAPACITY, _CAPACITY_STEP = 128, 1024


def token_capacity(tokens: int) -> int:
    """Tokens a rank that a buffer is made for: a power of two from 128 on, then whole 1024s."""
    if tokens > _CAPACITY_STEP:
        return -(-tokens // _CAPACITY_STEP) * _CAPACITY_STEP
    return max(_LEAST_CAPACITY, 1 << (tokens - 1).bit_length())


def chosen_api(options: DeepepOptions, package: DeepEpPackage | None) -> str:
    """elastic, normal or low_latency; ``auto`` takes the newest that is there."""
    if options.api != "auto":
        return options.api
    return "normal" if package and package.legacy and not package.elastic else "elastic"


def cell_reason(cell: Cell, options: DeepepOptions) -> str | None:
    """Why DeepEP cannot run this cell here, or None; also what would help."""
    package = deep_ep_package.find()
    api = chosen_api(options, package)
    reason = _workload_reason(cell, options) or _option_reason(cell, options, api)
    reason = reason or reach_reason(cell, "elastic" if api == "elastic" else "legacy", "deepep")
    reason = reason or _SHAPE_REASONS[api](cell.workload)
    # A plan may be made where there is no GPU: what is installed there says nothing.
    if reason is None and visible_gpus():
        reason = software_reason(api, package) or _network_reason(cell.workload)
    return reason


def software_reason(api: str, package: DeepEpPackage | None) -> str | None:
    """What this machine lacks for an interface of DeepEP, or None."""
    if package is None:
        return f"deep_ep is not installed; {INSTALL}"
    has_it = package.elastic if api == "elastic" else package.legacy
    if not has_it:
        name, other = ("ElasticBuffer", "normal") if api == "elastic" else ("Buffer", "elastic")
        return (
            f"deep_ep {package.version or 'of unknown version'} has no {name}; install one that "
            f"has it, or set api: {other}"
        )
    if api == "elastic":
        return nccl_reason(nccl_version()) or preload_reason(os.environ) or compiler_reason()
    if api == "low_latency" and not machine.has_nic(_NICS):
        return (
            "DeepEP's low-latency mode needs an InfiniBand NIC with IBGDA even within a node, and "
            f"{_NICS} names none; set api: elastic"
        )
    return None


def _network_reason(work: Workload) -> str | None:
    if maps_peers(work) or machine.has_nic(_NICS):
        return None
    return (
        f"DeepEP goes over RDMA between {work.nodes} nodes, and {_NICS} names no InfiniBand or "
        "RoCE device; use one node, or alltoall, whose NCCL falls back to sockets"
    )


def nccl_reason(found: tuple[int, ...] | None) -> str | None:
    """Why NCCL ``found`` is too old for ElasticBuffer; None where it is not, or is unknown."""
    if found is None or found >= LEAST_NCCL:
        return None
    return (
        f"DeepEP's ElasticBuffer needs NCCL {_dotted(LEAST_NCCL)} or newer and torch loads "
        f"{_dotted(found)}; pip install 'nvidia-nccl-cu13>={_dotted(LEAST_NCCL)}' (cu12 for CUDA "
        "12) and build deep_ep against it"
    )


def preload_reason(environment: Mapping[str, str]) -> str | None:
    """Why a preloaded NCCL ends in two mapped ones, or None."""
    if "libnccl" not in environment.get("LD_PRELOAD", ""):
        return None
    return (
        "LD_PRELOAD names a libnccl, torch maps its own beside it, and DeepEP refuses two; unset "
        "it and put the folder that holds nvidia/nccl/lib/libnccl.so.2 first on PYTHONPATH"
    )


def mapped_reason(libraries: list[str]) -> str | None:
    """Why the libnccl files mapped into this process keep DeepEP from running, or None."""
    if len(libraries) < 2:
        return None
    return (
        f"two NCCL libraries are mapped, {' and '.join(libraries)}, and DeepEP refuses that; "
        "leave one: the folder that holds nvidia/nccl/lib/libnccl.so.2 first on PYTHONPATH, no "
        "LD_PRELOAD"
    )


def compiler_reason(environment: Mapping[str, str] = os.environ) -> str | None:
    """Why ElasticBuffer's kernels cannot be compiled when they are first used, or None."""
    home = _cuda_home(environment)
    nvcc = environment.get("EP_JIT_NVCC_COMPILER") or str(home / "bin/nvcc")
    missing = [
        name
        for name, path in (("nvcc", Path(nvcc)), ("cuobjdump", home / "bin/cuobjdump"))
        if not os.access(path, os.X_OK)
    ]
    if not missing:
        return None
    return (
        "DeepEP compiles its kernels when they are first used and finds no "
        f"{' and no '.join(missing)} in {home / 'bin'}; install the CUDA toolkit and point "
        "CUDA_HOME at it"
    )


def _cuda_home(environment: Mapping[str, str]) -> Path:
    """Where DeepEP looks for the toolkit."""
    chosen = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    nvcc = shutil.which("nvcc")
    if chosen:
        return Path(chosen)
    return Path(nvcc).parents[1] if nvcc else Path("/usr/local/cuda")


def _workload_reason(cell: Cell, options: DeepepOptions) -> str | None:
    work = cell.workload
    if work.dtype is not Dtype.BF16:
        return f"deepep moves bf16 (or dispatch_dtype: fp8), not {work.dtype}; set dtype: bf16"
    if work.ranks == 1:
        return "deepep exchanges tokens among ranks; use 2 or more, or local for one"
    if options.dispatch_dtype == "fp8" and work.model.hidden % FP8_BLOCK:
        return (
            f"dispatch_dtype: fp8 has a scale for each {FP8_BLOCK} channels and hidden is "
            f"{work.model.hidden}; set dispatch_dtype: bf16"
        )
    if options.block_m != DeepepOptions().block_m:
        return "block_m is a tile of the host's GEMMs; leave it out, gemm_tile_rows is the GPU's"
    reason = gemm_reason(cell, options)
    if reason is None and options.gemm == "torch":
        reason = grouped_mm_reason(cell, compile_=False)
    return reason


def _option_reason(cell: Cell, options: DeepepOptions, api: str) -> str | None:
    if cell.graph and options.cpu_sync:
        return (
            "cpu_sync waits on the CPU in every pass, which a CUDA graph cannot hold; leave it out"
        )
    if cell.graph and options.deterministic:
        return (
            "deterministic sorts rows with a wait on the CPU, which a CUDA graph cannot hold; set "
            "deterministic: false or graph: false"
        )
    if api == "elastic":
        return None
    if options.deterministic:
        return "deterministic is an option of ElasticBuffer; leave it out with the legacy Buffer"
    if api == "normal":
        if isinstance(options.num_sms, str) or options.num_sms % 2 == 0:
            return None
        return f"the legacy Buffer splits its SMs in two: make num_sms {options.num_sms} even"
    for name, chosen in (
        ("num_sms", options.num_sms != "auto"),
        ("cpu_sync", options.cpu_sync),
        ("dispatch_dtype", options.dispatch_dtype != "bf16"),
    ):
        if chosen:
            return f"{name} cannot be chosen with api: low_latency; leave it out"
    return None


def _elastic_reason(work: Workload) -> str | None:
    model = work.model
    if model.hidden % _HIDDEN_UNIT:
        return (
            f"DeepEP's combine needs hidden to be a multiple of {_HIDDEN_UNIT} and it is "
            f"{model.hidden}; compare push and alltoall there"
        )
    if model.top_k > _MAX_TOP_K:
        return f"DeepEP takes at most top_k {_MAX_TOP_K}, not {model.top_k}; use a smaller one"
    if model.experts > _MAX_EXPERTS or model.experts // work.ranks > _MAX_LOCAL_EXPERTS:
        return (
            f"DeepEP takes at most {_MAX_EXPERTS} experts and {_MAX_LOCAL_EXPERTS} a rank, not "
            f"{model.experts} and {model.experts // work.ranks}; use more ranks"
        )
    return None


def _normal_reason(work: Workload) -> str | None:
    if work.ranks not in _NORMAL_RANKS:
        known = ", ".join(map(str, _NORMAL_RANKS))
        return f"DeepEP's legacy Buffer takes {known} ranks of one node, not {work.ranks}"
    if work.model.top_k > _MAX_TOP_K:
        return f"DeepEP takes at most top_k {_MAX_TOP_K}, not {work.model.top_k}; use a smaller one"
    return None


def _low_latency_reason(work: Workload) -> str | None:
    model = work.model
    if model.hidden not in _LOW_LATENCY_HIDDEN:
        known = ", ".join(map(str, _LOW_LATENCY_HIDDEN))
        return (
            f"DeepEP's low-latency mode takes hidden {known}, not {model.hidden}; set api: elastic"
        )
    if model.top_k > _LOW_LATENCY_TOP_K:
        return (
            f"DeepEP's low-latency mode takes at most top_k {_LOW_LATENCY_TOP_K}, not "
            f"{model.top_k}; set api: elastic"
        )
    return None


_SHAPE_REASONS = {
    "elastic": _elastic_reason,
    "normal": _normal_reason,
    "low_latency": _low_latency_reason,
}


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
