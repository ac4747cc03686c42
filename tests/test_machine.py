import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pynvml
import pytest
from fake_nvml import Box
from fake_run import fake_machine

from mokbench import machine
from mokbench.gpus import read_gpus


def test_describe_is_cheap_and_imports_no_torch() -> None:
    code = (
        "import sys, time; from mokbench import machine; t = time.perf_counter(); "
        "machine.describe(); assert 'torch' not in sys.modules; print(time.perf_counter() - t)"
    )
    spent = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(spent.stdout) < 2.0


def test_describe_knows_this_machine() -> None:
    found = machine.describe()
    assert found.cores == os.cpu_count()
    assert 1 <= found.usable_cores <= found.cores
    assert found.python == ".".join(map(str, sys.version_info[:3]))
    assert found.torch == machine.version("torch")
    assert found.memory_bytes > 2**28
    assert found.cpu
    assert found.key == found.computed_key() == machine.describe().key


@pytest.mark.parametrize(
    "field, value",
    [("gpu", "NVIDIA H200"), ("driver", "580.1"), ("torch", "2.14.0"), ("cores", 4), ("gpus", 8)],
)
def test_key_changes_with_what_figures_depend_on(field: str, value: Any) -> None:
    base = fake_machine()
    other = fake_machine(**{field: value})
    assert base.key != other.key
    assert f"{field} {getattr(base, field)} against {value}" in base.differences(other)


def test_key_keeps_with_what_only_tells_two_of_a_kind_apart() -> None:
    base = fake_machine()
    same = fake_machine(gpu_uuids=["GPU-1"], kernel="6.0", usable_cores=1, memory_bytes=2**34 + 999)
    assert base.key == same.key


@pytest.mark.parametrize(
    "text, cuda",
    [("2.10.0+cu128", "12.8"), ("2.10.0+cu130", "13.0"), ("2.13.0+cpu", None), (None, None)],
)
def test_cuda_version_from_torch_version(text: str | None, cuda: str | None) -> None:
    assert machine.torch_cuda(text) == cuda


def test_cuda_version_of_a_pypi_wheel_is_in_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / "version.py").write_text("cuda: Optional[str] = '12.9'\nhip = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert machine.torch_cuda("2.10.0") == "12.9"
    (package / "version.py").write_text("cuda: Optional[str] = None\n")
    assert machine.torch_cuda("2.10.0") is None


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    "files, cores",
    [
        ({}, 16),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "250000 100000\n"}, 2),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "800000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            },
            8,
        ),
        ({"proc/self/cgroup": "0::/../..\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        (
            {
                "proc/self/cgroup": "5:memory:/x\n3:cpu,cpuacct:/x\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            16,
        ),
        ({"proc/self/cgroup": "nonsense", "sys/fs/cgroup/cpu.max": "many of them"}, 16),
    ],
)
def test_usable_cores_respect_affinity_and_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    write(tmp_path, files)
    assert machine.usable_cores(tmp_path) == cores


def test_usable_cores_follow_the_affinity_of_this_process() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert machine.usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_cpu_models(tmp_path: Path) -> None:
    write(tmp_path, {"proc/cpuinfo": "processor\t: 0\nmodel name\t: Example  CPU 9000\n"})
    assert machine.cpu_model(tmp_path) == "Example CPU 9000"
    write(tmp_path, {"proc/cpuinfo": "CPU implementer\t: 0x41\nCPU part\t: 0xd4f\n"})
    assert machine.cpu_model(tmp_path).endswith("implementer 0x41 part 0xd4f")


def test_virtualization_and_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KUBERNETES_SERVICE_HOST", "APPTAINER_CONTAINER", "container"):
        monkeypatch.delenv(name, raising=False)
    assert machine.virtualization(tmp_path) == "none"
    assert machine.container(tmp_path) is None
    write(
        tmp_path,
        {
            "proc/cpuinfo": "flags\t\t: fpu hypervisor avx\n",
            "sys/class/dmi/id/sys_vendor": "Maker\n",
            "sys/class/dmi/id/product_name": "Virtual Box 1\n",
            "run/.containerenv": "",
        },
    )
    assert machine.virtualization(tmp_path) == "Maker Virtual Box 1"
    assert machine.container(tmp_path) == "podman"


