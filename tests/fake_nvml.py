"""Recorded NVML answers of whole machines, put in pynvml's place."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pynvml

NOT_SUPPORTED = int(pynvml.NVML_ERROR_NOT_SUPPORTED)
GIB = 2**30
# (nvmlReturn, value type, value); 1 is unsigned int, 3 unsigned long long.
FieldAnswer = tuple[int, int, int]


def field_array(pairs: list[tuple[int, int]], answer: Callable[[int, int], FieldAnswer]) -> Any:
    """What the binding returns for (field, scope) pairs."""
    values = (pynvml.c_nvmlFieldValue_t * len(pairs))()
    for value, (field_id, scope) in zip(values, pairs, strict=True):
        value.nvmlReturn, value.valueType, number = answer(field_id, scope)
        value.timestamp = 1
        # Upper bytes that a reader of the wrong union member would take for the value.
        value.value.ullVal = number if value.valueType == 3 else number | 0xAB << 32
    return values


def refused(code: int) -> Callable[..., Any]:
    def answer(*_: Any) -> Any:
        raise pynvml.NVMLError(code)

    return answer


@dataclass
class Box:
    """A machine; the defaults are eight H200 on NVSwitch."""

    gpus: int = 8
    free: int = 139 * GIB
    clock: int = 1980
    reasons: int = 0x1
    compute_mode: int = 0
    capability: tuple[int, int] = (9, 0)
    links: int | None = 18
    links_down: tuple[int, ...] = ()
    fabric: tuple[int, int] = (3, 0)
    cluster: int = 0
    health: int = 2
    gpm: int = 1
    peer: dict[tuple[int, int, int], int] = field(default_factory=dict)
    overrides: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def fields(self, field_id: int, scope: int) -> FieldAnswer:
        if self.links is None:
            return NOT_SUPPORTED, 0, 0
        if field_id == 91:
            return 0, 1, self.links
        if field_id in (138, 139, 140, 141) and scope == 0xFFFFFFFF:
            return 0, 3, 1000 * field_id
        return NOT_SUPPORTED, 0, 0

    def link_state(self, _gpu: int, link: int) -> int:
        if self.links is None:
            raise pynvml.NVMLError(NOT_SUPPORTED)
        return int(link not in self.links_down)

    def fabric_info(self, _gpu: int, reference: Any) -> int:
        info = reference._obj
        info.state, info.status = self.fabric
        info.clusterUuid[0] = self.cluster
        info.cliqueId, info.healthMask = 7, self.health
        return 0

    def install(self, monkeypatch: Any) -> None:
        class Memory:
            total, free = 140 * GIB, self.free

        class Support:
            isSupportedDevice = self.gpm  # noqa: N815 (pynvml's name)

        answers: dict[str, Callable[..., Any]] = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: self.gpus,
            "nvmlDeviceGetHandleByIndex": lambda gpu: gpu,
            "nvmlDeviceGetName": lambda _: "NVIDIA H200",
            "nvmlDeviceGetUUID": lambda gpu: f"GPU-{gpu}",
            "nvmlDeviceGetMemoryInfo": lambda _: Memory,
            "nvmlDeviceGetCudaComputeCapability": lambda _: self.capability,
            "nvmlSystemGetDriverVersion": lambda: "580.159.04",
            "nvmlSystemGetCudaDriverVersion_v2": lambda: 13000,
            "nvmlDeviceGetComputeMode": lambda _: self.compute_mode,
            "nvmlDeviceGetClockInfo": lambda _, kind: {1: self.clock, 2: 3201}[kind],
            "nvmlDeviceGetMaxClockInfo": lambda _, kind: {1: 1980, 2: 3201}[kind],
            "nvmlDeviceGetCurrentClocksEventReasons": lambda _: self.reasons,
            "nvmlDeviceGetNvLinkState": self.link_state,
            "nvmlDeviceGetNvLinkVersion": lambda _gpu, _link: 6,
            "nvmlDeviceGetTopologyCommonAncestor": lambda _a, _b: 50,
            "nvmlDeviceGetFieldValues": lambda _, pairs: field_array(pairs, self.fields),
            "nvmlGpmQueryDeviceSupport": lambda _: Support,
            "nvmlDeviceGetGpuFabricInfoV": self.fabric_info,
            "nvmlDeviceGetP2PStatus": lambda a, b, cap: self.peer.get((a, b, cap), 0),
        }
        for name, answer in {**answers, **self.overrides}.items():
            monkeypatch.setattr(pynvml, name, answer)


def one_gpu_vm() -> Box:
    """One H200 passed through to a guest, as seen on 2026-12-01: no NVLink, GPM there."""
    return Box(gpus=1, links=None, fabric=(0, 0), clock=345)
