"""What the docs say of SM clocks is what the committed run of the baselines shows."""

from pathlib import Path
from statistics import median

import pytest

from mokbench.clocks import CLOCK_FLOOR
from mokbench.results import RunFolder

ROOT = Path(__file__).parents[1]
RUN = RunFolder.open(ROOT / "results/h200/baselines")
ROWS = [record for record in RUN.records() if record.status == "ok"]


def said():
    return " ".join((ROOT / "docs/measuring-on-a-gpu.md").read_text(encoding="utf-8").split())


def above(one, other):
    """By how many percent one's clock is above the other's, least and most of one-rank turns."""
    turns = {}
    for row in ROWS:
        if row.ranks == 1:
            turns.setdefault(row.turn, {})[row.system, row.variant] = row.sm_clock_mhz
    found = [100 * (clocks[one] / clocks[other] - 1) for clocks in turns.values()]
    assert len(found) == 6
    return f"{min(found):.1f} to {max(found):.1f} %"


@pytest.mark.parametrize(
    "one, other, sentence",
    [
        ("local", "push", "local ran {} above push;"),
        ("local~gemm=ours", "push", "ours in both, {},"),
        ("local", "push~gemm=torch", "torch's in both, {}."),
        ("alltoall", "push", "ran {} above push and"),
        ("alltoall", "local", "and {} above local."),
    ],
)
def test_clocks_of_rows_in_turn_are_those_of_the_run(one, other, sentence):
    named = [tuple((name + "~").split("~")[:2]) for name in (one, other)]
    assert sentence.format(above(*named)) in said()


def test_what_one_rows_clock_moves_is_that_of_the_run():
    moved = []
    for row in ROWS:
        samples = RUN.samples(row)
        by_block = samples[samples["accepted"]].groupby("block")["sm_clock_mhz"].median().tolist()
        half = len(by_block) // 2
        moved.append(abs(median(by_block[:half]) / median(by_block[half:]) - 1))
    middle = f"{100 * median(moved):.1f} % in the middle row"
    far = sum(each > CLOCK_FLOOR for each in moved)
    assert f"{middle}, by more than 3 % in {far} of {len(ROWS)}" in said()
