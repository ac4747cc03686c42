"""A line of a history is never rewritten: flags that come too late are said to be lost."""

import warnings
from pathlib import Path

import pytest
from launches import cell, gate, write_launch

TOLD = ("--metric", "dispatch_us", "--record")
LOST = "2 series that moved stay base in them, for example "


def nights(folder: Path, name: str, count: int, start: int, dispatch: float) -> str:
    for i in range(count):
        rows = [
            cell(system, 1000.0 + i, sm_clock_mhz=1500.0, dispatch_us=dispatch + 0.1 * i)
            for system in ("push", "alltoall")
        ]
        write_launch(folder / f"{name}-{i}", rows, start + i)
    return str(folder / f"{name}-*")


def test_a_second_check_of_other_metrics_cannot_flag_and_says_so(tmp_path: Path) -> None:
    history = tmp_path / "history"
    gate(nights(tmp_path, "base", 8, 0, 100.0), "--history", history, "--record")
    slow = nights(tmp_path, "slow", 3, 20, 110.0)
    assert gate(slow, "--history", history, "--record").exit_code == 0
    with pytest.warns(match=f"{LOST}tiny.alltoall.*: give every --metric to one check"):
        assert gate(slow, "--history", history, *TOLD).exit_code == 1


def test_one_check_of_all_metrics_flags_and_may_be_repeated(tmp_path: Path) -> None:
    history = tmp_path / "history"
    gate(nights(tmp_path, "base", 8, 0, 100.0), "--history", history, "--record")
    for night in range(3):
        slow = nights(tmp_path, f"slow{night}", 3, 20 + 10 * night, 110.0)
        for _ in range(2):
            with warnings.catch_warnings(record=True) as said:
                done = gate(slow, "--history", history, "--metric", "step_time_us", *TOLD)
            assert done.exit_code == 1, done.output
            assert not [one for one in said if LOST in str(one.message)]
