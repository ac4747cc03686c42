import ctypes
from collections.abc import Sequence
from typing import Any

import pynvml
import pytest
from fake_nvml import NOT_SUPPORTED, refused

from mokbench.measure.link_counters import (
    ALL_LINKS,
    SUMMED,
    Count,
    LinkBytes,
    LinkCounters,
    LinkReading,
    link_bytes,
)
from mokbench.measure.nvml_gpu import FieldValue, NvmlGpu, code_name

KIB = 1024
MAX = 2**64 - 1
PAYLOAD_TX, PAYLOAD_RX, RAW_TX, RAW_RX = 138, 139, 140, 141


class Links:
    """A GPU's links as NVML shows them: scope 0xFFFFFFFF is their sum, another scope one link.

    ``counters`` is field -> value of each link; ``status`` is of one value, ``call`` of all calls.
    """

    def __init__(self, counters: dict[int, list[int]], gpm: Sequence[float] = ()) -> None:
        self.counters = counters
        self.status: dict[tuple[int, int], int] = {}
        self.call: int | None = None
        self.asked: list[tuple[int, int]] = []
        self.gpm, self.gpm_status = list(gpm), [0, 0]
        self.freed: list[int] = []
        self.samples = 0
        self.now_us = 1_000_000

    def field_values(self, fields: Sequence[tuple[int, int]]) -> list[FieldValue]:
        if self.call is not None:
            raise pynvml.NVMLError(self.call)
        self.asked += fields
        return [self.one(*pair) for pair in fields]

    def one(self, field: int, scope: int) -> FieldValue:
        values = self.counters.get(field)
        status = self.status.get((field, scope), 0 if values is not None else NOT_SUPPORTED)
        if status or values is None:
            return FieldValue(status, 0, 0)
        number = sum(values) if scope == ALL_LINKS else values[scope]
        return FieldValue(0, number % 2**64, self.now_us)

    def gpm_supported(self) -> bool:
        if self.call is not None:
            raise pynvml.NVMLError(self.call)
        return bool(self.gpm)

    def gpm_sample(self) -> int:
        self.samples += 1
        return self.samples

    def gpm_metrics(self, first: int, second: int, metrics: Sequence[int]) -> list[FieldValue]:
        assert (first, second, list(metrics)) == (1, 2, [61, 60])
        return [FieldValue(s, v) for s, v in zip(self.gpm_status, self.gpm, strict=True)]

    def gpm_free(self, sample: int) -> None:
        self.freed.append(sample)


def hopper() -> Links:
    """Two links; link 0 has moved less than link 1, so that reading it alone is seen."""
    return Links({138: [10, 1000], 139: [20, 2000], 140: [12, 1200], 141: [24, 2400]})


def moved(links: Links, **steps: list[int]) -> LinkBytes:
    counters = LinkCounters(links)
    before = counters.read()
    for name, by_link in steps.items():
        values = links.counters[int(name.removeprefix("f"))]
        values[:] = [value + step for value, step in zip(values, by_link, strict=True)]
    links.now_us += 2_500_000
    return counters.since(before)


def test_sum_over_links_in_bytes() -> None:
    links = hopper()
    got = moved(links, f138=[3, 100], f139=[5, 200], f140=[4, 130], f141=[6, 270])
    assert got.source == "NVML fields 138-141 over all links"
    assert got.seconds == 2.5
    assert (got.payload_tx, got.payload_rx) == (Count(103 * KIB), Count(205 * KIB))
    assert (got.raw_tx, got.raw_rx) == (Count(134 * KIB), Count(276 * KIB))
    assert got.payload == Count(308 * KIB)
    assert got.raw == Count(410 * KIB)
    assert got.overhead == Count(102 * KIB)
    # The trap: a bare field id, or scope 0, is link 0 alone.
    assert {scope for _, scope in links.asked} == {0xFFFFFFFF}


