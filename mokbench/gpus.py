"""The GPUs as NVML tells them; a machine without a driver has none, and nothing here raises."""

import contextlib
import itertools
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from ctypes import byref
from dataclasses import dataclass
from functools import cache
from typing import Any

import pynvml

# sm_90: wgmma, bulk copies and the rest that the kernels are written in.
LEAST_CAPABILITY = (9, 0)


def arch_of(capability: tuple[int, int]) -> str:
    """What NVRTC compiles for, as in sm_90a."""
    major, minor = capability
    # wgmma and setmaxnreg exist only in the architecture-specific targets.
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def ranks_a_gpu(ranks: int, gpus: int) -> int:
    """Neighbouring ranks share a GPU where there are fewer GPUs than ranks; ``gpus`` from 1 on."""
    return -(-ranks // gpus)


@dataclass(frozen=True)
class Gpus:
    """GPUs of this machine. ``model`` joins the names where they differ; ``note`` says what failed.

    ``topology`` reads ``nvlink 18 links a GPU`` or ``pcie``, with the pairs' common ancestors.
    """

    count: int = 0
    model: str | None = None
    driver: str | None = None
    topology: str | None = None
    memory_bytes: int | None = None
    uuids: tuple[str, ...] = ()
    note: str | None = None
    compute_capability: tuple[int, int] | None = None
    # nvmlComputeMode_t of each GPU; empty where not readable.
    compute_modes: tuple[int, ...] = ()
    # Whether NVLink connects every pair of GPUs; some machines have it between some only.
    all_linked: bool = False
    # Pairs of NVML indices, the lower one first, that NVLink connects.
    linked_pairs: tuple[tuple[int, int], ...] = ()
    # The MNNVL domain of each GPU, null where it is in none.
    mnnvl_domains: tuple[str | None, ...] = ()

    def visible(self, environment: Mapping[str, str] = os.environ) -> int:
        """GPUs that ranks may use: NVML counts all, CUDA_VISIBLE_DEVICES may name fewer."""
        chosen = self.chosen(environment)
        return self.count if chosen is None else min(self.count, len(chosen))

    def chosen(self, environment: Mapping[str, str] = os.environ) -> list[str] | None:
        """Entries of CUDA_VISIBLE_DEVICES that name a GPU; None where it is not set."""
        listed = environment.get("CUDA_VISIBLE_DEVICES")
        return None if listed is None else _named(listed, self.count)

    def uuid(self, index: int, environment: Mapping[str, str] = os.environ) -> str | None:
        """UUID of CUDA's device ``index``; None where NVML gave none.

        CUDA counts as NVML does where all GPUs are alike, or with CUDA_DEVICE_ORDER=PCI_BUS_ID.
        """
        chosen = self.chosen(environment)
        if chosen is not None and index >= len(chosen):
            return None
        entry = str(index) if chosen is None else chosen[index]
        if entry.isdecimal():
            return self.uuids[int(entry)] if int(entry) < len(self.uuids) else None
        # CUDA takes the beginning of a UUID for the whole.
        return next((uuid for uuid in self.uuids if uuid.startswith(entry)), entry)

    def linked_to(self, uuid: str | None) -> tuple[str, ...]:
        """UUIDs of the GPUs that NVLink connects with this one."""
        pairs = [(self.uuids[a], self.uuids[b]) for a, b in self.linked_pairs]
        return tuple(b if a == uuid else a for a, b in pairs if uuid in (a, b))

    def mnnvl_domain(self, uuid: str | None) -> str | None:
        """The multi-node NVLink domain of the GPU with this UUID, or None."""
        return dict(zip(self.uuids, self.mnnvl_domains, strict=False)).get(uuid or "")

    def ranks_per_gpu(self, ranks: int) -> int:
        """How many of ``ranks`` ranks share a GPU here; neighbours do where GPUs are too few."""
        return ranks_a_gpu(ranks, max(1, self.visible()))

    def link(self, ranks: int) -> str:
        """What lies between ``ranks`` ranks of the cuda fabric: none, hbm, nvlink or pcie.

        The slowest of the pairs of this machine. Where ranks share several GPUs it is what lies
        between the GPUs, which most pairs of ranks cross. Never mnnvl: ranks are on one node.
        """
        if ranks == 1:
            return "none"
        if ranks <= self.ranks_per_gpu(ranks):
            return "hbm"
        return "nvlink" if self.all_linked else "pcie"


def read_gpus() -> Gpus:
    """Ask NVML about all GPUs of this machine, whatever CUDA_VISIBLE_DEVICES says."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Gpus(note=f"no GPU: NVML: {error}")
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        linked_pairs = _linked_pairs(handles)
        names = Counter(_text(pynvml.nvmlDeviceGetName(handle)) for handle in handles)
        return Gpus(
            count=len(handles),
            model=" + ".join(sorted(names)) or None,
            driver=_text(pynvml.nvmlSystemGetDriverVersion()),
            topology=_topology(handles),
            memory_bytes=_memory(handles),
            uuids=tuple(_text(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles),
            compute_capability=_capability(handles),
            compute_modes=_compute_modes(handles),
            all_linked=len(handles) > 1 and len(linked_pairs) == math.comb(len(handles), 2),
            linked_pairs=linked_pairs,
            mnnvl_domains=tuple(map(_mnnvl_domain, handles)),
        )
    except pynvml.NVMLError as error:
        return Gpus(note=f"GPUs not readable: NVML: {error}")
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def visible_gpus() -> int:
    """GPUs that CUDA would show to a process started from here; asked once. 0 ``elsewhere``."""
    return 0 if _IS_ELSEWHERE.get() else visible_here()


@cache
def visible_here() -> int:
    """The same wherever what is decided runs."""
    return read_gpus().visible()


_IS_ELSEWHERE = ContextVar("is_elsewhere", default=False)


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """Decisions within are for other machines: the GPUs of this one are no reason."""
    token = _IS_ELSEWHERE.set(True)
    try:
        yield
    finally:
        _IS_ELSEWHERE.reset(token)


def _named(listed: str, count: int) -> list[str]:
    """Entries of CUDA_VISIBLE_DEVICES up to the first that names no GPU, as CUDA reads them."""
    entries = [entry.strip() for entry in listed.split(",")]
    return list(
        itertools.takewhile(
            lambda entry: (
                entry.startswith(("GPU-", "MIG-")) or (entry.isdecimal() and int(entry) < count)
            ),
            entries,
        )
    )


def _memory(handles: list[Any]) -> int | None:
    try:
        return min((int(pynvml.nvmlDeviceGetMemoryInfo(h).total) for h in handles), default=None)
    except pynvml.NVMLError:
        return None


def _capability(handles: list[Any]) -> tuple[int, int] | None:
    """The oldest GPU's, since ranks run on all of them."""
    try:
        found = [pynvml.nvmlDeviceGetCudaComputeCapability(handle) for handle in handles]
    except pynvml.NVMLError:
        return None
    return min(((int(major), int(minor)) for major, minor in found), default=None)


def _compute_modes(handles: list[Any]) -> tuple[int, ...]:
    try:
        return tuple(int(pynvml.nvmlDeviceGetComputeMode(handle)) for handle in handles)
    except pynvml.NVMLError:
        return ()


def _topology(handles: list[Any]) -> str | None:
    """How the GPUs reach one another: NVLinks that are up, and each pair's common PCIe ancestor."""
    if len(handles) < 2:
        return None
    links = sorted({_active_links(handle) for handle in handles})
    up = f"nvlink {'-'.join(map(str, links))} links a GPU" if links[-1] else "no nvlink"
    try:
        levels = {
            int(pynvml.nvmlDeviceGetTopologyCommonAncestor(a, b))
            for i, a in enumerate(handles)
            for b in handles[i + 1 :]
        }
    except pynvml.NVMLError as error:
        return f"{up}, pcie unavailable: {error}"
    return f"{up}, pcie {' '.join(_LEVELS.get(level, str(level)) for level in sorted(levels))}"


def _linked_pairs(handles: list[Any]) -> tuple[tuple[int, int], ...]:
    """As NVML says of each pair; where it does not say, every two GPUs that have a link."""
    linked = [i for i, handle in enumerate(handles) if _active_links(handle)]
    pairs = tuple(itertools.combinations(linked, 2))
    try:
        return tuple(
            (a, b)
            for a, b in pairs
            if not pynvml.nvmlDeviceGetP2PStatus(handles[a], handles[b], _P2P_NVLINK)
        )
    except pynvml.NVMLError:
        return pairs


def fabric_info(handle: Any) -> Any:
    """NVML's nvmlGpuFabricInfoV_t of a GPU; raises NVMLError where the driver has none."""
    info = pynvml.c_nvmlGpuFabricInfoV_t()
    pynvml.nvmlDeviceGetGpuFabricInfoV(handle, byref(info))
    return info


def _mnnvl_domain(handle: Any) -> str | None:
    """Cluster and clique of the multi-node NVLink domain that a GPU has joined, or None.

    Hopper with NVSwitch joins a fabric too, but one of its host alone, without a cluster.
    """
    try:
        info = fabric_info(handle)
    except pynvml.NVMLError:
        return None
    joined = info.state == pynvml.NVML_GPU_FABRIC_STATE_COMPLETED and info.status == _SUCCESS
    if not joined or not any(info.clusterUuid):
        return None
    return f"{bytes(info.clusterUuid).hex()}-{info.cliqueId}"


def _active_links(handle: Any) -> int:
    """Links that are up or asleep (state 2), which wake on use."""
    active = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += int(pynvml.nvmlDeviceGetNvLinkState(handle, link)) != 0
        except pynvml.NVMLError:  # past the last link of this GPU, or no NVLink at all
            break
    return active


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


_SUCCESS = int(pynvml.NVML_SUCCESS)
# nvml.h, NVML_P2P_CAPS_INDEX_NVLINK.
_P2P_NVLINK = 2
_LEVELS = {
    int(pynvml.NVML_TOPOLOGY_INTERNAL): "same board",
    int(pynvml.NVML_TOPOLOGY_SINGLE): "one switch",
    int(pynvml.NVML_TOPOLOGY_MULTIPLE): "several switches",
    int(pynvml.NVML_TOPOLOGY_HOSTBRIDGE): "host bridge",
    int(pynvml.NVML_TOPOLOGY_NODE): "one NUMA node",
    int(pynvml.NVML_TOPOLOGY_SYSTEM): "across NUMA nodes",
}
