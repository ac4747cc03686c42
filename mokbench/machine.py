"""The machine a run was made on, and the key under which its rows may be compared with others.

Describing it imports no torch and starts no GPU work: versions come from package metadata, the
GPUs from NVML where a driver is there.
"""

import hashlib
import json
import os
import platform
import re
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from mokbench import deep_ep_package
from mokbench.gpus import read_gpus

# Their change makes figures of another machine; UUIDs and kernel versions do not.
_KEY_FIELDS = (
    "gpu",
    "gpus",
    "driver",
    "cuda",
    "torch",
    "nccl",
    "deep_ep",
    "topology",
    "cpu",
    "sockets",
    "cores",
    "memory_gib",
    "virtualization",
)
# Arithmetic on more, which only a damaged file has, overflows.
_MOST_BYTES = 1 << 60
NICS = Path("/sys/class/infiniband")


class Machine(BaseModel):
    """What figures depend on, and attributes that only tell two machines of a kind apart.

    ``key`` hashes model, count, driver, topology and versions. Null: not there or not readable.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpu: str | None = None
    gpus: int = Field(0, ge=0, le=1 << 20)
    driver: str | None = None
    cuda: str | None = None
    torch: str | None = None
    nccl: str | None = None
    deep_ep: str | None = None
    cpu: str = ""
    key: str = ""
    topology: str | None = None
    gpu_memory_bytes: int | None = Field(None, ge=0, le=_MOST_BYTES)
    gpu_uuids: list[str] = Field(default_factory=list)
    gpu_note: str | None = None
    sockets: int = Field(1, ge=1, le=1 << 20)
    cores: int = Field(1, ge=1, le=1 << 20)
    usable_cores: int = Field(1, ge=1, le=1 << 20)
    memory_bytes: int = Field(0, ge=0, le=_MOST_BYTES)
    os: str = ""
    kernel: str = ""
    python: str = ""
    virtualization: str = "none"
    container: str | None = None

    @property
    def memory_gib(self) -> int:
        """Memory in whole GiB: what a reboot does not change."""
        return round(self.memory_bytes / 2**30)

    def computed_key(self) -> str:
        """12 hex digits over the fields that decide whether two machines' figures compare."""
        content = json.dumps([getattr(self, name) for name in _KEY_FIELDS])
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    def differences(self, other: "Machine") -> str:
        """Which fields of the key differ: ``torch 2.10.0 against 2.13.0, ...``."""
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in _KEY_FIELDS]
        found = [f"{name} {mine} against {its}" for name, mine, its in pairs if mine != its]
        return ", ".join(found) or f"key {self.key} against {other.key}"


