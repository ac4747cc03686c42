"""Which number of SMs a system is fastest with here: a short sweep before anything is stored.

A library's own advice is made for other links than this machine's, and comparing with it at a bad
count would flatter its rival. The sweep times the pass that the rows time, candidates in turn.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mokbench.fabric.group import RankGroup
from mokbench.measure.columns import DURATION
from mokbench.measure.timing import Step, Timer

_ROUNDS, _PASSES = 2, 5


@dataclass(frozen=True)
class SmSweep:
    """Median isolated pass, us over ``num_sms``, slowest rank, in the order of the candidates."""

    pass_us: dict[int, float]

    @property
    def best(self) -> int:
        """The fastest; the smallest of those that tie."""
        return min(self.pass_us, key=lambda num_sms: (self.pass_us[num_sms], num_sms))

    @property
    def note(self) -> str:
        """What was found, in one line."""
        found = ", ".join(f"{num_sms}: {us:.0f}" for num_sms, us in self.pass_us.items())
        return f"num_sms {self.best} is the fastest here; us a pass by num_sms: {found}"


def sweep_sms(
    group: RankGroup,
    timer: Timer,
    candidates: list[int],
    set_num_sms: Callable[[int], None],
    step: Step,
    settle: Callable[[], None],
) -> SmSweep:
    """Time ``step`` at every candidate and leave the system at the best. Collective.

    ``settle`` waits for the GPU. All ranks see all samples, so they choose alike.
    """
    for num_sms in candidates:
        set_num_sms(num_sms)
        # A count's first pass may compile, longer on one rank than an alignment would wait.
        step()
        settle()
    samples: dict[int, list[np.ndarray]] = {num_sms: [] for num_sms in candidates}
    for _ in range(_ROUNDS):
        for num_sms in candidates:
            set_num_sms(num_sms)
            by_rank = group.gather_samples(timer.isolated(step, _PASSES)).numpy()
            samples[num_sms].append(by_rank[:, :, DURATION].max(axis=0))
    found = SmSweep({n: float(np.median(np.concatenate(each))) for n, each in samples.items()})
    set_num_sms(found.best)
    return found
