"""What the doctor looks up without a GPU: cores, shared memory, packages, tools, the twin."""

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from mokbench import deep_ep_package, machine, twin
from mokbench.errors import UnsupportedError
from mokbench.fabric.mps_processes import CONTROL, DEFAULT_PIPE, QUIT_DEFAULT, mps_processes
from mokbench.finding import Finding, State, isolated
from mokbench.gpu_neighbours import mps_variables
from mokbench.systems.deepep_support import software_reason

_SHM = Path("/dev/shm")
# Docker gives 64 MiB, which the quickstart's segments do not fit; it peaks below this.
_MIN_SHM_BYTES = 2**30
# As many ranks as configs/quickstart.yaml has.
_USUAL_RANKS = 4
_MULTI_RANK_NCCL = (2, 30)
_INSTALL_CUDA = "for the cuda fabric: pip install 'mokbench[cuda]'"


def host_findings() -> list[Finding]:
    """Cores, timer, shared memory and the host fabric's extension."""
    checks = {
        "cores": _cores,
        "timer": _timer,
        "shared memory": _shared_memory,
        "host twin": _host_twin,
    }
    return _all(checks)


def software_findings() -> list[Finding]:
    """Packages and tools, from their metadata where that is enough; torch is not imported."""
    checks = {
        "torch": _torch,
        "NCCL": _nccl,
        "NVRTC": _nvrtc,
        "MPS": _mps,
        "deep_ep": _deep_ep,
    }
    return _all(checks)


def _all(checks: dict[str, Callable[[], Iterator[Finding]]]) -> list[Finding]:
    return [finding for name, check in checks.items() for finding in isolated(name, check)]


def _cores() -> Iterator[Finding]:
    usable, there = machine.usable_cores(), os.cpu_count() or 1
    text = f"{usable} usable of {there}"
    if usable < _USUAL_RANKS:
        advice = f"more than {usable} ranks on the host fabric share cores, and their rows say so"
        yield Finding("cores", text, State.NOTE, advice)
    else:
        yield Finding("cores", text)


def _timer() -> Iterator[Finding]:
    step_ns = time.get_clock_info("perf_counter").resolution * 1e9
    text = f"host: perf_counter says that it steps by {step_ns:g} ns; GPU: CUDA events, not "
    yield Finding("timer", text + "measured here, a run stores their step (timer_step_us)")


def _shared_memory() -> Iterator[Finding]:
    usage = shutil.disk_usage(_SHM)
    text = f"{_SHM}: {usage.free / 2**30:.2f} GiB free of {usage.total / 2**30:.2f}"
    if usage.free >= _MIN_SHM_BYTES:
        yield Finding("shared memory", text)
    elif usage.total < _MIN_SHM_BYTES:
        advice = "ranks meet there; start the container with --shm-size=8g or --ipc=host"
        yield Finding("shared memory", text, State.PROBLEM, advice)
    else:
        yield Finding("shared memory", text, State.PROBLEM, f"free some: ls -l {_SHM}")


def _host_twin() -> Iterator[Finding]:
    try:
        module = twin.load_twin()
    except UnsupportedError as error:
        yield Finding("host twin", "not built", State.PROBLEM, str(error))
    else:
        yield Finding("host twin", f"built, {Path(module.__file__ or '').name}")


def _torch() -> Iterator[Finding]:
    found = machine.version("torch")
    cuda = machine.torch_cuda(found)
    if found is None:
        advice = "pip install . installs it; every system needs it"
        yield Finding("torch", "not installed", State.PROBLEM, advice)
    elif cuda is None:
        advice = "fine for the host fabric; the cuda fabric needs torch built for CUDA"
        yield Finding("torch", f"{found}, without CUDA", State.NOTE, advice)
    else:
        yield Finding("torch", f"{found}, built for CUDA {cuda}")


def _nccl() -> Iterator[Finding]:
    packages = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
    found = next((v for v in map(machine.version, packages) if v), None)
    if found is None:
        advice = "alltoall on GPUs needs it; it comes with torch built for CUDA"
        yield Finding("NCCL", "no package", State.NOTE, advice)
    elif _leading(found) < _MULTI_RANK_NCCL:
        advice = "one GPU per rank works; alltoall with several ranks on one GPU needs NCCL 2.30"
        yield Finding("NCCL", found, State.NOTE, advice)
    else:
        yield Finding("NCCL", found)


def _nvrtc() -> Iterator[Finding]:
    core = machine.version("cuda-core")
    if core is None:
        yield Finding("NVRTC", "cuda-core is not installed", State.NOTE, _INSTALL_CUDA)
        return
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        text = f"cuda-core {core}, NVRTC cannot be loaded: {error}"
        yield Finding("NVRTC", text, State.PROBLEM, _INSTALL_CUDA)
    else:
        yield Finding("NVRTC", f"{major}.{minor}, cuda-core {core}")


def _mps() -> Iterator[Finding]:
    path = shutil.which(CONTROL)
    if path is None:
        advice = "only several ranks on one GPU need it; it comes with the driver's tools"
        yield Finding("MPS", f"no {CONTROL} on the PATH", State.NOTE, advice)
    else:
        yield Finding("MPS", path)
    by_pipe: dict[str | None, list[str]] = {}
    for process in mps_processes():
        by_pipe.setdefault(process.pipe, []).append(str(process.pid))
    if by_pipe:
        served = [
            f"{pipe or 'a folder of another user'} (processes {', '.join(pids)})"
            for pipe, pids in by_pipe.items()
        ]
        advice = f"ranks are no clients of it, but share the GPU with its; end it: {QUIT_DEFAULT}"
        if {DEFAULT_PIPE, None} & set(by_pipe):
            advice = f"ranks with a GPU each become its clients; end it: {QUIT_DEFAULT}"
        yield Finding("MPS daemon", f"serves {'; '.join(served)}", State.NOTE, advice)
    if found := mps_variables():
        text = " ".join(f"{name}={value}" for name, value in found.items())
        advice = f"runs of the cuda fabric are refused with it: unset {' '.join(found)}"
        yield Finding("MPS variables", text, State.PROBLEM, advice)


def _deep_ep() -> Iterator[Finding]:
    package = deep_ep_package.find()
    if package is None:
        advice = "rows of deepep are unsupported without it: github.com/deepseek-ai/DeepEP"
        yield Finding("deep_ep", "not installed", State.NOTE, advice)
        return
    text = f"{package.version or 'of unknown version'}, {package.generation}"
    problem = software_reason("elastic" if package.elastic else "normal", package)
    yield Finding("deep_ep", text, State.PROBLEM if problem else State.OK, problem)


def _leading(text: str) -> tuple[int, ...]:
    """``2.30.4`` as (2, 30)."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
