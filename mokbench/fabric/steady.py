"""Rounds in calls so short that the clocks of two SMs keep step during enough of them.

While a GPU changes its clock (after a heavy kernel, say) its SMs' clocks run unlike for a while, by
some tenths of a percent, and their offset moves on with the time between a call's calibrations.
Calls in which it moved too far are thrown away: what helps is a shorter time, and patience.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from mokbench.fabric.clock_offset import ClockError

T = TypeVar("T")


@dataclass(frozen=True)
class CallSize:
    """Rounds of one call, and pings of each of its calibrations that are looked at."""

    rounds: int
    pings: int

    def halved(self) -> "CallSize":
        """The next shorter size, down to SHORTEST: the time of a call is that of both."""
        return CallSize(
            max(SHORTEST.rounds, self.rounds // 2), max(SHORTEST.pings, self.pings // 2)
        )


LONGEST = CallSize(rounds=50, pings=256)
# Some 0.1 ms. The fastest of fewer pings would be slower, and the offset's bound wider.
SHORTEST = CallSize(rounds=6, pings=32)
# Time of failed calls and pauses, after which the clocks are taken for ones that never settle.
PATIENCE_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.3


def steady_calls(
    rounds: int,
    call: Callable[[int, int], tuple[T, str | None]],
    gather: Callable[[Any], list[Any]],
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[T]:
    """What ``call(rounds, pings)`` measured, in calls of ``rounds`` rounds together; collective.

    With a call's result comes what is wrong with it on this rank, or None; it counts if nothing is
    on any rank. After a call that does not, calls are halved, and where that is not possible any
    more the clocks get a growing pause. All ranks do the same, by rank 0's time. Raises ClockError
    on all of them once failed calls and pauses have taken PATIENCE_S.
    """
    results: list[T] = []
    failed, failed_s = 0, 0.0
    size, pause_s = LONGEST, _FIRST_PAUSE_S
    while rounds > 0:
        began = now()
        count = min(size.rounds, rounds)
        result, problem = call(count, size.pings)
        told = gather((problem, now() - began))
        problems = [found for found, _ in told if found]
        if not problems:
            results.append(result)
            rounds -= count
            pause_s = _FIRST_PAUSE_S
            continue
        failed += 1
        failed_s += told[0][1]
        if failed_s >= PATIENCE_S:
            raise ClockError(
                f"{problems[0]}; {failed} calls failed in {failed_s:.1f} s, the last of {count} "
                "rounds"
            )
        if size == SHORTEST:
            sleep(pause_s)
            failed_s += pause_s
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        size = size.halved()
    return results
