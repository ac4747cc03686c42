"""Times between two SMs' clocks: right where the pings allow it, an error where they do not."""

import numpy as np
import pytest

from mokbench.fabric.clock_offset import (
    Calibration,
    ClockError,
    ClockOffset,
    Ticks,
    after_payload,
    plausible,
)
from mokbench.fabric.cuda_signal import NUM_TICKS

PINGS = 256
FAR = 5_000_000_000_000_000  # clocks of SMs that have run for weeks, more than a float holds


def pings(start: int, offset: int, out: int, back: int, seed: int = 0):
    """Stamps of pings with random delays; the fastest takes ``out`` and ``back`` cycles."""
    random = np.random.default_rng(seed)
    sent = start + 3000 * np.arange(PINGS, dtype=np.int64)
    delays = random.integers(0, 400, (2, PINGS))
    delays[:, 17] = 0
    seen = sent + out + delays[0]
    return sent, seen + offset, seen + back + delays[1]


def clocks(offset: int, drift: int = 0, out: int = 850, back: int = 850) -> ClockOffset:
    """Calibrations a million cycles apart."""
    return ClockOffset(
        Calibration.of(*pings(FAR, offset, out, back, 1)),
        Calibration.of(*pings(FAR + 1_000_000, offset + drift, out, back, 2)),
    )


@pytest.mark.parametrize("offset", [0, 12_345, -987_654_321_987, -FAR + 77])
def test_the_offset_of_the_fastest_ping_is_found(offset):
    found = clocks(offset)
    assert (found.before.offset, found.round_trip, found.drift) == (offset, 1700, 0)
    assert found.bound == 850


def test_a_time_between_two_clocks_is_right():
    started = FAR + 900_000 + 2000 * np.arange(50, dtype=np.int64)
    took = 700 + np.arange(50, dtype=np.int64)
    offset = -987_654_321_987
    assert clocks(offset).elapsed(started, started + took + offset).tolist() == took.tolist()


def test_unlike_ways_are_within_the_bound():
    found = clocks(1000, out=1200, back=300)
    started = np.array([FAR + 900_000], dtype=np.int64)
    error = found.elapsed(started, started + 500 + 1000)[0] - 500
    assert error == -450
    assert abs(error) <= found.bound == 750


def test_drift_is_interpolated_and_part_of_the_bound():
    found = clocks(1000, drift=400)
    assert found.bound == 850 + 400
    half = (found.before.at + found.behind.at) // 2
    started = np.array([half], dtype=np.int64)
    assert found.elapsed(started, started + 1200 + 500)[0] == pytest.approx(500, abs=1)


def test_clocks_that_move_apart_are_refused():
    with pytest.raises(ClockError, match="moved apart by 1800 cycles"):
        clocks(1000, drift=1800)


def test_pings_that_cannot_be_are_refused():
    sent, seen, back = pings(FAR, 0, 800, 800)
    with pytest.raises(ClockError, match="before they left"):
        Calibration.of(back, seen, sent)
    seen[3] = 0
    with pytest.raises(ClockError, match="no stamps"):
        Calibration.of(sent, seen, back)
    with pytest.raises(ClockError, match="not later"):
        ClockOffset(clocks(0).behind, clocks(0).before)


@pytest.mark.parametrize("values", [[0.4, -0.001], [0.4, 6e6], [0.4, float("nan")]])
def test_negative_and_absurd_times_are_refused(values):
    with pytest.raises(ClockError, match="signal_ready_us"):
        plausible("signal_ready_us.pull", np.array(values), 5e6)
    assert plausible("signal_ready_us.pull", np.array([0.0, 0.4]), 5e6) == [0.0, 0.4]


def test_a_payload_seen_after_its_flags_counts_as_nothing_after_it():
    ready = np.full(20, FAR + 900, dtype=np.int64)
    seen = np.full(20, FAR, dtype=np.int64)
    seen[0] = FAR + 950
    assert after_payload(seen, ready).tolist() == [0.0] + [900.0] * 19
    seen[1:4] = FAR + 950
    with pytest.raises(ClockError, match="20%"):
        after_payload(seen, ready)


def stamps(offset: int, push: bool, rounds: int = 30):
    """What signal_ready leaves: 2 GHz, 2400 cycles until ready, 900 of them after arrival."""
    first, second = pings(FAR, offset, 850, 850, 1), pings(FAR + 2_000_000, offset, 850, 850, 2)
    names = ("ping_sent", "ping_seen", "ping_back")
    found = {n: np.concatenate(pair) for n, *pair in zip(names, first, second, strict=True)}
    started = FAR + 1_000_000 + 10_000 * np.arange(rounds, dtype=np.int64)
    arrived = started + 1500 + (offset if push else 0)
    clock = np.array([1_000_000, 2_000_000], dtype=np.int64)
    none = np.zeros(4 * NUM_TICKS, dtype=np.int64)
    return found | {
        **dict.fromkeys(("tick_ns", "tick_low", "tick_high"), none),
        "clock": clock,
        "started": started,
        "arrived": arrived,
        "ready": started + 2400 + offset,
    }


