"""What the doctor asks NVML: driver, GPUs, clocks, links, fabric, counters, peer access."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pynvml

from mokbench.finding import Finding, State, isolated
from mokbench.gpu_neighbours import COMPUTE_MODES, SET_DEFAULT, compute_mode_effect
from mokbench.gpus import LEAST_CAPABILITY, fabric_info
from mokbench.machine import torch_cuda, version
from mokbench.measure.link_counters import LINK_COUNT, LinkCounters
from mokbench.measure.nvml_gpu import SUCCESS, NvmlGpu, code_name

_IDLE_SHARE = 0.9
_NVLINK_GENERATION = {6: "NVLink 4", 7: "NVLink 5", 8: "NVLink 6"}
# nvml.h, nvmlClocksEventReason*; True: the clock is held down by a fault or by heat.
_REASONS = {
    0x1: ("idle", False),
    0x2: ("application clocks", False),
    0x4: ("power limit", False),
    0x8: ("hardware slowdown", True),
    0x10: ("sync boost", False),
    0x20: ("software thermal", True),
    0x40: ("hardware thermal", True),
    0x80: ("power brake", True),
    0x100: ("display clocks", False),
}
_FABRIC_STATES = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}
_NO_NVML = {
    int(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH): "the driver was updated while loaded; reboot",
    int(pynvml.NVML_ERROR_NO_PERMISSION): "start the container with access to the GPUs",
    int(pynvml.NVML_ERROR_GPU_IS_LOST): "a GPU fell off the bus; see dmesg, reset or reboot",
}
_NO_DRIVER = (
    "nothing, for the host fabric; the cuda fabric needs an NVIDIA driver "
    "(in a container: docker run --gpus all)"
)
_ASK_NVIDIA_SMI = "see whether nvidia-smi works and what dmesg says of the driver"
# pynvml spells index 0 (READ) as a tuple by mistake, so the numbers are written out; nvml.h.
_PEER_CAPS = {0: "read", 1: "write", 3: "atomics", 2: "nvlink"}
_PEER_STATUS = {
    1: "chipset does not support it",
    2: "GPU does not support it",
    3: "IOH topology does not support it",
    4: "disabled by a registry key",
    5: "not supported",
    6: "unknown",
}


def gpu_findings() -> list[Finding]:
    """Everything about the GPUs; one finding where NVML or a GPU is missing."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        is_absent = error.value in (
            pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
            pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        )
        state = State.NOTE if is_absent else State.PROBLEM
        advice = _NO_DRIVER if is_absent else _NO_NVML.get(int(error.value), _ASK_NVIDIA_SMI)
        return [Finding("GPUs", f"none readable: NVML {code_name(error)}", state, advice)]
    try:
        return _of_all_gpus(int(pynvml.nvmlDeviceGetCount()))
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _of_all_gpus(count: int) -> list[Finding]:
    found = isolated("driver", lambda: [_driver()])
    if count == 0:
        advice = "give the container a GPU, or use the host fabric"
        return [*found, Finding("GPUs", "the driver is there and shows no GPU", advice=advice)]
    for name, ask in _OF_EACH.items():
        found += _grouped(name, count, ask)
    found += isolated("visible", _visible)
    if count > 1:
        found += isolated("peer access", lambda: [_peers(count)])
    return found


def _grouped(name: str, count: int, ask: Callable[[int], Finding]) -> list[Finding]:
    """One finding for all GPUs that answer alike: ``GPU 0-7``; a GPU that fails hides no other."""
    answers: dict[Finding, list[int]] = {}
    for gpu in range(count):
        (finding,) = isolated(name, lambda gpu=gpu: [ask(gpu)])  # type: ignore[misc]
        answers.setdefault(finding, []).append(gpu)
    return [finding.named(f"{name}, {_spans(gpus)}") for finding, gpus in answers.items()]


def _spans(gpus: list[int]) -> str:
    """``GPU 0-2, 5``."""
    spans: list[list[int]] = []
    for gpu in gpus:
        if spans and gpu == spans[-1][-1] + 1:
            spans[-1].append(gpu)
        else:
            spans.append([gpu])
    parts = [f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans]
    return f"GPU {', '.join(parts)}"


