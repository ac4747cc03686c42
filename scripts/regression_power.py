"""How often the gate is wrong: the tables of docs/regression.md, from simulated launches.

    python scripts/regression_power.py                # some minutes
    python scripts/regression_power.py --trials 1000

A launch's value is the true level times lognormal noise; on a dirty machine 5 % of launches are 8 %
slower (regression_modes.py has other shares, and noise in clumps). Verdicts come from the code that
`mokbench check` runs; seeds are fixed.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.stats import mannwhitneyu

from mokbench.regression.change_points import find
from mokbench.regression.confirm import CONFIRM_ALPHA, ROUNDS
from mokbench.regression.shift import Floats, against_history, between
from mokbench.regression.verdict import Call, Limits, Verdict, decide

STEP = 1.05
ALONE = replace(Limits(), least_candidate=1)


@dataclass(frozen=True)
class Machine:
    """Relative noise between launches; ``dirty``: share of launches that are ``bad`` slower."""

    noise: float
    dirty: float = 0.0
    bad: float = 0.08

    def draw(self, rng: np.random.Generator, shape: tuple[int, int], level: float) -> Floats:
        """Run-level values [series, launches] at ``level``."""
        values = level * np.exp(rng.normal(0.0, self.noise, shape))
        return np.asarray(values * np.where(rng.random(shape) < self.dirty, 1 + self.bad, 1.0))


MACHINES = {
    "0.5 %": Machine(0.005),
    "1 %": Machine(0.01),
    "2 %": Machine(0.02),
    "1 %, dirty": Machine(0.01, 0.05),
}
SIZES = ((5, 3), (10, 1), (10, 3), (10, 5), (20, 3), (30, 3))


def gate(
    machine: Machine, base: int, candidate: int, level: float, trials: int, seed: int = 0
) -> dict[Verdict, float]:
    """Share of ``trials`` series, each judged alone, that get each verdict."""
    rng = np.random.default_rng(seed)
    a, b = (machine.draw(rng, (trials, base), 1.0), machine.draw(rng, (trials, candidate), level))
    calls = decide(against_history(a, b), None, ALONE, together=False)
    return {v: sum(call.verdict is v for call in calls) / trials for v in Verdict}


def reports(
    machine: Machine, base: int, series: int, trials: int, seed: int = 0
) -> tuple[float, float]:
    """(reports with a false SLOWER, reports that find the one series that is 5 % slower).

    Each report has ``series`` series of ``base`` + 3 launches.
    """
    rng = np.random.default_rng(seed)
    false = found = 0
    for _ in range(trials):
        a, b = machine.draw(rng, (series, base), 1.0), machine.draw(rng, (series, 3), 1.0)
        b[0] *= STEP
        calls = decide(against_history(a, b), None, Limits())
        found += calls[0].verdict is Verdict.SLOWER
        false += any(call.verdict is Verdict.SLOWER for call in calls[1:])
    return false / trials, found / trials


def confirmed(
    machine: Machine, base: int, level: float, trials: int, rounds: int = ROUNDS, seed: int = 0
) -> float:
    """Share of series alone in their report that are suspects, and SLOWER in the re-run."""
    rng = np.random.default_rng(seed)
    a, b = machine.draw(rng, (trials, base), 1.0), machine.draw(rng, (trials, 3), level)
    first = _suspect(decide(against_history(a, b), None, Limits(), together=False))
    again = sides(machine, rounds, level, trials, alpha=CONFIRM_ALPHA, seed=seed + 1)
    return float(np.mean(first & again))


def sides(
    machine: Machine, launches: int, level: float, trials: int, *, alpha: float, seed: int = 0
) -> NDArray[np.bool_]:
    """Where ``compare`` of two sides of ``launches`` each calls B slower, each series alone."""
    rng = np.random.default_rng(seed)
    a, b = (machine.draw(rng, (trials, launches), x) for x in (1.0, level))
    limits = replace(Limits(), alpha=alpha, least_base=2, least_candidate=2)
    return _slower(decide(between(a, b), None, limits, together=False))


def pooled(machine: Machine, base: int, candidate: int, trials: int, seed: int = 0) -> float:
    """False alarms of Mann-Whitney at p < 1 % on iterations pooled over launches: the wrong test.

    200 iterations a launch with 1 % noise among them, no change.
    """
    rng = np.random.default_rng(seed)

    def iterations(launches: int) -> Floats:
        levels = machine.draw(rng, (1, launches), 1.0).reshape(-1, 1)
        return (levels * np.exp(rng.normal(0.0, 0.01, (launches, 200)))).ravel()

    wrong = [
        mannwhitneyu(iterations(candidate), iterations(base), alternative="greater").pvalue < 0.01
        for _ in range(trials)
    ]
    return float(np.mean(wrong))


def changes(
    noise: float, before: int, after: int, step: float, trials: int, seed: int = 0
) -> float:
    """Share of series in which a change point is found, within one launch of the true one if any.

    ``before`` launches, then ``after`` at ``step`` times their level.
    """
    rng = np.random.default_rng(seed)
    hits = 0
    for _ in range(trials):
        values = np.exp(rng.normal(0.0, noise, before + after))
        values[before:] *= step
        found = find(values)
        hits += bool(found) if step == 1.0 else any(abs(at - before) <= 1 for at in found)
    return hits / trials


def spiked(trials: int, seed: int = 0) -> float:
    """Share of series of 60 launches, one of them 10 % slower, in which a change is found."""
    rng = np.random.default_rng(seed)
    hits = 0
    for _ in range(trials):
        values = np.exp(rng.normal(0.0, 0.01, 60))
        values[30] *= 1.1
        hits += bool(find(values))
    return hits / trials


def _suspect(calls: Sequence[Call]) -> NDArray[np.bool_]:
    """Where ``--confirm`` measures again."""
    limits = Limits()
    return np.array(
        [
            (c.ratio or 0) >= 1 + limits.floor and c.p is not None and c.p <= limits.alpha
            for c in calls
        ]
    )


def _slower(calls: Sequence[object]) -> NDArray[np.bool_]:
    return np.array([getattr(call, "verdict", None) is Verdict.SLOWER for call in calls])


def percent(share: float) -> str:
    """``0.3``, ``99.8``, in percent."""
    return f"{100 * share:.1f}"


def table(title: str, head: Sequence[str], lines: Iterator[Sequence[str]]) -> None:
    """Print a markdown table, line by line as it is known."""
    print(f"\n{title}\n")
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for line in lines:
        print("| " + " | ".join(line) + " |", flush=True)


def gate_lines(trials: int) -> Iterator[Sequence[str]]:
    """False alarms / power of the gate by machine and number of launches."""
    for base, candidate in SIZES:
        cells = []
        for machine in MACHINES.values():
            false = gate(machine, base, candidate, 1.0, trials)[Verdict.SLOWER]
            power = gate(machine, base, candidate, STEP, trials, seed=1)[Verdict.SLOWER]
            cells.append(f"{percent(false)} / {percent(power)}")
        yield f"{base} + {candidate}", *cells


def confirmed_cell(machine: Machine, trials: int) -> str:
    """False alarms / power of both stages together."""
    false, power = (confirmed(machine, 10, level, trials) for level in (1.0, STEP))
    return f"{100 * false:.2f} / {percent(power)}"


def main() -> None:
    """Print every table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=20_000)
    trials = parser.parse_args().trials
    few, fewer = max(trials // 50, 20), max(trials // 100, 20)
    print(f"{trials} trials; {few} for reports of many series, pooled tests and change points.")
    table(
        "False SLOWER / found 5 % slowdown, percent, one series",
        ["base + candidate launches", *MACHINES],
        gate_lines(trials),
    )
    table(
        "No change, 10 + 3 launches: verdicts, percent",
        ["noise", "SAME", "AMBIGUOUS", "SLOWER", "FASTER"],
        (
            (
                name,
                *(
                    percent(gate(m, 10, 3, 1.0, trials)[Verdict(v)])
                    for v in ("SAME", "AMBIGUOUS", "SLOWER", "FASTER")
                ),
            )
            for name, m in MACHINES.items()
        ),
    )
    table(
        "Reports of many series at 1 % noise, one series 5 % slower: any false SLOWER / found",
        ["series", "10 + 3 launches", "30 + 3 launches"],
        (
            (
                str(count),
                *(
                    " / ".join(map(percent, reports(MACHINES["1 %"], base, count, few)))
                    for base in (10, 30)
                ),
            )
            for count in (1, 10, 100, 1000)
        ),
    )
    table(
        f"After {ROUNDS} interleaved rounds, 10 + 3 launches before: false / found 5 %",
        list(MACHINES),
        iter([[confirmed_cell(machine, trials) for machine in MACHINES.values()]]),
    )
    table(
        "compare, launches a side: false / found 5 %",
        ["launches", *MACHINES],
        (
            (
                f"{n} against {n}",
                *(
                    " / ".join(
                        percent(float(np.mean(sides(m, n, x, trials, alpha=0.01))))
                        for x in (1.0, STEP)
                    )
                    for m in MACHINES.values()
                ),
            )
            for n in (2, 3, 5, 10)
        ),
    )
    table(
        "The wrong test: Mann-Whitney on pooled iterations, p < 1 %, no change: false alarms",
        ["launches", "0.5 %", "1 %", "2 %"],
        (
            (
                f"{a} + {b}",
                *(percent(pooled(MACHINES[m], a, b, few)) for m in ("0.5 %", "1 %", "2 %")),
            )
            for a, b in ((5, 1), (10, 3), (20, 3))
        ),
    )
    table(
        "Change points at 1 % noise: series without a change in which one is found",
        ["20 launches", "50", "100", "60, one of them 10 % slower"],
        iter(
            [
                [
                    *(percent(changes(0.01, n, 0, 1.0, few)) for n in (20, 50, 100)),
                    percent(spiked(few)),
                ]
            ]
        ),
    )
    table(
        "Change points at 1 % noise, 30 launches before: changes found, percent",
        ["launches after", "3 %", "5 %", "10 %"],
        (
            (str(n), *(percent(changes(0.01, 30, n, s, fewer)) for s in (1.03, 1.05, 1.1)))
            for n in (2, 3, 4, 5, 8)
        ),
    )


if __name__ == "__main__":
    main()
