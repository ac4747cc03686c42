"""The SM clock from stamps whose SMs may have changed their numbers in between."""

import math

import numpy as np
import pytest
import torch

from mokbench.measure.sm_clock import start_and_clock

EPOCH_NS = 1_796_199_311_101_081_001
# As seen on an H200: zeros of SMs' counters tens of milliseconds apart, some nearly the same.
OFFSETS = [0, 3_000_000, 60_000_000, 61_000_000, 120_000_000, -14_000_000, -3_000_000, 90_000_000]


def readings(mhz: float, took_us: float, numbers: list[int], sms: int = 32):
    """Before and after a pass: int64 [sms, (cycles, ns)]; SM i shows numbers[i] the second time."""
    random = np.random.default_rng(5)
    cycles = np.array([10**15 + OFFSETS[i % 8] + 1000 * (i // 8) for i in range(sms)])
    start_ns = EPOCH_NS + 1000 + random.integers(0, 60, sms) * 32
    after_ns = start_ns + int(took_us * 1e3) // 32 * 32 + random.integers(0, 60, sms) * 32
    after = np.empty((sms, 2), dtype=np.int64)
    after[numbers, 0] = cycles + ((after_ns - start_ns) * mhz / 1e3).astype(np.int64)
    after[numbers, 1] = after_ns
    return torch.from_numpy(np.stack([cycles, start_ns], axis=1)), torch.from_numpy(after)


def clock(before, after, most_mhz: float = 1980.0) -> float:
    return start_and_clock(before, after, EPOCH_NS, most_mhz)[1]


@pytest.mark.parametrize("took_us", [60.0, 300.0, 2500.0, 15_000.0])
@pytest.mark.parametrize("mhz", [1305.0, 1980.0])
@pytest.mark.parametrize("shift", [0, 1, 2, 5, 8, 13], ids=lambda shift: f"by {shift}")
def test_sms_that_change_their_numbers_do_not_change_the_clock(took_us, mhz, shift):
    numbers = [(i + shift) % 32 for i in range(32)]
    assert clock(*readings(mhz, took_us, numbers)) == pytest.approx(mhz, rel=3e-3)


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_numbers_gives_the_clock(seed):
    numbers = np.random.default_rng(seed).permutation(32).tolist()
    assert clock(*readings(1500.0, 1300.0, numbers)) == pytest.approx(1500.0, rel=3e-3)


def test_half_of_the_sms_on_others_numbers_give_the_clock():
    numbers = [*range(16), *reversed(range(16, 32))]
    assert clock(*readings(1342.0, 2400.0, numbers)) == pytest.approx(1342.0, rel=3e-3)


def test_sms_that_share_no_sm_with_the_first_reading_give_no_clock():
    before, after = readings(1500.0, 1300.0, list(range(32)), sms=32)
    # Every one another distance away from every one of the first.
    after[:, 0] += torch.arange(32) ** 3 * 700_001 + 5_000_000_000
    assert math.isnan(clock(before, after))


def test_no_clock_is_above_what_the_gpu_has():
    assert math.isnan(clock(*readings(2500.0, 300.0, list(range(32)))))
    before, after = readings(2500.0, 300.0, list(range(32)))
    assert clock(before, after, math.inf) == pytest.approx(2500.0, rel=3e-3)


def test_clocks_that_went_backwards_give_none():
    before, after = readings(1500.0, 300.0, list(range(32)))
    after[:, 1] = before[:, 1]
    start_us, found = start_and_clock(before, after, EPOCH_NS, 1980.0)
    assert start_us == pytest.approx(1.0, abs=2.0)
    assert math.isnan(found)
