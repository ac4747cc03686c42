"""How many signaling rounds are taken: what fits the time, whatever compiling took before."""

import time
from types import SimpleNamespace

from mokbench.measure import signaling


class OneRank:
    """A group of one rank whose first rounds take ``cold_s`` and all others ``round_s`` each."""

    rank, ranks = 0, 1

    def __init__(self, cold_s: float, round_s: float) -> None:
        self.cold_s, self.round_s, self.asked = cold_s, round_s, []
        self.signal = SimpleNamespace(local_hop=self._rounds)

    def _rounds(self, rounds: int) -> list[float]:
        time.sleep(rounds * self.round_s if self.asked else self.cold_s)
        self.asked.append(rounds)
        return [0.5] * rounds

    def gather(self, value):
        return [value]


def test_compiling_takes_no_rounds_away(monkeypatch):
    monkeypatch.setattr(signaling, "_BUDGET_S", 0.02)
    cold = OneRank(cold_s=0.2, round_s=0.0)
    (point,) = signaling.signal_samples(cold)
    assert len(point["samples"]["local_hop_us"]) == 400
    assert cold.asked == [20, 20, 400]


def test_a_warm_trial_is_not_repeated(monkeypatch):
    warm = OneRank(cold_s=0.0, round_s=0.0)
    signaling.signal_samples(warm)
    assert warm.asked == [20, 400]


def test_slow_rounds_still_stop_early(monkeypatch):
    monkeypatch.setattr(signaling, "_BUDGET_S", 0.02)
    slow = OneRank(cold_s=0.1, round_s=0.002)
    signaling.signal_samples(slow)
    assert slow.asked == [20, 20, 20]