def describe() -> Machine:
    """Describe this machine; what cannot be read is null. Takes some tens of milliseconds."""
    gpus = read_gpus()
    torch_version = version("torch")
    machine = Machine(
        gpu=gpus.model,
        gpus=gpus.count,
        driver=gpus.driver,
        cuda=torch_cuda(torch_version),
        torch=torch_version,
        nccl=_first_version("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
        deep_ep=_deep_ep_version(),
        cpu=cpu_model(),
        topology=gpus.topology,
        gpu_memory_bytes=gpus.memory_bytes,
        gpu_uuids=list(gpus.uuids),
        gpu_note=gpus.note,
        sockets=_sockets(),
        cores=os.cpu_count() or 1,
        usable_cores=usable_cores(),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        os=_os_name(),
        kernel=platform.release(),
        python=platform.python_version(),
        virtualization=virtualization(),
        container=container(),
    )
    return machine.model_copy(update={"key": machine.computed_key()})


def version(package: str) -> str | None:
    """Installed version of a package, or null."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def versions() -> dict[str, str]:
    """Versions of what takes part in a run, for run.json."""
    names = ("mokbench", "torch", "numpy", "scipy", "pyarrow", "cuda-core")
    found = {name: version(name) for name in names} | {"deep_ep": _deep_ep_version()}
    return {name: text for name, text in found.items() if text is not None}


def torch_cuda(torch_version: str | None) -> str | None:
    """CUDA version torch was built for: from ``+cu128``, else from the text of torch/version.py.

    Importing torch would cost seconds; wheels from PyPI carry no local version.
    """
    if torch_version is None:
        return None
    local = re.search(r"\+cu(\d+)(\d)$", torch_version)
    if local:
        return f"{local[1]}.{local[2]}"
    if "+" in torch_version:
        return None
    spec = find_spec("torch")
    folder = Path(spec.origin).parent if spec and spec.origin else None
    text = _read(folder / "version.py") if folder else ""
    found = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return found[1] if found else None


def usable_cores(root: Path = Path("/")) -> int:
    """Logical cores this process may use: its affinity, cut by the cgroup's cpu quota.

    More ranks than this and the host fabric is oversubscribed. ``root`` is for tests.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    cores = float(affinity or os.cpu_count() or 1)
    for quota in _cpu_quotas(root):
        cores = min(cores, quota)
    return max(1, int(cores))


def _cpu_quotas(root: Path) -> list[float]:
    """Cores that each cgroup above this process allows, version 2 and 1."""
    quotas = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup"
        base = base / "cpu" if controllers else base
        inner = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(inner) + 1):
            folder = base.joinpath(*inner[:depth])
            quotas.append(_quota(folder))
    return [quota for quota in quotas if quota is not None]


def _quota(folder: Path) -> float | None:
    fields = _read(folder / "cpu.max").split() or [
        _read(folder / "cpu.cfs_quota_us").strip(),
        _read(folder / "cpu.cfs_period_us").strip(),
    ]
    if len(fields) == 2 and all(field.isdigit() for field in fields) and int(fields[1]):
        return int(fields[0]) / int(fields[1])
    return None


def cpu_model(root: Path = Path("/")) -> str:
    """Model name of the CPU; on Arm, which names none there, implementer and part numbers."""
    text = _read(root / "proc/cpuinfo")
    fields = dict(re.findall(r"^([\w ]+?)\s*:\s*(.*)$", text, re.MULTILINE))
    if name := fields.get("model name"):
        return " ".join(name.split())
    if part := fields.get("CPU part"):
        return f"{platform.machine()} implementer {fields.get('CPU implementer', '?')} part {part}"
    return platform.processor() or platform.machine()


def virtualization(root: Path = Path("/")) -> str:
    """``none``, or the hypervisor's name as far as the guest is told."""
    vendor = _read(root / "sys/class/dmi/id/sys_vendor").strip()
    product = _read(root / "sys/class/dmi/id/product_name").strip()
    guest = re.search(r"^flags\s*:.*\bhypervisor\b", _read(root / "proc/cpuinfo"), re.MULTILINE)
    if not guest:
        return "none"
    return " ".join(f"{vendor} {product}".split()) or "hypervisor"


def container(root: Path = Path("/")) -> str | None:
    """Guess which kind of container this process is in; null for none."""
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if os.environ.get("APPTAINER_CONTAINER") or os.environ.get("SINGULARITY_CONTAINER"):
        return "apptainer"
    for marker, name in ((".dockerenv", "docker"), ("run/.containerenv", "podman")):
        if (root / marker).exists():
            return name
    return os.environ.get("container")  # noqa: SIM112 (systemd and podman spell it so)


def has_nic(folder: Path = NICS) -> bool:
    """Whether this node has an InfiniBand or RoCE device."""
    return folder.is_dir() and any(folder.iterdir())


def _sockets() -> int:
    return len(set(re.findall(r"^physical id\s*: (\d+)", _read(Path("/proc/cpuinfo")), re.M))) or 1


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return platform.system()


def _deep_ep_version() -> str | None:
    found = deep_ep_package.find()
    return found.version if found else None


def _first_version(*packages: str) -> str | None:
    return next((found for found in map(version, packages) if found), None)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
