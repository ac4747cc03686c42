"""One GPU's NVML answers, each value with its own status.

The only place where link counters touch pynvml: tests replay recorded answers behind the same face.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pynvml

SUCCESS = 0
# Members of nvmlValue_t by nvmlValueType_t; another member would show stale upper bytes.
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


@dataclass(frozen=True)
class FieldValue:
    """One value of an answer. ``status`` is its own nvmlReturn; ``value`` means nothing unless 0.

    ``timestamp_us`` is NVML's, 0 where it gives none.
    """

    status: int
    value: float = 0
    timestamp_us: int = 0


class LinkNvml(Protocol):
    """What link counters ask NVML about one GPU. Whole calls that fail raise pynvml.NVMLError."""

    def field_values(self, fields: Sequence[tuple[int, int]]) -> list[FieldValue]:
        """Values of (field id, scope) pairs, in their order."""

    def gpm_supported(self) -> bool:
        """Whether this GPU has GPM metrics (Hopper and newer)."""

    def gpm_sample(self) -> Any:
        """A GPM sample of now, to be freed."""

    def gpm_metrics(self, first: Any, second: Any, metrics: Sequence[int]) -> list[FieldValue]:
        """Means over the time between two samples."""

    def gpm_free(self, sample: Any) -> None:
        """Free a sample."""


class NvmlGpu:
    """LinkNvml of a GPU by NVML index, or by UUID with or without its ``GPU-``.

    NVML ignores CUDA_VISIBLE_DEVICES, so a rank names its GPU by torch's UUID. NVML is opened by
    the first question, so that a missing driver is a pynvml.NVMLError like any failed call.
    """

    def __init__(self, gpu: int | str) -> None:
        self._gpu = gpu
        self._handle: Any = None

    def field_values(self, fields: Sequence[tuple[int, int]]) -> list[FieldValue]:
        """See LinkNvml."""
        # pynvml takes a bare id as (id, 0), which is link 0 alone: only pairs get here.
        pairs = [(int(field), int(scope)) for field, scope in fields]
        answer = pynvml.nvmlDeviceGetFieldValues(self._open(), pairs)
        return [_decoded(value) for value in answer]

    def gpm_supported(self) -> bool:
        """See LinkNvml."""
        return bool(pynvml.nvmlGpmQueryDeviceSupport(self._open()).isSupportedDevice)

    def gpm_sample(self) -> Any:
        """See LinkNvml."""
        handle, sample = self._open(), pynvml.nvmlGpmSampleAlloc()
        try:
            pynvml.nvmlGpmSampleGet(handle, sample)
        except pynvml.NVMLError:
            self.gpm_free(sample)
            raise
        return sample

    def gpm_metrics(self, first: Any, second: Any, metrics: Sequence[int]) -> list[FieldValue]:
        """See LinkNvml."""
        question = pynvml.c_nvmlGpmMetricsGet_t()
        question.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        question.numMetrics = len(metrics)
        question.sample1, question.sample2 = first, second
        for i, metric in enumerate(metrics):
            question.metrics[i].metricId = metric
        answer = pynvml.nvmlGpmMetricsGet(question).metrics
        return [FieldValue(answer[i].nvmlReturn, answer[i].value) for i in range(len(metrics))]

    def gpm_free(self, sample: Any) -> None:
        """See LinkNvml."""
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlGpmSampleFree(sample)

    def close(self) -> None:
        """Give NVML back; asking again opens it again."""
        if self._handle is not None:
            self._handle = None
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()

    def _open(self) -> Any:
        if self._handle is None:
            pynvml.nvmlInit()
            try:
                self._handle = self._find()
            except pynvml.NVMLError:
                pynvml.nvmlShutdown()
                raise
        return self._handle

    def _find(self) -> Any:
        if isinstance(self._gpu, int):
            return pynvml.nvmlDeviceGetHandleByIndex(self._gpu)
        has_prefix = self._gpu.startswith(("GPU-", "MIG-"))
        return pynvml.nvmlDeviceGetHandleByUUID(self._gpu if has_prefix else f"GPU-{self._gpu}")


def code_name(error: "pynvml.NVMLError | int") -> str:
    """``NotSupported`` for 3, ``code 57`` for one that the binding does not know."""
    code = int(error if isinstance(error, int) else error.value)
    name = type(pynvml.NVMLError(code)).__name__.removeprefix("NVMLError")
    return name.removeprefix("_") or f"code {code}"


def _decoded(value: Any) -> FieldValue:
    status, kind = int(value.nvmlReturn), int(value.valueType)
    if status == SUCCESS and kind >= len(_MEMBERS):
        # A type newer than this binding cannot be read, whatever the driver says.
        return FieldValue(int(pynvml.NVML_ERROR_UNKNOWN))
    number = getattr(value.value, _MEMBERS[kind]) if status == SUCCESS else 0
    return FieldValue(status, number, int(value.timestamp))
