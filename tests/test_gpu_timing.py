"""The arithmetic of the GPU timer; the timer itself is tested on a GPU (tests/gpu)."""

import math

import pytest
import torch

from mokbench.measure.columns import EXPIRED
from mokbench.measure.gpu_timing import _block, smallest_step_us

HELD = torch.tensor([0], dtype=torch.int32)


def stamps(*readings):
    """[count, 3 SMs, (cycles, ns)]; SM 2 is never caught."""
    return torch.tensor([[*each, [0, 0]] for each in readings], dtype=torch.int64)


def test_a_sample_has_start_duration_and_the_clock_of_the_sms():
    before = [[1000, 50_000], [7000, 50_200]]
    after = [[1000 + 150_000, 150_000], [7000 + 150_000, 150_200]]
    block = _block(stamps(before, after), torch.tensor([99.5]), HELD, 0)
    start, duration, clock, expired = block[0].tolist()
    assert expired == 0
    assert start == 50.0
    assert duration == pytest.approx(99.5)
    assert clock == pytest.approx(1500.0)


# globaltimer counts from 1970, and a sample may be shorter than what float64 can tell there.
@pytest.mark.parametrize("took_ns", [1000, 20_000, 66_000])
def test_stamps_of_today_lose_no_nanosecond(took_ns):
    epoch_ns = 1_796_199_311_101_081_001
    for late_ns in range(0, 700, 37):
        start_ns = epoch_ns + 5_000_000 + late_ns
        # Cycles of months of running, 1.5 a ns.
        before = [[10**16, start_ns], [10**16, start_ns + 32]]
        after = [[10**16 + took_ns * 3 // 2, start_ns + took_ns], [0, 0]]
        block = _block(stamps(before, after), torch.tensor([1.0]), HELD, epoch_ns)
        start, _, clock, _ = block[0].tolist()
        assert start == pytest.approx(5000 + late_ns / 1e3, abs=1e-6)
        assert clock == pytest.approx(1500.0, rel=1e-9)


def test_an_sm_caught_once_only_gives_no_clock():
    before = [[1000, 50_000], [0, 0]]
    after = [[0, 0], [500_000, 150_000]]
    block = _block(stamps(before, after), torch.tensor([99.5]), HELD, 0)
    assert block[0, 0] == 50.0
    assert math.isnan(block[0, 2])


def test_no_sm_caught_gives_no_start():
    nothing = [[0, 0], [0, 0]]
    block = _block(stamps(nothing, nothing), torch.tensor([1.0]), HELD, 0)
    assert math.isnan(block[0, 0])


def test_a_sample_whose_hold_ended_early_says_so():
    nothing = [[0, 0], [0, 0]]
    block = _block(
        stamps(nothing, nothing, nothing, nothing),
        torch.tensor([1.0, 2.0]),
        torch.tensor([0, 1], dtype=torch.int32),
        0,
    )
    assert block[:, EXPIRED].tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("apart_us", "step_us"),
    [
        ([2.048, 2.048, 2.08, 4.128], 0.032),
        ([1.5, 1.5, 1.5], 1.5),
        ([0.0, 0.0], None),
        ([1.0, 1.0000001, 1.5], 0.5),
    ],
    ids=["between times", "all alike", "nothing moved", "rounding"],
)
def test_the_timers_step_is_the_smallest_difference(apart_us, step_us):
    assert smallest_step_us(apart_us) == (None if step_us is None else pytest.approx(step_us))
