"""The SM sweep on made-up timings: which count wins, and that all ranks choose alike."""

import torch

from mokbench.measure.sm_sweep import SmSweep, sweep_sms

US = {8: 400.0, 16: 250.0, 24: 250.0, 32: 300.0}


class FakeTimer:
    """Times a pass by the count that is set; rank 1 takes longer at 16."""

    def __init__(self):
        self.now, self.timed = 0, []

    def isolated(self, step, iterations):
        step()
        self.timed.append(self.now)
        samples = torch.zeros(iterations, 3, dtype=torch.float64)
        samples[:, 1] = US[self.now]
        return samples


class FakeGroup:
    def __init__(self, timer):
        self._timer = timer

    def gather_samples(self, samples):
        slower = samples.clone()
        slower[:, 1] += 100.0 * (self._timer.now == 16)
        return torch.stack([samples, slower])


def test_the_slowest_rank_decides_and_the_best_stays_set():
    timer, calls = FakeTimer(), []

    def set_num_sms(num_sms):
        timer.now = num_sms
        calls.append(num_sms)

    settled = []
    found = sweep_sms(
        FakeGroup(timer),
        timer,
        [8, 16, 24, 32],
        set_num_sms,
        lambda: None,
        lambda: settled.append(1),
    )
    assert found.pass_us == {8: 400.0, 16: 350.0, 24: 250.0, 32: 300.0}
    assert found.best == timer.now == 24
    # All are warmed up before any is timed, then they take turns.
    assert calls == [8, 16, 24, 32] * 3 + [24]
    assert timer.timed == [8, 16, 24, 32] * 2
    assert len(settled) == 4


def test_ties_go_to_the_smaller_count_and_the_note_has_all():
    found = SmSweep({32: 100.0, 8: 100.0, 16: 130.4})
    assert found.best == 8
    assert (
        found.note
        == "num_sms 8 is the fastest here; us a pass by num_sms: 32: 100, 8: 100, 16: 130"
    )
