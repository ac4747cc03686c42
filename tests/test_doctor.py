import json
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pynvml
import pytest
from fake_nvml import GIB, Box, one_gpu_vm, refused
from rich.console import Console
from runs import mokbench

from mokbench import deep_ep_package, doctor, doctor_gpus, doctor_software, machine, systems, twin
from mokbench.doctor import Diagnosis, ask, examine, screen, to_json
from mokbench.doctor_gpus import gpu_findings, throttle_reasons
from mokbench.doctor_software import host_findings, software_findings
from mokbench.errors import UnsupportedError
from mokbench.fabric.mps_processes import MpsProcess
from mokbench.finding import Finding, State


@pytest.fixture(autouse=True)
def cuda_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every faked GPU is on a machine whose torch was built for CUDA 13.0."""
    monkeypatch.setattr(doctor_gpus, "version", lambda _: "2.11.0+cu130")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    assert len({finding.name for finding in findings}) == len(findings)
    return {finding.name: finding for finding in findings}


def texts(findings: list[Finding]) -> dict[str, str]:
    return {name: finding.text for name, finding in by_name(findings).items()}


def show(diagnosis: Diagnosis, width: int = 120) -> str:
    console = Console(width=width, record=True, file=Path("/dev/null").open("w"))  # noqa: SIM115
    console.print(screen(diagnosis))
    return console.export_text()


def test_eight_gpus_on_nvswitch(monkeypatch: pytest.MonkeyPatch) -> None:
    Box().install(monkeypatch)
    found = gpu_findings()
    assert texts(found) == {
        "driver": "580.159.04, for CUDA up to 13.0",
        "model, GPU 0-7": "NVIDIA H200, 140 GiB, sm_90",
        "compute mode, GPU 0-7": "default",
        "clocks, GPU 0-7": "SM 1980 of 1980 MHz, memory 3201 of 3201 MHz now; reasons: idle",
        "NVLink, GPU 0-7": "18 of 18 links up, NVLink 4",
        "fabric, GPU 0-7": "completed, this host only",
        "link bytes, GPU 0-7": "NVML fields 138-141 over all links; GPM supported",
        "peer access": "all 56 pairs: read, write, atomics, nvlink",
    }
    assert {finding.state for finding in found} == {State.OK}


def test_one_gpu_vm_without_nvlink(monkeypatch: pytest.MonkeyPatch) -> None:
    one_gpu_vm().install(monkeypatch)
    found = gpu_findings()
    assert texts(found) == {
        "driver": "580.159.04, for CUDA up to 13.0",
        "model, GPU 0": "NVIDIA H200, 140 GiB, sm_90",
        "compute mode, GPU 0": "default",
        "clocks, GPU 0": "SM 345 of 1980 MHz, memory 3201 of 3201 MHz now; reasons: idle",
        "NVLink, GPU 0": "none (NotSupported): link figures will be null",
        "fabric, GPU 0": "not supported",
        "link bytes, GPU 0": "unavailable: NotSupported; GPM supported",
    }
    assert State.PROBLEM not in {finding.state for finding in found}


@pytest.mark.parametrize(
    "code, state, text, advice",
    [
        (12, State.NOTE, "LibraryNotFound", "needs an NVIDIA driver"),
        (9, State.NOTE, "DriverNotLoaded", "needs an NVIDIA driver"),
        (18, State.PROBLEM, "LibRmVersionMismatch", "reboot"),
        (4, State.PROBLEM, "NoPermission", "access to the GPUs"),
        (999, State.PROBLEM, "Unknown", "nvidia-smi"),
    ],
)
def test_nvml_that_does_not_start(
    monkeypatch: pytest.MonkeyPatch, code: int, state: State, text: str, advice: str
) -> None:
    Box(overrides={"nvmlInit": refused(code)}).install(monkeypatch)
    (found,) = gpu_findings()
    assert (found.name, found.state) == ("GPUs", state)
    assert found.text == f"none readable: NVML {text}"
    assert advice in (found.advice or "")


def test_driver_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    Box(gpus=0).install(monkeypatch)
    assert texts(gpu_findings())["GPUs"] == "the driver is there and shows no GPU"


def test_every_broken_call_is_shown_and_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: Any) -> None:
        raise OSError("bad\n  symbol")

    def lost(gpu: int) -> int:
        if gpu == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return gpu

    Box(
        gpus=4,
        overrides={
            "nvmlSystemGetDriverVersion": crash,
            "nvmlDeviceGetHandleByIndex": lost,
            "nvmlDeviceGetClockInfo": refused(3),
        },
    ).install(monkeypatch)
    found = texts(gpu_findings())
    assert found["driver"] == "could not be read: OSError: bad symbol"
    assert found["model, GPU 0, 2-3"] == "NVIDIA H200, 140 GiB, sm_90"
    assert found["model, GPU 1"] == "could not be read: NVML GpuIsLost"
    assert found["clocks, GPU 0, 2-3"] == "could not be read: NVML NotSupported"
    assert found["NVLink, GPU 0, 2-3"] == "18 of 18 links up, NVLink 4"
    assert found["link bytes, GPU 1"] == "unavailable: GpuIsLost; GPM unavailable: GpuIsLost"
    assert found["peer access"] == "could not be read: NVML GpuIsLost"


@pytest.mark.parametrize(
    "box, name, text, advice",
    [
        (Box(links_down=(3, 9)), "NVLink", "16 of 18 links up, NVLink 4", "nvidia-smi nvlink"),
        (Box(fabric=(1, 0)), "fabric", "not started, status ok", "fabric manager"),
        (Box(fabric=(3, 29)), "fabric", "completed, status InvalidState", "fabric manager"),
        (Box(health=1), "fabric", "completed, this host only, bandwidth degraded", "log"),
        (Box(capability=(8, 0)), "model", "NVIDIA H200, 140 GiB, sm_80", "Hopper"),
        (
            Box(free=100 * GIB),
            "model",
            "NVIDIA H200, 140 GiB, sm_90, 40 GiB of it in use",
            "nobody else",
        ),
        (
            Box(reasons=0x60, clock=120),
            "clocks",
            "SM 120 of 1980 MHz, memory 3201 of 3201 MHz now; reasons: "
            "software thermal, hardware thermal",
            "cooling",
        ),
    ],
)
def test_problems_come_with_advice(
    monkeypatch: pytest.MonkeyPatch, box: Box, name: str, text: str, advice: str
) -> None:
    box.install(monkeypatch)
    found = by_name(gpu_findings())[f"{name}, GPU 0-7"]
    assert (found.text, found.state) == (text, State.PROBLEM)
    assert advice in (found.advice or "")


def test_rack_fabric_names_its_clique(monkeypatch: pytest.MonkeyPatch) -> None:
    Box(cluster=9).install(monkeypatch)
    assert texts(gpu_findings())["fabric, GPU 0-7"] == "completed, multi-node NVLink, clique 7"


def test_link_bytes_readable_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoRaw(Box):
        def fields(self, field_id: int, scope: int) -> tuple[int, int, int]:
            return (4, 0, 0) if field_id in (140, 141) else super().fields(field_id, scope)

    NoRaw(gpus=1, gpm=0).install(monkeypatch)
    found = by_name(gpu_findings())["link bytes, GPU 0"]
    assert found.state is State.NOTE
    assert found.text == (
        "NVML fields 138-141 over all links, in part unavailable: NoPermission; GPM not supported"
    )


def test_peer_access_per_pair_and_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    Box(gpus=3, peer={(0, 1, 0): 5, (2, 1, 1): 1}).install(monkeypatch)
    found = by_name(gpu_findings())["peer access"]
    assert found.state is State.PROBLEM
    assert (
        found.text == "no read (not supported): 0->1; no write (chipset does not support it): 2->1"
    )
    nvlink = {(a, b, 2): 5 for a in range(3) for b in range(3)}
    Box(gpus=3, peer=nvlink).install(monkeypatch)
    found = by_name(gpu_findings())["peer access"]
    assert found.state is State.NOTE
    assert found.text == "no nvlink (not supported): all 6 pairs"
    assert "pcie" in (found.advice or "")


@pytest.mark.parametrize(
    "bits, names, is_held",
    [
        (0, [], False),
        (0x1, ["idle"], False),
        (0x4, ["power limit"], False),
        (0x88, ["hardware slowdown", "power brake"], True),
        (0x1004, ["power limit", "unknown 0x1000"], False),
    ],
)
def test_throttle_reasons(bits: int, names: list[str], is_held: bool) -> None:
    assert throttle_reasons(bits) == (names, is_held)


def test_old_driver_has_the_older_name_of_the_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    older = {
        "nvmlDeviceGetCurrentClocksEventReasons": refused(13),
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _: 0x4,
    }
    Box(gpus=1, overrides=older).install(monkeypatch)
    assert texts(gpu_findings())["clocks, GPU 0"].endswith("reasons: power limit")


@pytest.mark.parametrize(
    "torch, advice",
    [("2.13.0+cpu", "built for CUDA 13:"), ("2.20.0+cu140", "update the driver"), (None, "CUDA")],
)
def test_torch_that_does_not_fit_the_driver(
    monkeypatch: pytest.MonkeyPatch, torch: str | None, advice: str
) -> None:
    Box(gpus=1).install(monkeypatch)
    monkeypatch.setattr(doctor_gpus, "version", lambda _: torch)
    found = by_name(gpu_findings())["driver"]
    assert found.state is State.PROBLEM
    assert advice in (found.advice or "")


def test_visible_devices_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    Box(gpus=2).install(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert texts(gpu_findings())["visible"] == "CUDA_VISIBLE_DEVICES='1': ranks use no other"


@pytest.mark.parametrize(
    "free, total, state, advice",
    [
        (8 * GIB, 16 * GIB, State.OK, None),
        (60 * 2**20, 64 * 2**20, State.PROBLEM, "--shm-size"),
        (GIB // 2, 16 * GIB, State.PROBLEM, "free some"),
    ],
)
def test_shared_memory(
    monkeypatch: pytest.MonkeyPatch, free: int, total: int, state: State, advice: str | None
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(total, total - free, free))
    found = by_name(host_findings())["shared memory"]
    assert found.state is state
    assert (advice or "") in (found.advice or "")


def test_host_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise UnsupportedError("not built; run 'pip install .'")

    monkeypatch.setattr(machine, "usable_cores", lambda: 3)
    assert by_name(host_findings())["cores"].state is State.NOTE
    monkeypatch.setattr(machine, "usable_cores", lambda: 4)
    assert by_name(host_findings())["cores"].state is State.OK
    monkeypatch.setattr(twin, "load_twin", missing)
    found = by_name(host_findings())["host twin"]
    assert (found.text, found.state) == ("not built", State.PROBLEM)
    assert "pip install ." in (found.advice or "")


def make_toolkit(home: Path) -> None:
    """The two programs that DeepEP runs, which do nothing here."""
    (home / "bin").mkdir(parents=True)
    for name in ("nvcc", "cuobjdump"):
        (home / "bin" / name).touch(mode=0o755)


def test_software(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "deep_ep"
    package.mkdir()
    (package / "__init__.py").write_text(
        "raise SystemExit('imported')\nclass ElasticBuffer: ...\n__version__ = '2.1.0'\n"
    )
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.syspath_prepend(tmp_path)
    versions = {"torch": "2.11.0+cu130", "nvidia-nccl-cu13": "2.28.9"}
    tools: dict[str, str] = {"nvidia-cuda-mps-control": "/usr/bin/nvidia-cuda-mps-control"}
    monkeypatch.setattr(machine, "version", versions.get)
    monkeypatch.setattr(shutil, "which", tools.get)
    found = by_name(software_findings())
    assert {name: finding.text for name, finding in found.items()} == {
        "torch": "2.11.0+cu130, built for CUDA 13.0",
        "NCCL": "2.28.9",
        "NVRTC": "cuda-core is not installed",
        "MPS": "/usr/bin/nvidia-cuda-mps-control",
        "deep_ep": "2.1.0, second generation (ElasticBuffer)",
    }
    assert "NCCL 2.30" in (found["NCCL"].advice or "")
    assert "pip install 'mokbench[cuda]'" in (found["NVRTC"].advice or "")
    assert "NCCL 2.30.4 or newer" in (found["deep_ep"].advice or "")
    versions["nvidia-nccl-cu13"] = "2.30.4"
    found = by_name(software_findings())
    assert found["NCCL"].state is State.OK
    assert found["deep_ep"].state is State.PROBLEM
    assert "no nvcc and no cuobjdump" in (found["deep_ep"].advice or "")
    make_toolkit(tmp_path / "cuda")
    assert by_name(software_findings())["deep_ep"].state is State.OK


def test_missing_software(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "version", lambda _: None)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(deep_ep_package, "find", lambda: None)
    found = by_name(software_findings())
    assert all(finding.advice for finding in found.values())
    assert found["torch"].state is State.PROBLEM


def test_mps_of_others_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    running = [MpsProcess(41, "/tmp/nvidia-mps"), MpsProcess(42, "/tmp/nvidia-mps")]
    monkeypatch.setattr(doctor_software, "mps_processes", lambda: [*running, MpsProcess(9, "/x")])
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50")
    monkeypatch.setenv("CUDA_MPS_LOG_DIRECTORY", "/log")
    found = by_name(software_findings())
    daemon, variables = found["MPS daemon"], found["MPS variables"]
    assert daemon.text == "serves /tmp/nvidia-mps (processes 41, 42); /x (processes 9)"
    assert "become its clients" in (daemon.advice or "")
    assert variables.text == "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50"
    assert variables.state is State.PROBLEM
    monkeypatch.setattr(doctor_software, "mps_processes", lambda: [MpsProcess(9, "/x")])
    assert "no clients" in (by_name(software_findings())["MPS daemon"].advice or "")


@pytest.mark.parametrize(
    "mode, text",
    [(3, "exclusive process: a rank fails"), (2, "prohibited: no rank"), (7, "mode 7: unknown")],
)
def test_a_compute_mode_that_stops_ranks(
    monkeypatch: pytest.MonkeyPatch, mode: int, text: str
) -> None:
    Box(compute_mode=mode).install(monkeypatch)
    found = by_name(gpu_findings())["compute mode, GPU 0-7"]
    assert found.state is State.PROBLEM
    assert found.text.startswith(text)
    assert "nvidia-smi -c DEFAULT" in (found.advice or "")


def test_systems_answer_on_both_fabrics() -> None:
    answers = {(a.system, a.fabric): a.reason for a in examine().answers}
    assert len(answers) == 10
    for name in ("mok", "push", "alltoall", "local"):
        assert answers[name, "host"] is None
    assert "DeepEP" in (answers["deepep", "host"] or "")


def test_system_that_raises_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: str) -> type:
        raise ImportError("no such library")

    monkeypatch.setattr(doctor, "system_class", broken)
    assert ask("mok", "host").reason == "could not be read: ImportError: no such library"
    assert systems.system_class("mok").name == "mok"


def test_one_screen_for_eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    Box(links_down=(3,)).install(monkeypatch)
    text = show(examine())
    assert len(text.splitlines()) <= 48
    assert "FIX   NVLink, GPU 0-7" in text
    assert "-> see nvidia-smi nvlink -s" in text
    assert "host fabric" in text
    assert "1 to fix." in text.splitlines()[-1]


def test_text_is_shown_as_it_is() -> None:
    found = [Finding("[bold]name", "pip install '.[cuda]' :warning:", State.NOTE, "[red]do[/red]")]
    text = show(Diagnosis(None, {"software": found}, []))
    assert "[bold]name" in text
    assert "pip install '.[cuda]' :warning:" in text
    assert "-> [red]do[/red]" in text


def test_broken_machine_still_gives_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash() -> None:
        raise RuntimeError("NVML is not itself")

    monkeypatch.setattr(pynvml, "nvmlInit", crash)
    diagnosis = examine()
    assert diagnosis.machine is None
    told = {answer.reason for answer in diagnosis.answers if answer.fabric == "cuda"}
    assert told == {"could not be read: RuntimeError: NVML is not itself"}
    report = to_json(diagnosis)
    broken = {check["name"]: check for check in report["checks"] if check["state"] == "unreadable"}
    assert broken["machine"]["text"] == "could not be read: RuntimeError: NVML is not itself"
    assert broken["GPUs"]["section"] == "GPUs"
    assert {check["name"] for check in report["checks"]} >= {"cores", "torch", "host twin"}
    assert "2 could not be read." in show(diagnosis)


def test_json_has_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    one_gpu_vm().install(monkeypatch)
    report = json.loads(json.dumps(to_json(examine())))
    assert report["machine"]["gpu"] == "NVIDIA H200"
    assert set(report) == {"version", "machine", "checks", "systems"}
    link = next(c for c in report["checks"] if c["name"] == "NVLink, GPU 0")
    assert link == {
        "section": "GPUs",
        "name": "NVLink, GPU 0",
        "text": "none (NotSupported): link figures will be null",
        "state": "note",
        "advice": None,
    }
    mok = {"system": "mok", "fabric": "host", "reason": None, "supported": True}
    assert mok in report["systems"]


def test_command_on_this_machine() -> None:
    done = mokbench("doctor")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for word in ("machine", "software", "GPUs", "systems", "host fabric", "cuda fabric"):
        assert word in done.stdout
    done = mokbench("doctor", "--format", "json")
    assert done.returncode == 0, done.stderr
    assert {answer["fabric"] for answer in json.loads(done.stdout)["systems"]} == {"host", "cuda"}
    assert mokbench("doctor", "--format", "xml").returncode == 2


def test_doctor_imports_no_torch() -> None:
    code = (
        "import sys; from mokbench.doctor import examine; examine(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
