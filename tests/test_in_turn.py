"""Lanes measured in turn: order, references, and samples whose clock was too low."""

import math

import numpy as np
import pytest
import torch

from mokbench.measure import in_turn
from mokbench.measure.in_turn import Lane, measure_in_turn, rank_spread_us
from mokbench.stats import StopRule
from mokbench.workload import Regime


class OneRank:
    """A group of one rank."""

    ranks_per_gpu = 1

    def gather_samples(self, samples):
        return samples[None]


class ScriptedTimer:
    """Answers with 1000 us a pass and the clocks it was given, then with the last one for ever."""

    def __init__(self, clocks):
        self.clocks = list(clocks)
        self.log = []

    def _clock(self):
        return self.clocks.pop(0) if len(self.clocks) > 1 else self.clocks[0]

    def isolated(self, step, iterations):
        self.log.append(step())
        rows = [[1000.0 * i, 1000.0, self._clock()] for i in range(iterations)]
        return torch.tensor(rows, dtype=torch.float64)

    def steady(self, step, iterations):
        self.log.append(step())
        return torch.tensor([[0.0, 1000.0, self._clock()]], dtype=torch.float64)


@pytest.fixture(autouse=True)
def no_rest(monkeypatch):
    monkeypatch.setattr(in_turn.time, "sleep", lambda _: None)


def run(timer, lanes, blocks=3, max_time_s=0.01):
    rule = StopRule(noise=1e-9, min_blocks=blocks, max_time_s=max_time_s)
    measure_in_turn(OneRank(), timer, lanes, rule, 1, lambda _: None)


def lane(name, **fields):
    return Lane(name, Regime.ISOLATED, lambda: name, **fields)


def test_each_lane_is_first_in_its_turn_and_a_reference_runs_in_every_turn():
    timer = ScriptedTimer([math.nan])
    lanes = [lane("a"), lane("b"), lane("peak", reference=True)]
    run(timer, lanes)
    assert timer.log[:3] == ["a", "b", "peak"], "warm-up"
    assert timer.log[3:] == ["a", "b", "peak", "b", "peak", "a", "peak", "a", "b"]
    assert [len(each.blocks) for each in lanes] == [3, 3, 3]
    assert lanes[2].stop_reason is None
    assert lanes[0].stop_reason is not None
    assert lanes[0].sm_clock_mhz is None
    assert lanes[0].num_rejected == 0


def test_samples_below_three_quarters_of_the_clock_are_measured_again():
    # Warm-up, then a block of 4 whose second sample is slow, its redo, then all is well.
    timer = ScriptedTimer([1600, 1600, 1199, 1600, 1600, 1601, 1600])
    measured = lane("a")
    run(timer, [measured], blocks=2, max_time_s=0.0075)
    assert measured.iterations == 4
    assert measured.num_rejected == 1
    assert measured.rejected[0][0, :, 2].tolist() == [1199]
    assert measured.blocks[0].shape == (1, 4, 3)
    assert measured.blocks[0][0, :, 2].tolist() == [1600, 1600, 1600, 1601]
    assert measured.sm_clock_mhz == 1600


def test_three_quarters_exactly_are_enough():
    timer = ScriptedTimer([1600, 1200])
    measured = lane("a")
    run(timer, [measured])
    assert measured.num_rejected == 0


def test_a_clock_that_stays_low_becomes_the_clock():
    timer = ScriptedTimer([1600, 1000])
    measured = lane("a")
    run(timer, [measured], blocks=2, max_time_s=0.002)
    assert measured.num_rejected == 3, "three tries, then the clock is accepted"
    assert measured.clock_mhz == 1000
    assert len(measured.blocks) >= 2
    assert all(block.shape[1] == measured.iterations for block in measured.blocks)


def test_a_slow_chain_is_measured_again_as_a_whole():
    timer = ScriptedTimer([1600, 900, 1600])
    measured = Lane("a", Regime.STEADY, lambda: "a")
    run(timer, [measured])
    assert measured.num_rejected == 1
    assert all(block.shape == (1, 1, 3) for block in measured.blocks)


def test_what_a_kernel_recorded_is_raised_after_its_block():
    def fail():
        raise RuntimeError("fault")

    with pytest.raises(RuntimeError, match="fault"):
        run(ScriptedTimer([math.nan]), [lane("a", check=fail)])


def test_what_the_timer_does_around_a_pass_counts_for_the_number_of_passes():
    class Wide(ScriptedTimer):
        def isolated(self, step, iterations):
            samples = super().isolated(step, iterations)
            samples[:, 0] *= 5
            return samples

    measured = lane("a")
    rule = StopRule(noise=1e-9, min_blocks=2, max_time_s=0.1)
    measure_in_turn(OneRank(), Wide([math.nan]), [measured], rule, 3, lambda _: None)
    assert measured.iterations == 10, "50 ms a block at 5 ms a sample of 1 ms"


def test_one_ranks_odd_reading_does_not_reject_a_sample_of_a_shared_gpu():
    class Shared:
        ranks_per_gpu = 4

    samples = np.zeros((8, 2, 3))
    samples[:, :, 2] = 1600
    samples[1, 0, 2] = 3
    samples[4:, 1, 2] = 1000
    assert in_turn._lowest_clock(samples, Shared()).tolist() == [1600, 1000]


def test_rank_spread_is_slowest_less_fastest():
    block = np.array([[[0, 10, 0], [0, 30, 0]], [[0, 14, 0], [0, 20, 0]]], dtype=float)
    assert rank_spread_us([block]) == 7.0


def test_the_share_of_expired_holds_is_of_samples_and_any_rank_counts():
    block = np.zeros((2, 4, 4))
    block[0, 1, 3] = block[1, 1, 3] = block[1, 2, 3] = 1
    assert lane("a", blocks=[block, np.zeros((2, 4, 4))]).hold_expired_share == 0.25
    assert lane("a", blocks=[block[:, :, :3]]).hold_expired_share is None, "a host has no holds"
