"""Times between the clock64 counters of two SMs, whose offset pings through local counters give.

As in NTP: the mover notes when it sends a ping and when the answer is back, the observer when it
sees the ping and answers. Half-way between sending and return is when it was seen, if both ways
take the same time; the error is at most half the round trip, so the fastest ping of many counts.

Both are SMs of one GPU, so they also see the same timer (PTX ISA, %globaltimer) tick, every 32 ns
on an H200, and each notes between which of its clock's readings. That is sharper than a ping, which
takes a microsecond. What the ticks say must lie within what the pings allow.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mokbench.errors import MokbenchError

Cycles = NDArray[np.int64]
# Above this share of rounds the payload's watcher is too slow to time what follows the payload.
MAX_LATE_SHARE = 0.1


class ClockError(MokbenchError):
    """Stamps that cannot be right: nothing is reported from them."""


# Ticks that are needed to say anything, and the share of them that counts: the sharpest ones.
_LEAST_TICKS, _SHARE_OF_TICKS = 16, 0.5


@dataclass(frozen=True)
class Ticks:
    """By one SM's clock, the timer began to show ``ns`` between ``low`` and ``high``, cycles."""

    ns: Cycles
    low: Cycles
    high: Cycles

    @classmethod
    def of(cls, ns: Cycles, low: Cycles, high: Cycles) -> "Ticks | None":
        """The sharpest ticks; None of too few. Raises ClockError where a clock went back."""
        there = ns > 0
        if there.sum() < _LEAST_TICKS:
            return None
        ns, low, high = ns[there], low[there], high[there]
        if (np.diff(ns) <= 0).any() or (np.diff(low) <= 0).any() or (high < low).any():
            raise ClockError("a timer or an SM's clock went back while it was looked at")
        sharp = high - low <= np.quantile(high - low, _SHARE_OF_TICKS)
        return cls(ns[sharp], low[sharp], high[sharp])

    def at(self, ns: int) -> tuple[int, float]:
        """The SM's clock when the timer showed ``ns``, and how wrong that can be, in cycles."""
        origin = int(self.low[0])
        shown = (self.ns - ns).astype(np.float64)
        low, high = (np.asarray(x - origin, np.float64) for x in (self.low, self.high))
        slope, there = np.polyfit(shown, (low + high) / 2, 1)
        line = there + slope * shown
        error = float(np.maximum(high - line, line - low).max())
        return origin + round(float(there)), error


@dataclass(frozen=True)
class Calibration:
    """One calibration, from its fastest ping: ``offset`` is observer's minus mover's clock.

    ``error``: how wrong it can be at most, in cycles.
    """

    at: int
    offset: int
    round_trip: int
    error: float

    @classmethod
    def of(cls, sent: Cycles, seen: Cycles, back: Cycles) -> "Calibration":
        """From the stamps of all its pings."""
        round_trips = back - sent
        if not (sent.all() and seen.all() and back.all()) or round_trips.min() <= 0:
            raise ClockError("pings between two SMs have no stamps or come back before they left")
        best = int(round_trips.argmin())
        round_trip = int(round_trips[best])
        at = int(sent[best]) + round_trip // 2
        return cls(at, int(seen[best]) - at, round_trip, round_trip / 2)

    def sharpened(self, mover: Ticks | None, observer: Ticks | None) -> "Calibration":
        """By the ticks that both saw; as it is where they are few or no sharper than the ping.

        Raises ClockError where the ticks say what the ping excludes.
        """
        if mover is None or observer is None:
            return self
        middle = int(mover.ns[0]) + int(observer.ns[-1])
        at, error = mover.at(middle // 2)
        seen, seen_error = observer.at(middle // 2)
        error += seen_error
        if abs(seen - at - self.offset) > self.error + error:
            raise ClockError(
                f"the timer says that two SMs' clocks are {seen - at} cycles apart, pings "
                f"{self.offset} +- {self.error:.0f}: the timer is not the same for both"
            )
        if error >= self.error:
            return self
        return Calibration(at, seen - at, self.round_trip, error)


@dataclass(frozen=True)
class ClockOffset:
    """The offset between two SMs' clocks over the rounds between two calibrations."""

    before: Calibration
    behind: Calibration

    def __post_init__(self) -> None:
        if self.behind.at <= self.before.at:
            raise ClockError(
                "the second calibration of two SMs' clocks is not later than the first"
            )
        if abs(self.drift) > self.round_trip:
            raise ClockError(
                f"two SMs' clocks moved apart by {self.drift} cycles during the rounds, more than "
                f"a ping's round trip ({self.round_trip}): times between them mean nothing"
            )

    @property
    def round_trip(self) -> int:
        """Of the slower of both calibrations' fastest pings, in cycles."""
        return max(self.before.round_trip, self.behind.round_trip)

    @property
    def drift(self) -> int:
        """How far the offset moved between the calibrations, in cycles."""
        return self.behind.offset - self.before.offset

    @property
    def bound(self) -> float:
        """Largest error of ``elapsed``, in cycles."""
        return max(self.before.error, self.behind.error) + abs(self.drift)

    def elapsed(self, started: Cycles, ended: Cycles) -> NDArray[np.float64]:
        """Cycles from stamps of the mover to stamps of the observer; the drift is interpolated."""
        share = (started - self.before.at) / (self.behind.at - self.before.at)
        apart: NDArray[np.float64] = ended - started - self.before.offset - share * self.drift
        return apart


def after_payload(seen: Cycles, ready: Cycles) -> NDArray[np.float64]:
    """Cycles from the payload to the flags, both seen by polls of one SM.

    Whoever sees the flags could see the payload: where its own poll came later, it was there when
    the flags were, and the part is 0. Of a call's rounds one may be late however few there are, so
    the share must be looked at again over all calls: see require_few_late.
    """
    after = ready - seen
    late = int((after < 0).sum())
    if late > 1:
        require_few_late(late / after.size)
    return np.asarray(after.clip(min=0), dtype=np.float64)


def require_few_late(share: float) -> None:
    """Raise ClockError unless at most a tenth of the rounds saw the payload after its flags."""
    if share > MAX_LATE_SHARE:
        raise ClockError(f"in {share:.0%} of the rounds the payload was seen after its flags")


def plausible(name: str, times_us: NDArray[np.float64], limit_us: float) -> list[float]:
    """The times as a list; raises ClockError when one is negative or above ``limit_us``."""
    low, high = float(times_us.min()), float(times_us.max())
    if not (low >= 0 and high <= limit_us):
        raise ClockError(
            f"{name}: rounds from {low:.3f} to {high:.3f} us, possible are 0 to {limit_us:.0f}"
        )
    return [float(time) for time in times_us]
