"""The arithmetic of the GPU timer; the timer itself is tested on a GPU (tests/gpu)."""

import math

import pytest
import torch

from mokbench.measure.gpu_timing import _block


def stamps(*readings):
    """[count, 3 SMs, (cycles, ns)]; SM 2 is never caught."""
    return torch.tensor([[*each, [0, 0]] for each in readings], dtype=torch.int64)


def test_a_sample_has_start_duration_and_the_median_clock_of_the_sms():
    before = [[1000, 50_000], [7000, 50_200]]
    after = [[1000 + 150_000, 150_000], [7000 + 180_000, 150_200]]
    block = _block(stamps(before, after), torch.tensor([99.5]))
    start, duration, clock = block[0].tolist()
    assert start == 50.0
    assert duration == pytest.approx(99.5)
    # 1.5 and 1.8 cycles a ns; the lower median of two.
    assert clock == pytest.approx(1500.0)


def test_an_sm_caught_once_only_gives_no_clock():
    before = [[1000, 50_000], [0, 0]]
    after = [[0, 0], [500_000, 150_000]]
    block = _block(stamps(before, after), torch.tensor([99.5]))
    assert block[0, 0] == 50.0
    assert math.isnan(block[0, 2])


def test_no_sm_caught_gives_no_start():
    nothing = [[0, 0], [0, 0]]
    block = _block(stamps(nothing, nothing), torch.tensor([1.0]))
    assert math.isnan(block[0, 0])
