"""How often the gate is wrong on machines with two modes, and with noise that neighbours share.

    python scripts/regression_modes.py                # a minute

Prints two tables of docs/regression.md: 20 000 trials, seed 0, no change in any series.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from regression_power import Machine, gate, percent, table

from mokbench.regression.shift import Floats, against_history
from mokbench.regression.verdict import Call, Limits, Verdict, decide

TRIALS = 20_000


def nights(day: float, within: float, base: int, trials: int, seed: int = 0) -> float:
    """False SLOWER where the three launches of a night share an effect of deviation ``day``."""
    rng = np.random.default_rng(seed)

    def draw(count: int) -> Floats:
        shared = np.repeat(rng.normal(0.0, day, (trials, count)), 3, axis=1)
        return np.exp(shared + rng.normal(0.0, within, shared.shape))

    calls = decide(against_history(draw(base), draw(1)), None, Limits(), together=False)
    return _slower(calls)


def drift(total: float, trials: int, seed: int = 0) -> float:
    """False SLOWER after 30 launches that drifted by ``total`` at 0.5 % noise, with no step."""
    rng = np.random.default_rng(seed)
    a = np.exp(total * np.arange(30) / 30 + rng.normal(0.0, 0.005, (trials, 30)))
    b = np.exp(total * np.arange(30, 33) / 30 + rng.normal(0.0, 0.005, (trials, 3)))
    return _slower(decide(against_history(a, b), None, Limits(), together=False))


def _slower(calls: Sequence[Call]) -> float:
    return float(np.mean([call.verdict is Verdict.SLOWER for call in calls]))


def two_modes(trials: int) -> Iterator[Sequence[str]]:
    """False SLOWER where a share of launches is in a slower mode, by share, distance and base."""
    for share in (0.1, 0.2, 0.3):
        for bad in (0.03, 0.05, 0.1):
            machine = Machine(0.005, share, bad)
            false = (gate(machine, n, 3, 1.0, trials)[Verdict.SLOWER] for n in (10, 20, 30))
            yield f"{percent(share)}", f"{percent(bad)}", *map(percent, false)


def clumped(trials: int) -> Iterator[Sequence[str]]:
    """False SLOWER of noise that neighbours share."""
    for day, within in ((0.01, 0.003), (0.007, 0.007)):
        false = nights(day, within, 10, trials)
        yield f"nights {percent(day)}, launches {percent(within)}", percent(false)
    for total in (0.03, 0.06):
        yield f"drift {percent(total)} over 30 launches", percent(drift(total, trials))


def main() -> None:
    """Print both tables."""
    table(
        "Two modes at 0.5 % noise, no change: false SLOWER, percent",
        ["launches in the slow mode, %", "by, %", "10 + 3 launches", "20 + 3", "30 + 3"],
        two_modes(TRIALS),
    )
    table("Noise in clumps, 30 + 3, no change: SLOWER", ["noise, %", "percent"], clumped(TRIALS))


if __name__ == "__main__":
    main()