def test_nothing_moved_is_zero_and_not_null() -> None:
    got = moved(hopper())
    assert (got.payload, got.raw, got.overhead) == (Count(0), Count(0), Count(0))


def test_counter_wraps() -> None:
    links = Links({138: [MAX - 4, 0], 139: [0, 0], 140: [MAX, 0], 141: [0, 0]})
    got = moved(links, f138=[10, 0], f140=[11, 0])
    assert got.payload_tx == Count(10 * KIB)
    assert got.raw_tx == Count(11 * KIB)


def test_counter_that_went_back_is_null() -> None:
    got = moved(hopper(), f138=[-10, -1000])
    assert got.payload_tx == Count(None, "unavailable: field 138 went back between the readings")
    assert got.payload.value is None
    assert got.payload_rx == Count(0)


@pytest.mark.parametrize("code, name", [(3, "NotSupported"), (4, "NoPermission"), (57, "code 57")])
def test_one_value_fails_and_the_others_count(code: int, name: str) -> None:
    links = hopper()
    links.status[(RAW_RX, ALL_LINKS)] = code
    got = moved(links, f138=[0, 7], f140=[0, 9])
    assert got.payload == Count(7 * KIB)
    assert got.raw_tx == Count(9 * KIB)
    assert got.raw_rx == got.raw == got.overhead == Count(None, f"unavailable: {name}")


def test_a_value_that_fails_later_is_null() -> None:
    links = hopper()
    counters = LinkCounters(links)
    before = counters.read()
    links.status[(PAYLOAD_TX, ALL_LINKS)] = 15
    got = counters.since(before)
    assert got.payload_tx == got.payload == Count(None, "unavailable: GpuIsLost")
    assert got.payload_rx == Count(0)
    links.call = 15
    got = counters.since(before)
    assert got.source is None
    assert {got.raw, got.payload_rx} == {Count(None, "unavailable: GpuIsLost")}
    assert got.seconds is None


def test_fewer_raw_than_payload_bytes_is_no_overhead() -> None:
    got = moved(hopper(), f138=[0, 5], f140=[0, 4])
    assert got.overhead.value is None
    assert "fewer raw bytes" in (got.overhead.note or "")


def blackwell() -> Links:
    return Links({91: [3], 202: [5, MAX, 7], 204: [1, 2, 3]})


def test_nvlink5_bytes_of_each_link() -> None:
    links = blackwell()
    got = moved(links, f202=[100, 200, 300], f204=[0, 0, 4096])
    assert got.source == "NVML fields 202 and 204 over 3 links"
    # In bytes, not KiB; link 1 wrapped on its own.
    assert (got.raw_tx, got.raw_rx, got.raw) == (Count(600), Count(4096), Count(4696))
    why = "unavailable: these fields do not tell payload from protocol"
    assert got.payload == got.overhead == Count(None, why)
    assert {scope for field, scope in links.asked if field in (202, 204)} == {0, 1, 2}
    assert (202, ALL_LINKS) not in links.asked


def test_nvlink5_link_that_fails_is_named_and_not_left_out() -> None:
    links = blackwell()
    links.status[(202, 1)] = 2
    got = moved(links, f202=[100, 200, 300])
    assert got.raw_tx == got.raw == Count(None, "unavailable: InvalidArgument (link 1)")
    assert got.raw_rx == Count(0)


@pytest.mark.parametrize("links", [Links({}), Links({91: [0]}), Links({91: [18]})])
def test_values_not_supported_anywhere(links: Links) -> None:
    """The answers of an H200 without NVLink; fields 202 fail too where links are counted."""
    if 91 in links.counters:
        links.status.update({(f, s): 3 for f in (202, 204) for s in range(18)})
    got = moved(links)
    assert got.source is None
    assert got.payload == got.raw == got.overhead == Count(None, "unavailable: NotSupported")