def _driver() -> Finding:
    driver = pynvml.nvmlSystemGetDriverVersion()
    number = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
    major, minor = number // 1000, number % 1000 // 10
    text = f"{driver}, for CUDA up to {major}.{minor}"
    built_for = torch_cuda(version("torch"))
    if built_for is None:
        advice = f"install a torch built for CUDA {major}: the one here sees no GPU"
        return Finding("driver", text, State.PROBLEM, advice)
    if int(built_for.split(".")[0]) > major:
        advice = f"torch is built for CUDA {built_for}: update the driver or install torch's "
        return Finding("driver", text, State.PROBLEM, advice + f"build for CUDA {major}")
    return Finding("driver", text)


def _model(gpu: int) -> Finding:
    handle = pynvml.nvmlDeviceGetHandleByIndex(gpu)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    text = f"{pynvml.nvmlDeviceGetName(handle)}, {memory.total / 2**30:.0f} GiB, sm_{major}{minor}"
    if (major, minor) < LEAST_CAPABILITY:
        advice = "the kernels use Hopper's instructions; use sm_90 or newer, or the host fabric"
        return Finding("model", text, State.PROBLEM, advice)
    if memory.free < _IDLE_SHARE * memory.total:
        text += f", {(memory.total - memory.free) / 2**30:.0f} GiB of it in use"
        return Finding("model", text, State.PROBLEM, "measure on a GPU that nobody else uses")
    return Finding("model", text)


def _compute_mode(gpu: int) -> Finding:
    mode = int(pynvml.nvmlDeviceGetComputeMode(pynvml.nvmlDeviceGetHandleByIndex(gpu)))
    text = COMPUTE_MODES.get(mode, f"mode {mode}")
    if effect := compute_mode_effect(mode):
        return Finding("compute mode", f"{text}: {effect}", State.PROBLEM, SET_DEFAULT)
    return Finding("compute mode", text)


def _clocks(gpu: int) -> Finding:
    handle = pynvml.nvmlDeviceGetHandleByIndex(gpu)
    kinds = {"SM": pynvml.NVML_CLOCK_SM, "memory": pynvml.NVML_CLOCK_MEM}
    clocks = [
        f"{name} {pynvml.nvmlDeviceGetClockInfo(handle, kind)} of "
        f"{pynvml.nvmlDeviceGetMaxClockInfo(handle, kind)} MHz"
        for name, kind in kinds.items()
    ]
    names, is_held = throttle_reasons(_reason_bits(handle))
    text = f"{', '.join(clocks)} now; reasons: {', '.join(names) or 'none'}"
    if is_held:
        advice = "the GPU is held down by heat or power; fix cooling or supply before measuring"
        return Finding("clocks", text, State.PROBLEM, advice)
    return Finding("clocks", text)


def throttle_reasons(bits: int) -> tuple[list[str], bool]:
    """Names of nvmlClocksEventReason bits, and whether one of them means heat or a fault."""
    known = [reason for bit, reason in _REASONS.items() if bits & bit]
    unknown = bits & ~sum(_REASONS)
    names = [name for name, _ in known] + ([f"unknown {unknown:#x}"] if unknown else [])
    return names, any(is_held for _, is_held in known)


def _reason_bits(handle: Any) -> int:
    try:
        return int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except pynvml.NVMLError_FunctionNotFound:  # drivers before 535 have the older name only
        return int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def _nvlink(gpu: int) -> Finding:
    handle = pynvml.nvmlDeviceGetHandleByIndex(gpu)
    with contextlib.closing(NvmlGpu(gpu)) as nvml:
        (links,) = nvml.field_values([(LINK_COUNT, 0)])
    if links.status != SUCCESS or not links.value:
        reason = code_name(links.status) if links.status != SUCCESS else "0 links"
        return Finding("NVLink", f"none ({reason}): link figures will be null", State.NOTE)
    num_links = int(links.value)
    try:
        states = [int(pynvml.nvmlDeviceGetNvLinkState(handle, i)) for i in range(num_links)]
    except pynvml.NVMLError as error:
        why = f"none ({code_name(error)}): link figures will be null"
        return Finding("NVLink", why, State.NOTE)
    generation = int(pynvml.nvmlDeviceGetNvLinkVersion(handle, 0))
    kind = _NVLINK_GENERATION.get(generation, f"version {generation}")
    # NVML: 0 is down, 1 up, 2 asleep, which wakes on use.
    num_up = sum(state != 0 for state in states)
    text = f"{num_up} of {num_links} links up, {kind}"
    if num_up < num_links:
        advice = "see nvidia-smi nvlink -s and dmesg; figures of fewer links do not compare"
        return Finding("NVLink", text, State.PROBLEM, advice)
    return Finding("NVLink", text)


