"""Physical NVLink bytes of one GPU, from NVML's cumulative counters and from GPM.

Read once before and once after a chain of passes of at least ``MIN_CHAIN_S``, with all ranks idle
at both ends, and never per iteration: a reading takes long, counts in KiB, and how often the driver
refreshes the counters is documented nowhere. What cannot be read is null with
``unavailable: <NVML's name of the code>``; 0 means that 0 bytes were counted.

    counters = LinkCounters(NvmlGpu(uuid))
    before = counters.read()
    ...                                     # the chain, then a barrier
    moved = counters.since(before)          # LinkBytes
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import pynvml

from mokbench.measure.nvml_gpu import SUCCESS, FieldValue, LinkNvml, code_name

MIN_CHAIN_S = 1.0
# nvml.h: the mean of two samples means nothing when they are closer than this.
MIN_GPM_S = 0.1
# nvml.h: as the scope of a THROUGHPUT field, the sum over all links; scope 0 is link 0 alone.
ALL_LINKS = 0xFFFFFFFF
DATA_TX, DATA_RX, RAW_TX, RAW_RX = 138, 139, 140, 141
XMIT_BYTES, RCV_BYTES = 202, 204
LINK_COUNT = 91
GPM_RX, GPM_TX = 60, 61
_KIB, _MIB = 1024, 2**20
_WRAP = 2**64

FieldKey = tuple[int, int]


@dataclass(frozen=True)
class Count:
    """A count, or null and why there is none."""

    value: int | None
    note: str | None = None

    @classmethod
    def unavailable(cls, why: str) -> Self:
        """Null, with ``unavailable: why``."""
        return cls(None, f"unavailable: {why}")

    def plus(self, other: "Count", sign: int = 1) -> "Count":
        """Sum, or difference with sign -1; null as soon as one is."""
        if self.value is None:
            return self
        return other if other.value is None else Count(self.value + sign * other.value)


@dataclass(frozen=True)
class Source:
    """Fields that a reading takes: (transmit, receive) ids, over ``scopes``, of ``unit_bytes``."""

    name: str
    payload: tuple[int, int] | None
    raw: tuple[int, int]
    scopes: tuple[int, ...]
    unit_bytes: int

    def pairs(self) -> list[FieldKey]:
        """All (field, scope) pairs of a reading."""
        return [
            (field, scope) for scope in self.scopes for field in (self.payload or ()) + self.raw
        ]


SUMMED = Source(
    "NVML fields 138-141 over all links", (DATA_TX, DATA_RX), (RAW_TX, RAW_RX), (ALL_LINKS,), _KIB
)


def nvlink5(links: int) -> Source:
    """NVLink 5 counts bytes "on the link" for each link, so they are raw; payload is not told."""
    name = f"NVML fields 202 and 204 over {links} links"
    return Source(name, None, (XMIT_BYTES, RCV_BYTES), tuple(range(links)), 1)


@dataclass(frozen=True)
class LinkReading:
    """Counters at one moment. ``failure`` names the code with which the whole call failed."""

    source: Source
    values: Mapping[FieldKey, FieldValue]
    failure: str | None = None

    @property
    def is_readable(self) -> bool:
        """Whether at least one value is there."""
        return any(value.status == SUCCESS for value in self.values.values())

    def problem(self, key: FieldKey) -> str | None:
        """Why a value is not there, None when it is."""
        if self.failure is not None:
            return self.failure
        status = self.values[key].status
        if status == SUCCESS:
            return None
        link = "" if key[1] == ALL_LINKS else f" (link {key[1]})"
        return code_name(status) + link


@dataclass(frozen=True)
class LinkBytes:
    """Bytes that crossed one GPU's links between two readings.

    ``source`` is null where nothing was readable; ``seconds`` is between NVML's own timestamps.
    Raw is payload and protocol; of NVLink 5's counters only raw is known.
    """

    source: str | None
    seconds: float | None
    payload_tx: Count
    payload_rx: Count
    raw_tx: Count
    raw_rx: Count

    @property
    def payload(self) -> Count:
        """Payload bytes of both directions."""
        return self.payload_tx.plus(self.payload_rx)

    @property
    def raw(self) -> Count:
        """Payload and protocol bytes of both directions."""
        return self.raw_tx.plus(self.raw_rx)

    @property
    def overhead(self) -> Count:
        """Protocol bytes: raw less payload."""
        overhead = self.raw.plus(self.payload, sign=-1)
        if overhead.value is not None and overhead.value < 0:
            return Count.unavailable("fewer raw bytes than payload bytes were counted")
        return overhead


@dataclass(frozen=True)
class GpmSample:
    """A GPM sample and when it was taken; ``failure`` instead where there is none."""

    sample: Any
    at_s: float
    failure: str | None = None


@dataclass(frozen=True)
class GpmRates:
    """Mean bytes a second over a window of ``seconds``.

    NVIDIA's texts disagree whether headers are in (DCGM issue 231): a second source, to be
    calibrated with a plain copy, not another name for payload or raw.
    """

    tx: Count
    rx: Count
    seconds: float


class LinkCounters:
    """Reads one GPU's counters; nothing here raises for what NVML cannot tell."""

    def __init__(self, nvml: LinkNvml, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml = nvml
        self._clock = clock

    def read(self) -> LinkReading:
        """Counters now: fields 138-141, else NVLink 5's where those say nothing."""
        summed = self._read(SUMMED)
        if summed.is_readable:
            return summed
        links = self._links()
        per_link = self._read(nvlink5(links)) if links else summed
        return per_link if per_link.is_readable else summed

    def since(self, before: LinkReading) -> LinkBytes:
        """Bytes between ``before`` and now, read from the same fields."""
        return link_bytes(before, self._read(before.source))

    def _read(self, source: Source) -> LinkReading:
        pairs = source.pairs()
        try:
            answer = self._nvml.field_values(pairs)
        except pynvml.NVMLError as error:
            return LinkReading(source, {}, code_name(error))
        return LinkReading(source, dict(zip(pairs, answer, strict=True)))

    def _links(self) -> int:
        try:
            (count,) = self._nvml.field_values([(LINK_COUNT, 0)])
        except pynvml.NVMLError:
            return 0
        return int(count.value) if count.status == SUCCESS else 0

    def gpm_start(self) -> GpmSample:
        """Open a GPM window; ``gpm_rates`` closes it and frees the sample."""
        try:
            if not self._nvml.gpm_supported():
                return GpmSample(
                    None, self._clock(), code_name(int(pynvml.NVML_ERROR_NOT_SUPPORTED))
                )
            return GpmSample(self._nvml.gpm_sample(), self._clock())
        except pynvml.NVMLError as error:
            return GpmSample(None, self._clock(), code_name(error))

    def gpm_rates(self, first: GpmSample) -> GpmRates:
        """Mean rates since ``first``, which cannot be used again."""
        second = self.gpm_start() if first.failure is None else first
        seconds = second.at_s - first.at_s
        failure = first.failure or second.failure
        if failure is None and seconds < MIN_GPM_S:
            failure = f"samples {seconds * 1e3:.0f} ms apart, GPM needs {MIN_GPM_S * 1e3:.0f}"
        try:
            if failure is not None:
                return _no_rates(failure, seconds)
            tx, rx = self._nvml.gpm_metrics(first.sample, second.sample, (GPM_TX, GPM_RX))
            return GpmRates(_rate(tx), _rate(rx), seconds)
        except pynvml.NVMLError as error:
            return _no_rates(code_name(error), seconds)
        finally:
            for taken in (first, second):
                if taken.failure is None:
                    self._nvml.gpm_free(taken.sample)


def link_bytes(before: LinkReading, after: LinkReading) -> LinkBytes:
    """Difference of two readings of one source."""
    source = before.source
    assert after.source == source, f"{after.source.name} read after {source.name}"

    def moved(fields: tuple[int, int] | None) -> tuple[Count, Count]:
        if fields is None:
            return (Count.unavailable("these fields do not tell payload from protocol"),) * 2
        return _moved(before, after, fields[0]), _moved(before, after, fields[1])

    is_readable = before.is_readable and after.is_readable
    return LinkBytes(
        source.name if is_readable else None,
        _seconds(before, after),
        *moved(source.payload),
        *moved(source.raw),
    )


def _moved(before: LinkReading, after: LinkReading, field: int) -> Count:
    """Bytes a field counted over all its scopes; each counter wraps on its own, so links differ."""
    total = 0
    for scope in before.source.scopes:
        key = (field, scope)
        why = before.problem(key) or after.problem(key)
        if why is not None:
            return Count.unavailable(why)
        step = (int(after.values[key].value) - int(before.values[key].value)) % _WRAP
        # Half the range takes centuries: it is a counter that went back, by a reset of the GPU.
        if step >= _WRAP // 2:
            return Count.unavailable(f"field {field} went back between the readings")
        total += step
    return Count(total * before.source.unit_bytes)


def _seconds(before: LinkReading, after: LinkReading) -> float | None:
    for key, first in before.values.items():
        second = after.values.get(key)
        if second and first.timestamp_us and second.timestamp_us > first.timestamp_us:
            return (second.timestamp_us - first.timestamp_us) / 1e6
    return None


def _no_rates(why: str, seconds: float) -> GpmRates:
    return GpmRates(Count.unavailable(why), Count.unavailable(why), seconds)


def _rate(value: FieldValue) -> Count:
    if value.status != SUCCESS:
        return Count.unavailable(code_name(value.status))
    if not math.isfinite(value.value) or value.value < 0:
        return Count.unavailable(f"GPM says {value.value}")
    return Count(round(value.value * _MIB))