@pytest.mark.parametrize(
    "code, name", [(3, "NotSupported"), (12, "LibraryNotFound"), (13, "FunctionNotFound")]
)
def test_whole_call_fails(code: int, name: str) -> None:
    links = hopper()
    links.call = code
    counters = LinkCounters(links)
    got = counters.since(counters.read())
    assert got.source is None
    assert got.payload_tx == got.raw_rx == got.overhead == Count(None, f"unavailable: {name}")


def test_readings_of_two_sources_do_not_mix() -> None:
    before = LinkCounters(hopper()).read()
    with pytest.raises(AssertionError, match="202 and 204 over 3 links read after"):
        link_bytes(before, LinkCounters(blackwell()).read())
    assert link_bytes(before, LinkReading(SUMMED, {}, "Timeout")).raw.note == "unavailable: Timeout"


def gpm(links: Links, seconds: float) -> Any:
    times = iter([10.0, 10.0 + seconds])
    counters = LinkCounters(links, clock=lambda: next(times))
    return counters.gpm_rates(counters.gpm_start())


def test_gpm_rates_in_bytes() -> None:
    links = Links({}, gpm=[2.5, 1000.0])
    got = gpm(links, 0.25)
    assert (got.tx, got.rx) == (Count(2621440), Count(1048576000))
    assert got.seconds == 0.25
    assert links.freed == [1, 2]


