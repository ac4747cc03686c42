"""How often the gate is wrong: the tables of docs/regression.md, from simulated launches.

    python scripts/regression_power.py           # all tables, about a minute
    python scripts/regression_power.py --trials 2000

A launch's value is the true level times lognormal noise; on a dirty machine 5 % of launches are 8 %
slower. Every figure comes from the code that `mokbench check` runs, with a fixed seed.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.stats import mannwhitneyu

from mokbench.regression.change_points import find
from mokbench.regression.confirm import CONFIRM_ALPHA
from mokbench.regression.shift import against_history, between
from mokbench.regression.verdict import Limits, Verdict, decide

STEP = 1.05
LIMITS = Limits()


@dataclass(frozen=True)
class Machine:
    """Relative noise between launches; ``dirty``: share of launches that are 8 % slower."""

    noise: float
    dirty: float = 0.0

    def draw(self, rng: np.random.Generator, shape: tuple[int, int], level: float) -> np.ndarray:
        """Run-level values [series, launches] at ``level``."""
        values = level * np.exp(rng.normal(0.0, self.noise, shape))
        return np.asarray(values * np.where(rng.random(shape) < self.dirty, 1.08, 1.0))


MACHINES = {
    "0.5 %": Machine(0.005),
    "1 %": Machine(0.01),
    "2 %": Machine(0.02),
    "1 %, dirty": Machine(0.01, 0.05),
}
SIZES = ((5, 3), (10, 1), (10, 3), (10, 5), (20, 3), (30, 3))


def verdicts(
    machine: Machine, base: int, candidate: int, level: float, trials: int, seed: int
) -> dict[Verdict, float]:
    """Share of ``trials`` series, each judged as if alone, that get each verdict."""
    rng = np.random.default_rng(seed)
    a = machine.draw(rng, (trials, base), 1.0)
    b = machine.draw(rng, (trials, candidate), level)
    limits = replace(LIMITS, least_candidate=1)
    calls = [
        call
        for chunk in range(0, trials, 1)
        for call in decide(against_history(a[[chunk]], b[[chunk]]), None, limits)
    ]
    return {v: sum(call.verdict is v for call in calls) / trials for v in Verdict}
