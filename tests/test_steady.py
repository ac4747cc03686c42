"""Calls during which two SMs' clocks moved apart: thrown away, shortened, and given up in time."""

from types import SimpleNamespace

import numpy as np
import pytest

from mokbench.fabric.clock_offset import ClockError
from mokbench.fabric.cuda_signal import NUM_PINGS, NUM_TICKS, CudaSignal, offset_of
from mokbench.fabric.steady import LONGEST, PATIENCE_S, SHORTEST, CallSize, steady_calls


class Calls:
    """Calls that take ``took_s`` and fail where ``fails(nth)`` says so; keeps what was asked."""

    def __init__(self, fails, took_s=0.01, peers=()):
        self.sizes, self.pauses, self.time = [], [], 100.0
        self._fails, self._took_s, self._peers = fails, took_s, peers

    def call(self, rounds, pings):
        nth = len(self.sizes)
        self.sizes.append((rounds, pings))
        self.time += self._took_s
        return [nth] * rounds, f"call {nth} is bad" if self._fails(nth) else None

    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.time += seconds

    def gather(self, told):
        return [told, *(peer(len(self.sizes) - 1) for peer in self._peers)]

    def run(self, rounds):
        found = steady_calls(rounds, self.call, self.gather, lambda: self.time, self.sleep)
        return [sample for samples in found for sample in samples]


def test_steady_clocks_get_long_calls_and_as_many_rounds_as_asked():
    calls = Calls(lambda nth: False)
    assert calls.run(120) == [0] * 50 + [1] * 50 + [2] * 20
    assert calls.sizes == [(50, 256), (50, 256), (20, 256)]
    assert calls.pauses == []


def test_after_failed_calls_the_next_are_halved_and_stay_short():
    calls = Calls(lambda nth: nth in (1, 2))
    found = calls.run(100)
    assert calls.sizes == [(50, 256), (50, 256), (25, 128), *[(12, 64)] * 4, (2, 64)]
    assert found == [0] * 50 + [3] * 12 + [4] * 12 + [5] * 12 + [6] * 12 + [7] * 2
    assert calls.pauses == [], "a shorter call is tried before time is spent on a pause"


def test_where_calls_cannot_be_shorter_the_clocks_get_growing_pauses():
    calls = Calls(lambda nth: nth < 7 or nth == 8)
    found = calls.run(20)
    ladder = [(20, 256), (20, 128), (12, 64)]
    assert calls.sizes == [*ladder, *[(6, 32)] * 8, (2, 32)]
    assert found == [7] * 6 + [9] * 6 + [10] * 6 + [11] * 2
    # Four failures at the shortest size, a steady call, one more failure.
    assert calls.pauses == pytest.approx([0.01, 0.02, 0.04, 0.08, 0.01])


def test_sizes_end_at_the_shortest():
    sizes = [LONGEST]
    for _ in range(5):
        sizes.append(sizes[-1].halved())
    shortest = CallSize(6, 32)
    assert sizes[1:] == [CallSize(25, 128), CallSize(12, 64), *[shortest] * 3]
    assert shortest == SHORTEST


@pytest.mark.parametrize("took_s", [0.0, 0.01, 2.0])
def test_clocks_that_never_keep_step_are_an_error_in_bounded_time(took_s):
    calls = Calls(lambda nth: True, took_s)
    with pytest.raises(ClockError, match=r"call \d+ is bad; \d+ calls failed in 5\.\d|6\.0 s"):
        calls.run(400)
    assert calls.time - 100 < PATIENCE_S + 0.3 + took_s
    assert len(calls.sizes) < 30


def test_time_of_steady_calls_does_not_end_patience():
    calls = Calls(lambda nth: nth == 19, took_s=1.0)
    assert len(calls.run(1000)) == 1000


def test_one_rank_whose_clocks_moved_discards_the_call_on_all():
    calls = Calls(lambda nth: False, peers=[lambda nth: ("peer", 9e9) if nth == 0 else (None, 0)])
    assert calls.run(30) == [1] * 25 + [2] * 5, "a peer's time decides nothing"
    assert calls.sizes == [(30, 256), (25, 128), (5, 128)]


ROUND_TRIP, ROUND, READY = 2400, 6000, 2000  # cycles


NO_TICKS = np.zeros(4 * NUM_TICKS, dtype=np.int64)