def _fabric(gpu: int) -> Finding:
    try:
        info = fabric_info(pynvml.nvmlDeviceGetHandleByIndex(gpu))
    except pynvml.NVMLError as error:
        return Finding("fabric", f"none ({code_name(error)})", State.NOTE)
    state = _FABRIC_STATES.get(info.state, f"state {info.state}")
    if info.state == pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
        return Finding("fabric", state, State.NOTE)
    if info.state != pynvml.NVML_GPU_FABRIC_STATE_COMPLETED or info.status != SUCCESS:
        text = f"{state}, status {code_name(info.status) if info.status else 'ok'}"
        advice = "start the fabric manager: systemctl status nvidia-fabricmanager"
        return Finding("fabric", text, State.PROBLEM, advice)
    # Hopper with NVSwitch says completed too; only a rack-wide fabric has a cluster.
    is_rack = any(info.clusterUuid)
    kind = f"multi-node NVLink, clique {info.cliqueId}" if is_rack else "this host only"
    degraded = info.healthMask & pynvml.NVML_GPU_FABRIC_HEALTH_MASK_WIDTH_DEGRADED_BW
    if degraded == pynvml.NVML_GPU_FABRIC_HEALTH_MASK_DEGRADED_BW_TRUE:
        text = f"{state}, {kind}, bandwidth degraded"
        return Finding("fabric", text, State.PROBLEM, "see the fabric manager's log")
    return Finding("fabric", f"{state}, {kind}")


def _counters(gpu: int) -> Finding:
    with contextlib.closing(NvmlGpu(gpu)) as nvml:
        reading = LinkCounters(nvml).read()
        try:
            gpm = "supported" if nvml.gpm_supported() else "not supported"
        except pynvml.NVMLError as error:
            gpm = f"unavailable: {code_name(error)}"
    problems = dict.fromkeys(reading.problem(pair) for pair in reading.source.pairs())
    failed = ", ".join(problem for problem in problems if problem is not None)
    text = f"unavailable: {failed}" if failed else reading.source.name
    if failed and reading.is_readable:
        text = f"{reading.source.name}, in part {text}"
    return Finding("link bytes", f"{text}; GPM {gpm}", State.NOTE if failed else State.OK)


def _visible() -> Iterator[Finding]:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        yield Finding("visible", f"CUDA_VISIBLE_DEVICES={chosen!r}: ranks use no other", State.NOTE)


def _peers(count: int) -> Finding:
    """All ordered pairs: two GPUs can reach one another in one direction only."""
    handles = [pynvml.nvmlDeviceGetHandleByIndex(gpu) for gpu in range(count)]
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    refused: dict[str, list[str]] = {}
    for cap, name in _PEER_CAPS.items():
        for a, b in pairs:
            status = int(pynvml.nvmlDeviceGetP2PStatus(handles[a], handles[b], cap))
            if status:
                why = f"no {name} ({_PEER_STATUS.get(status, f'status {status}')})"
                refused.setdefault(why, []).append(f"{a}->{b}")
    if not refused:
        return Finding("peer access", f"all {len(pairs)} pairs: {', '.join(_PEER_CAPS.values())}")
    text = "; ".join(f"{why}: {_some(found, len(pairs))}" for why, found in refused.items())
    if any(why.startswith(("no read", "no write", "no atomics")) for why in refused):
        advice = "ranks there cannot use one another's memory; see nvidia-smi topo -p2p rw, IOMMU"
        return Finding("peer access", text, State.PROBLEM, advice)
    advice = "ranks talk over PCIe there; rows say link pcie"
    return Finding("peer access", text, State.NOTE, advice)


def _some(pairs: list[str], total: int) -> str:
    if len(pairs) == total:
        return f"all {total} pairs"
    return ", ".join(pairs[:4]) + (f" and {len(pairs) - 4} more" if len(pairs) > 4 else "")


_OF_EACH: dict[str, Callable[[int], Finding]] = {
    "model": _model,
    "compute mode": _compute_mode,
    "clocks": _clocks,
    "NVLink": _nvlink,
    "fabric": _fabric,
    "link bytes": _counters,
}
