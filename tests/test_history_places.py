"""A history that is somewhere else, or whose files are none, is exit 2 and never waited for."""

import os
import subprocess
from pathlib import Path

import pytest
from launches import SLOW, gate, h200, launches
from runs import command

from mokbench.record import METHOD_VERSION
from mokbench.regression.check import accept, check
from mokbench.regression.history import folder_of


def test_a_history_one_folder_further_down_is_said(history: Path, tmp_path: Path) -> None:
    launches(tmp_path, "slow", 3, start=20, factors=SLOW)
    outer = tmp_path / "outer"
    outer.mkdir()
    (outer / "README.md").write_text("histories")
    history.rename(outer / "history")
    for options in ([], ["--record"]):
        done = gate(tmp_path / "slow-*", "--history", outer, *options)
        assert (done.exit_code, done.stdout) == (2, ""), done.output
        assert f"one folder further down, in {outer / 'history'}: give that" in done.stderr
    assert gate(tmp_path / "slow-*", "--history", outer / "history").exit_code == 1


@pytest.mark.parametrize("name", ["launches.jsonl", "levels.jsonl", "machine.json"])
def test_a_pipe_in_the_place_of_a_file_is_refused(history: Path, tmp_path: Path, name: str) -> None:
    fast = launches(tmp_path, "fast", 5, start=20, factors={"push": 0.9}, seed=3)
    accept(check(fast, history), "tiles")
    launches(tmp_path, "slow", 3, start=40, factors=SLOW)
    path = folder_of(history, h200()) / name
    path.unlink()
    os.mkfifo(path)
    arguments = command("check", tmp_path / "slow-*", "--history", history, "--record")
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{path}: is no file; restore it" in done.stderr


def test_a_method_that_is_not_known_is_refused_in_a_history(history: Path, tmp_path: Path) -> None:
    path = folder_of(history, h200()) / "launches.jsonl"
    text = path.read_text(encoding="utf-8")
    path.write_text(
        text.replace(f'"method_version":{METHOD_VERSION}', '"method_version":99', 1),
        encoding="utf-8",
    )
    launches(tmp_path, "slow", 3, start=20, factors=SLOW)
    done = gate(tmp_path / "slow-*", "--history", history)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "launch base-0 was measured with method version 99, this mokbench knows" in done.stderr


def test_flags_of_a_cell_that_is_not_there_are_no_bug(history: Path, tmp_path: Path) -> None:
    path = folder_of(history, h200()) / "launches.jsonl"
    text = path.read_text(encoding="utf-8")
    flags = '"flags":{"step_time_us":{"x":"SLOWER"}}'
    path.write_text(text.replace('"flags":{}', flags, 1), encoding="utf-8")
    launches(tmp_path, "slow", 3, start=20, factors=SLOW)
    done = gate(tmp_path / "slow-*", "--history", history)
    assert (done.exit_code, "flags a cell" in done.stderr) == (2, True), done.output
