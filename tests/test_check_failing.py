"""Cells that fail or vanish: exit 3 and 4, whatever the other launches say."""

from pathlib import Path

import pytest
from fake_run import fake_record
from launches import CELLS, cell, gate, launches, write_launch

from mokbench.regression.check import check, record

OVER = {"fabric": "host", "link": "shm", "ranks_per_gpu": None, "oversubscribed": True}
SHARED = {"fabric": "cuda", "link": "hbm", "ranks_per_gpu": 4}


def ended(status: str, **changes: object) -> object:
    fields = {"fabric": "cuda", "cell_digest": "c-push"} | changes
    return fake_record(system="push", status=status, reason="rank 1 died", **fields)


def candidates(folder: Path, push: list[object], start: int = 20) -> str:
    """Three launches, with ``push[i]`` in the place of push; left out where null."""
    for i, row in enumerate(push):
        others = [
            cell(name, value, sm_clock_mhz=1500.0)
            for name, value in CELLS.items()
            if name != "push"
        ]
        write_launch(folder / f"c{start}-{i}", [*others, *([row] if row else [])], start + i)
    return str(folder / f"c{start}-*")


@pytest.mark.parametrize("mark", [OVER, SHARED])
def test_a_row_that_never_gates_fails_the_build_where_it_fails(tmp_path: Path, mark) -> None:
    for i in range(8):
        run = write_launch(tmp_path / f"b{i}", [cell("push", 100.0 + 0.1 * i, **mark)], i)
        record(check([run], tmp_path / "history"))
    for i in range(3):
        write_launch(tmp_path / f"c{i}", [ended("failed", **mark)], 10 + i)
    done = gate(tmp_path / "c*", "--history", tmp_path / "history")
    assert done.exit_code == 3, done.stdout
    assert done.stdout.splitlines()[-1] == "1 FAILED"


def test_a_cell_that_fails_in_one_candidate_is_failed(history: Path, tmp_path: Path) -> None:
    good = cell("push", 1000.0, sm_clock_mhz=1500.0)
    runs = candidates(tmp_path, [ended("failed"), good, good])
    done = gate(runs, "--history", history, "--record")
    assert done.exit_code == 3, done.stdout
    assert "failed in 1 of 3 candidates; the others: " in done.stdout
    # Its good launches are no base: what broke one may have touched them.
    (later,) = [one for one in _later(history, tmp_path).judged if ".push." in one.series[0]]
    assert later.call.base_n == 10


def _later(history: Path, tmp_path: Path):
    return check(launches(tmp_path, "later", 3, start=60, seed=9), history)


def test_failed_is_not_overwritten_by_a_later_unsupported(history: Path, tmp_path: Path) -> None:
    runs = candidates(tmp_path, [ended("failed"), ended("unsupported"), ended("unsupported")])
    done = gate(runs, "--history", history)
    assert done.exit_code == 3, done.stdout
    assert "1 FAILED" in done.stdout


@pytest.mark.parametrize("status", [None, "unsupported"])
def test_a_lost_cell_is_not_forgotten_once_recorded(
    history: Path, tmp_path: Path, status: str | None
) -> None:
    for night in range(2):
        row = ended(status) if status else None
        runs = candidates(tmp_path, [row] * 3, start=20 + 10 * night)
        done = gate(runs, "--history", history, "--record", "--strict")
        assert done.exit_code == 4, done.stdout
        assert ("UNSUPPORTED" if status else "MISSING") in done.stdout


def test_a_metric_that_was_never_measured_is_not_missing(history: Path, tmp_path: Path) -> None:
    launches(tmp_path, "same", 3, start=20, seed=2)
    done = gate(tmp_path / "same-*", "--history", history, "--metric", "dispatch_us")
    assert done.stdout == "no series that may gate\n"


def test_a_cell_that_only_failed_before_is_not_new(tmp_path: Path) -> None:
    for i in range(5):
        record(check([write_launch(tmp_path / f"b{i}", [ended("failed")], i)], tmp_path / "h"))
    runs = [write_launch(tmp_path / f"c{i}", [cell("push", 1e3)], 9 + i) for i in range(3)]
    (one,) = check(runs, tmp_path / "h").judged
    assert "failed or unsupported whenever the history has it" in one.call.why