@pytest.mark.parametrize("push", [False, True])
def test_stamps_become_the_two_times(push):
    from mokbench.fabric.cuda_signal import offset_of, ready_cycles, us_per_cycle

    found = stamps(-123_456_789, push)
    offset = offset_of(found)
    ready, after = ready_cycles(found, offset, push)
    us = us_per_cycle(found["clock"])
    assert (ready * us).tolist() == pytest.approx([1.2] * 30)
    assert (after * us).tolist() == pytest.approx([0.45] * 30)
    assert offset.bound * us == pytest.approx(0.425)
    found["ready"][4] = 0
    with pytest.raises(ClockError, match="no stamps"):
        ready_cycles(found, offset, push)


@pytest.mark.parametrize("clock", [(0, 0), (1000, 50), (1000, 0), (1, 100)])
def test_a_clock_that_cannot_be_is_refused(clock):
    from mokbench.fabric.cuda_signal import us_per_cycle

    with pytest.raises(ClockError, match="no clock of an SM"):
        us_per_cycle(np.array(clock, dtype=np.int64))


NOW = 1_764_700_000_000_000_000  # ns: more than a float holds


def ticks(offset: int, begin_ns: int, mhz: float = 1700.0, step_ns: int = 32, seed: int = 0):
    """What an SM notes whose clock shows FAR + offset at NOW: looks of 30 to 90 cycles."""
    random = np.random.default_rng(seed)
    ns = begin_ns + step_ns * np.arange(128, dtype=np.int64)
    at = FAR + offset + np.round((ns - NOW) * mhz / 1e3).astype(np.int64)
    return ns, at - random.integers(15, 45, 128), at + random.integers(15, 45, 128)


@pytest.mark.parametrize("step_ns", [32, 256, 1000])
@pytest.mark.parametrize("offset", [0, 123_456, -987_654_321_987])
def test_ticks_find_the_offset_that_unlike_pings_miss(offset, step_ns):
    ping = Calibration.of(*pings(FAR, offset, 1200, 300))
    assert ping.offset == offset + 450
    mover = Ticks.of(*ticks(0, NOW, step_ns=step_ns, seed=1))
    observer = Ticks.of(*ticks(offset, NOW + 3000, step_ns=step_ns, seed=2))
    found = ping.sharpened(mover, observer)
    assert abs(found.offset - offset) <= 12
    assert abs(found.offset - offset) <= found.error < 150
    assert found.round_trip == 1500


def test_pings_count_where_ticks_are_few_or_blunt():
    ping = Calibration.of(*pings(FAR, 77, 150, 150))
    sharp, observer = Ticks.of(*ticks(0, NOW)), Ticks.of(*ticks(77, NOW))
    ns, low, high = ticks(77, NOW)
    ns[15:] = 0
    assert Ticks.of(ns, low, high) is None
    assert ping.sharpened(sharp, None) is ping
    blunt = Ticks.of(observer.ns, observer.low - 300, observer.high + 300)
    assert ping.sharpened(sharp, blunt) is ping


def test_a_timer_that_is_not_the_same_for_both_is_refused():
    ping = Calibration.of(*pings(FAR, 0, 850, 850))
    mover, apart = Ticks.of(*ticks(0, NOW)), Ticks.of(*ticks(0, NOW - 1000))
    with pytest.raises(ClockError, match="not the same for both"):
        ping.sharpened(mover, Ticks(apart.ns + 2000, apart.low, apart.high))


def test_clocks_that_go_back_are_refused():
    ns, low, high = ticks(0, NOW)
    ns[5] = ns[4]
    with pytest.raises(ClockError, match="went back"):
        Ticks.of(ns, low, high)


def test_a_tick_that_was_noted_late_widens_no_bound():
    ns, low, high = ticks(0, NOW)
    high[40] += 5000
    at, error = Ticks.of(ns, low, high).at(NOW)
    assert abs(at - FAR) < 10
    assert error < 60


def test_the_bound_of_sharpened_clocks_is_theirs():
    made = [
        Calibration.of(*pings(FAR + late, 5, 850, 850)).sharpened(
            Ticks.of(*ticks(0, NOW + late)), Ticks.of(*ticks(5, NOW + late, seed=3))
        )
        for late in (0, 100_000)
    ]
    both = ClockOffset(*made)
    assert both.bound == max(one.error for one in made) + abs(both.drift) < 200
    assert both.round_trip == 1700
