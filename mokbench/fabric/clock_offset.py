"""Times between the clock64 counters of two SMs, whose offset pings through local counters give.

As in NTP: the mover notes when it sends a ping and when the answer is back, the observer when it
sees the ping and answers. Half-way between sending and return is when it was seen, if both ways
take the same time; the error is at most half the round trip, so the fastest ping of many counts.
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


@dataclass(frozen=True)
class Calibration:
    """The fastest ping of one calibration: ``offset`` is observer's minus mover's clock."""

    at: int
    offset: int
    round_trip: int

    @classmethod
    def of(cls, sent: Cycles, seen: Cycles, back: Cycles) -> "Calibration":
        """From the stamps of all its pings."""
        round_trips = back - sent
        if not (sent.all() and seen.all() and back.all()) or round_trips.min() <= 0:
            raise ClockError("pings between two SMs have no stamps or come back before they left")
        best = int(round_trips.argmin())
        round_trip = int(round_trips[best])
        at = int(sent[best]) + round_trip // 2
        return cls(at, int(seen[best]) - at, round_trip)


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
        return self.round_trip / 2 + abs(self.drift)

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