def test_gpm_statuses() -> None:
    links = Links({}, gpm=[2.0, float("nan")])
    links.gpm_status = [4, 0]
    got = gpm(links, 0.25)
    assert got.tx == Count(None, "unavailable: NoPermission")
    assert got.rx == Count(None, "unavailable: GPM says nan")
    short = Links({}, gpm=[1.0, 1.0])
    assert gpm(short, 0.0625).tx.note == "unavailable: samples 62 ms apart, GPM needs 100"
    assert short.freed == [1, 2]
    assert gpm(Links({}), 1.0).rx == Count(None, "unavailable: NotSupported")
    lost = Links({}, gpm=[1.0, 1.0])
    lost.call = 15
    assert gpm(lost, 1.0).tx == Count(None, "unavailable: GpuIsLost")
    assert lost.freed == []


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """NVML's C functions, below the real binding; a name that is missing is an old driver's."""
    functions: dict[str, Any] = {
        "nvmlInitWithFlags": lambda _: 0,
        "nvmlInit_v2": lambda: 0,
        "nvmlShutdown": lambda: 0,
        "nvmlDeviceGetHandleByIndex_v2": lambda _index, _handle: 0,
        "nvmlDeviceGetHandleByUUID": lambda _uuid, _handle: 0,
    }

    def find(name: str) -> Any:
        if name not in functions:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return functions[name]

    monkeypatch.setattr(pynvml, "_LoadNvmlLibrary", lambda: None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", find)
    return functions


def answering(values: list[tuple[int, int, str, int]], asked: list[tuple[int, int]]) -> Any:
    """nvmlDeviceGetFieldValues over (status, type, union member, number)."""

    def function(_handle: Any, count: ctypes.c_int32, reference: Any) -> int:
        array = reference._obj
        assert count.value == len(values)
        for slot, (status, kind, member, number) in zip(array, values, strict=True):
            asked.append((slot.fieldId, slot.scopeId))
            slot.nvmlReturn, slot.valueType, slot.timestamp = status, kind, 77
            slot.value.ullVal = MAX  # what an earlier answer left in the union
            setattr(slot.value, member, number)
        return 0

    return function


def test_binding_passes_scopes_and_reads_each_type(library: dict[str, Any]) -> None:
    asked: list[tuple[int, int]] = []
    values = [
        (0, 3, "ullVal", 2**63 + 5),
        (0, 1, "uiVal", 18),
        (0, 0, "dVal", 0.5),
        (0, 4, "sllVal", -3),
        (0, 6, "usVal", 9),
        (3, 3, "ullVal", 123),
        (0, 99, "ullVal", 1),
    ]
    library["nvmlDeviceGetFieldValues"] = answering(values, asked)
    pairs = [(138, ALL_LINKS), (91, 0), (1, 0), (2, 0), (3, 0), (139, ALL_LINKS), (4, 17)]
    got = NvmlGpu(0).field_values(pairs)
    assert asked == pairs
    assert [value.value for value in got[:5]] == [2**63 + 5, 18, 0.5, -3, 9]
    assert got[5] == FieldValue(3, 0, 77)
    assert got[6].status == pynvml.NVML_ERROR_UNKNOWN
    bare: Any = [138]
    with pytest.raises(TypeError):
        NvmlGpu(0).field_values(bare)


def test_binding_of_gpm(library: dict[str, Any]) -> None:
    freed = []

    def metrics_get(reference: Any) -> int:
        question = reference._obj
        assert (question.version, question.numMetrics) == (1, 2)
        assert [question.metrics[i].metricId for i in range(2)] == [61, 60]
        question.metrics[0].value = 12.5
        question.metrics[1].nvmlReturn = 3
        return 0

    def support(_handle: Any, reference: Any) -> int:
        reference._obj.isSupportedDevice = 1
        return 0

    library["nvmlGpmQueryDeviceSupport"] = support
    library["nvmlGpmSampleAlloc"] = lambda _: 0
    library["nvmlGpmSampleGet"] = lambda _handle, _sample: 0
    library["nvmlGpmSampleFree"] = lambda sample: freed.append(sample) or 0
    library["nvmlGpmMetricsGet"] = metrics_get
    times = iter([0.0, 0.2])
    counters = LinkCounters(NvmlGpu(0), clock=lambda: next(times))
    got = counters.gpm_rates(counters.gpm_start())
    assert got.tx == Count(round(12.5 * 2**20))
    assert got.rx == Count(None, "unavailable: NotSupported")
    assert len(freed) == 2

    # A container without permission: seen as return 4 of the sample call.
    library["nvmlGpmSampleGet"] = lambda _handle, _sample: 4
    assert LinkCounters(NvmlGpu(0)).gpm_start().failure == "NoPermission"
    assert len(freed) == 3


def test_gpu_is_found_by_uuid_with_and_without_prefix(
    library: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: asked.append(uuid) or 1)
    library["nvmlDeviceGetFieldValues"] = answering([], [])
    for uuid in ("1234-ab", "GPU-1234-ab", "MIG-99"):
        NvmlGpu(uuid).field_values([])
    assert asked == ["GPU-1234-ab", "GPU-1234-ab", "MIG-99"]


def test_missing_library_gpu_and_function_are_null(
    library: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = NvmlGpu(0)
    counters = LinkCounters(gpu)
    # An old driver has no such function.
    assert counters.read().failure == "FunctionNotFound"
    gpu.close()

    opened, closed = [], []
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: opened.append(1))
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: closed.append(1))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", refused(2))
    assert counters.since(counters.read()).raw == Count(None, "unavailable: InvalidArgument")
    assert len(opened) == len(closed) > 0
    monkeypatch.setattr(pynvml, "nvmlInit", refused(12))
    got = counters.since(counters.read())
    assert (got.source, got.raw) == (None, Count(None, "unavailable: LibraryNotFound"))
    assert counters.gpm_rates(counters.gpm_start()).tx.note == "unavailable: LibraryNotFound"


def test_code_names() -> None:
    assert code_name(3) == code_name(pynvml.NVMLError(3)) == "NotSupported"
    assert code_name(999) == "Unknown"
    assert code_name(57) == "code 57"


@pytest.mark.gpu
def test_counters_of_this_machine() -> None:
    gpu = NvmlGpu(0)
    counters = LinkCounters(gpu)
    before = counters.read()
    if before.failure in ("LibraryNotFound", "DriverNotLoaded", "InvalidArgument"):
        pytest.skip(f"no NVIDIA GPU: {before.failure}")
    got = counters.since(before)
    for count in (got.payload, got.raw, got.overhead):
        assert (count.value is None) == (count.note is not None)
    gpu.close()