class Drifting(CudaSignal):
    """Two SMs whose clocks run unlike by ``rate``, as stamps of signal_ready; 2 GHz."""

    def __init__(self, rate):
        self._fabric = SimpleNamespace(
            rank=0, ranks=2, num_sms=132, wait_bound_s=1.0, gather=lambda value: [value]
        )
        self.rate, self.rounds = rate, []

    def _run(self, name, rounds, ranks, grid, block, alone=False):
        self.rounds.append(rounds)
        start = 7_000_000_000
        pings = start + 2500 * np.arange(NUM_PINGS, dtype=np.int64)
        first = pings[-1] + 5000 + ROUND * np.arange(rounds, dtype=np.int64)
        sent = np.concatenate([pings, pings + first[-1] + ROUND - start])
        return {
            "clock": np.array([1_000_000, 2_000_000], dtype=np.int64),
            "started": first,
            "arrived": first + 1200,
            "ready": self.observed(first + READY),
            "ping_sent": sent,
            "ping_seen": self.observed(sent + ROUND_TRIP // 2),
            "ping_back": sent + ROUND_TRIP,
            **dict.fromkeys(("tick_ns", "tick_low", "tick_high"), NO_TICKS),
        }

    def observed(self, at):
        """The other SM's clock at these times of ours."""
        return at - 123_456 + np.round(self.rate * (at - 7_000_000_000)).astype(np.int64)


@pytest.mark.parametrize(
    "rate, rounds",
    [
        (0.0, [50, 30]),
        (0.001, [50, 30]),
        (0.008, [50, 25, *[12] * 6, 8]),
        (-0.008, [50, 25, *[12] * 6, 8]),
        (0.014, [50, 25, 12, *[6] * 13, 2]),
    ],
)
def test_unlike_clocks_are_measured_in_calls_short_enough(rate, rounds):
    signal = Drifting(rate)
    ready_us, after_us = signal.ready("pull", 80, 2)
    assert signal.rounds == rounds
    assert len(ready_us) == len(after_us) == 80
    (bound_us,) = signal.clock_offset_bound_us
    # Half a round trip, and a drift of a round trip at most.
    assert ROUND_TRIP / 2 / 2000 <= bound_us <= 1.5 * ROUND_TRIP / 2000
    for found, cycles in ((ready_us, READY), (after_us, READY - 1200)):
        assert max(abs(us - cycles / 2000) for us in found) < min(bound_us, 0.02)


def test_clocks_too_unlike_for_the_shortest_calls_are_refused(monkeypatch):
    monkeypatch.setattr("mokbench.fabric.steady.PATIENCE_S", 0.05)
    signal = Drifting(0.05)
    with pytest.raises(ClockError, match=r"moved apart by .* the last of 6 rounds"):
        signal.ready("pull", 80, 2)
    assert signal.rounds[:5] == [50, 25, 12, 6, 6]


class Late(Drifting):
    """In the first ``late`` rounds of each call the payload is seen after the flags."""

    def __init__(self, rate, late):
        super().__init__(rate)
        self.late = late

    def _run(self, *arguments, **options):
        stamps = super()._run(*arguments, **options)
        stamps["arrived"] = stamps["ready"] - 900
        stamps["arrived"][: self.late] = stamps["ready"][: self.late] + 10
        return stamps


@pytest.mark.parametrize(
    "rate, late, rounds, zeros",
    [(0.0, 5, [50, 50], 10), (0.008, 1, [50, 25, *[12] * 8, 4], 9)],
)
def test_up_to_a_tenth_of_late_payloads_are_parts_of_0(rate, late, rounds, zeros):
    signal = Late(rate, late)
    _, after_us = signal.ready("push", 100, 2)
    assert signal.rounds == rounds
    assert after_us.count(0.0) == zeros
    assert set(after_us) == {0.0, 0.45}


def test_more_than_a_tenth_of_late_payloads_are_refused(monkeypatch):
    # One in six rounds of each call: no call is refused, all of them together are.
    signal = Late(0.014, 1)
    with pytest.raises(ClockError, match="in 17% of the rounds the payload"):
        signal.ready("push", 60, 2)
    assert signal.rounds == [50, 25, 12, *[6] * 10]
    monkeypatch.setattr("mokbench.fabric.steady.PATIENCE_S", 0.0)
    with pytest.raises(ClockError, match=r"in 12% .*; 1 calls failed"):
        Late(0.0, 6).ready("push", 50, 2)


def test_only_pings_next_to_the_rounds_count_in_short_calls():
    signal = Drifting(0.001)
    stamps = signal._run("", 6, 2, 132, 32)
    near, far = offset_of(stamps, 32), offset_of(stamps)
    assert near.behind.at - near.before.at < 32 * 2500 + 8 * ROUND
    assert far.behind.at - far.before.at > 256 * 2500
    # The bound is the same promise for both: half a round trip and all of the drift.
    assert near.bound == near.round_trip / 2 + abs(near.drift)
    assert near.bound < far.bound
    stamps["ping_seen"][NUM_PINGS - 33] = 0
    assert offset_of(stamps, 32) == near
    with pytest.raises(ClockError, match="no stamps"):
        offset_of(stamps)