def test_no_driver_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    found = read_gpus()
    assert (found.count, found.model, found.driver) == (0, None, None)
    assert found.note is not None
    assert found.note.startswith("no GPU: NVML:")


def test_gpus_of_two_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        total = 150 * 2**30

    answers: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 3,
        "nvmlDeviceGetHandleByIndex": lambda i: i,
        "nvmlDeviceGetName": lambda h: ["H200", "H200", b"B200"][h],
        "nvmlDeviceGetUUID": lambda h: f"GPU-{h}",
        "nvmlDeviceGetMemoryInfo": lambda _: Memory,
        "nvmlSystemGetDriverVersion": lambda: "570.1",
        "nvmlDeviceGetNvLinkState": lambda _h, link: int(link < 18),
        "nvmlDeviceGetTopologyCommonAncestor": lambda a, _b: 50 if a else 40,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    found = read_gpus()
    assert (found.count, found.model, found.driver) == (3, "B200 + H200", "570.1")
    assert found.topology == "nvlink 18 links a GPU, pcie one NUMA node across NUMA nodes"
    assert found.uuids == ("GPU-0", "GPU-1", "GPU-2")

    def refused(*_: Any) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetNvLinkState", refused)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTopologyCommonAncestor", refused)
    assert (read_gpus().topology or "").startswith("no nvlink, pcie unavailable: ")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", refused)
    assert (read_gpus().note or "").startswith("GPUs not readable")


@pytest.mark.parametrize(
    "gpus, ranks, link",
    [
        (8, 1, "none"),
        (8, 8, "nvlink"),
        # Two ranks a GPU, and most pairs are on different ones.
        (8, 9, "nvlink"),
        (8, 16, "nvlink"),
        (1, 2, "hbm"),
        (1, 8, "hbm"),
        (2, 3, "nvlink"),
    ],
)
def test_link_between_ranks(
    monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: int, link: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    Box(gpus=gpus).install(monkeypatch)
    assert read_gpus().link(ranks) == link


def test_one_visible_gpu_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    Box(gpus=8).install(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert read_gpus().link(2) == "hbm"


def test_gpus_of_which_some_have_no_nvlink_are_pcie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    Box(
        gpus=3,
        overrides={"nvmlDeviceGetNvLinkState": lambda gpu, link: int(gpu < 2 and link < 4)},
    ).install(monkeypatch)
    found = read_gpus()
    assert (found.topology or "").startswith("nvlink 0-4 links a GPU")
    assert found.link(3) == "pcie"
    assert found.link(4) == "pcie"


def test_bridges_between_some_pairs_are_pcie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    apart = {(a, b, 2): 5 for a in range(4) for b in range(4) if a // 2 != b // 2}
    Box(gpus=4, peer=apart).install(monkeypatch)
    assert read_gpus().link(4) == "pcie"


def test_a_sleeping_link_is_one_link(monkeypatch: pytest.MonkeyPatch) -> None:
    Box(gpus=2, overrides={"nvmlDeviceGetNvLinkState": lambda _, link: 2 * (link < 18)}).install(
        monkeypatch
    )
    found = read_gpus()
    assert (found.topology or "").startswith("nvlink 18 links a GPU")
    assert found.all_linked


@pytest.mark.gpu
def test_gpus_of_this_machine() -> None:
    start = time.perf_counter()
    found = machine.describe()
    if not found.gpus:
        pytest.skip(f"no NVIDIA GPU: {found.gpu_note}")
    assert time.perf_counter() - start < 2.0
    assert found.gpu
    assert found.driver
    assert len(found.gpu_uuids) == found.gpus
