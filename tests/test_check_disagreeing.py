"""Launches that did not measure the same thing the same way never make one value together."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from launches import CELLS, cell, gate, h200, write_launch

from mokbench.cli import main
from mokbench.regression.check import accept, check, record
from mokbench.regression.history import History, folder_of
from mokbench.results import RunFolder

PUSH = "tiny.push.r4.t128.balanced.bf16.isolated"
OTHER: dict[str, Any] = {"cell_digest": "all-push with another option"}
NO_DIGEST: dict[str, Any] = {"cell_digest": None}
SHARED: dict[str, Any] = {"ranks_per_gpu": 4, "link": "hbm"}
OVER: dict[str, Any] = {"fabric": "host", "link": "shm", "ranks_per_gpu": None}
OVER |= {"oversubscribed": True}
ALONE = OVER | {"oversubscribed": False}


def made(
    folder: Path, name: str, push: Sequence[Mapping[str, Any]], factor: float = 1.0, start: int = 0
) -> list[RunFolder]:
    """A launch for each of ``push``, the changes of its push row; at 0.5 % noise."""
    rng = np.random.default_rng(start)
    runs = []
    for i, changes in enumerate(push):
        rows = []
        for system, value in CELLS.items():
            own = changes if system == "push" else {}
            noisy = value * float(np.exp(rng.normal(0, 0.005)))
            scale = factor if system == "push" else 1.0
            rows.append(cell(system, noisy * scale, sm_clock_mhz=1500.0, **own))
        runs.append(write_launch(folder / f"{name}-{i}", rows, start + i))
    return runs


def based(folder: Path, changes: Mapping[str, Any], factor: float = 1.0) -> Path:
    for run in made(folder, "base", [changes] * 10, factor):
        record(check([run], folder / "history"))
    return folder / "history"


def compare(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["compare", *map(str, arguments)])


@pytest.mark.parametrize("changes", [OTHER, NO_DIGEST, SHARED, {"routing_digest": "ab"}])
def test_candidates_that_disagree_are_refused_in_any_order(
    history: Path, tmp_path: Path, changes: Mapping[str, Any]
) -> None:
    for number, order in enumerate(sorted(set(itertools.permutations([0, 0, 1])))):
        odd = [changes if one else {} for one in order]
        made(tmp_path, f"c{number}", odd, 1.05, start=20 + 3 * number)
        for options in ([], ["--record"], ["--accept", "so be it"]):
            done = gate(tmp_path / f"c{number}-*", "--history", history, *options)
            assert (done.exit_code, done.stdout) == (2, ""), done.output
            assert PUSH in done.stderr
            at = order.index(1)
            first, second = (0, at) if at else (0, 1)
            assert f"c{number}-{first} measured it" in done.stderr
            assert f"c{number}-{second} " in done.stderr


@pytest.mark.parametrize("changes", [OTHER, NO_DIGEST, SHARED])
@pytest.mark.parametrize("side", [0, 1])
def test_runs_of_one_side_that_disagree_are_refused(
    tmp_path: Path, side: int, changes: Mapping[str, Any]
) -> None:
    made(tmp_path, "good", [{}, {}, {}])
    made(tmp_path, "odd", [{}, {}, changes], 1.05, start=20)
    sides = [tmp_path / "good-*", tmp_path / "odd-*"]
    done = compare(*(sides if side else sides[::-1]))
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert PUSH in done.stderr
    assert "odd-0 measured it" in done.stderr
    assert "odd-2 " in done.stderr


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        (SHARED, {}, "measured without a mark, by the history on a shared GPU"),
        ({}, SHARED, "measured on a shared GPU, by the history without a mark"),
        (OVER, ALONE, "measured on the host fabric, by the history on an oversubscribed host"),
    ],
)
def test_only_values_of_the_same_mark_are_base(
    tmp_path: Path, was: Mapping[str, Any], now: Mapping[str, Any], said: str
) -> None:
    history = based(tmp_path, was)
    runs = made(tmp_path, "now", [now] * 3, 2.0, start=20)
    checked = check(runs, history)
    (push,) = [one for one in checked.judged if one.series[0] == PUSH]
    assert (push.call.verdict, push.call.base_n) == ("INSUFFICIENT", 0)
    assert said in push.call.why
    made(tmp_path, "then", [was] * 3, start=40)
    done = compare(tmp_path / "then-*", tmp_path / "now-*", "--explain")
    assert done.exit_code == 0
    assert said.replace("the history", "A") in done.stdout
    assert "SLOWER" not in done.stdout


def test_a_base_is_found_among_values_of_another_mark(tmp_path: Path) -> None:
    history = based(tmp_path, {})
    for number in range(40):
        for run in made(tmp_path, f"s{number}", [SHARED] * 3, 2.0, start=20 + 3 * number):
            record(check([run], history))
    runs = made(tmp_path, "slow", [{}] * 3, 1.05, start=400)
    done = gate(*(run.path for run in runs), "--history", history)
    assert done.exit_code == 1, done.output
    assert "10+3" in done.stdout


def test_one_shared_launch_takes_no_series_out_of_the_gate(tmp_path: Path) -> None:
    history = based(tmp_path, {})
    for run in made(tmp_path, "shared", [SHARED], start=20):
        record(check([run], history))
    rows = [cell(system, CELLS[system]) for system in ("mok", "alltoall")]
    for i in range(3):
        write_launch(tmp_path / f"gone-{i}", rows, 30 + i)
    done = gate(tmp_path / "gone-*", "--history", history, "--strict")
    assert (done.exit_code, "1 MISSING" in done.stdout) == (4, True), done.output


def test_an_accepted_level_of_shared_rows_leaves_the_others_their_base(tmp_path: Path) -> None:
    history = based(tmp_path, {})
    for run in made(tmp_path, "shared", [SHARED] * 6, start=20):
        record(check([run], history))
    accept(check(made(tmp_path, "slow", [SHARED] * 5, 1.5, start=40), history), "shared")
    assert len(History.read(folder_of(history, h200())).levels) == 1
    made(tmp_path, "push", [{}] * 3, 1.05, start=60)
    done = gate(tmp_path / "push-*", "--history", history)
    assert done.exit_code == 1, done.output
    assert "10+3" in done.stdout
