"""A history that is broken or out of order is exit 2; recorded runs are base, not candidates."""

import warnings
from pathlib import Path

import pytest
from click.testing import CliRunner
from launches import SLOW, gate, h200, launches

from mokbench.cli import main
from mokbench.errors import ResultsError
from mokbench.regression.check import accept, check, record
from mokbench.regression.history import History, folder_of


def test_nights_that_a_glob_finds_again_stay_base(tmp_path: Path) -> None:
    history = tmp_path / "history"
    for night in range(4):
        factors = SLOW if night == 3 else None
        launches(tmp_path, f"nightly-{night}", 3, start=24 * night, seed=night, factors=factors)
        with warnings.catch_warnings(record=True) as said:
            done = gate(tmp_path / "nightly-*", "--history", history, "--record")
    assert done.exit_code == 1, done.output
    assert "9 of the 12 runs given are in the history already and count as" in str(said[0].message)
    assert "9+3" in done.stdout
    assert "3 runs recorded" in done.stdout


def test_runs_that_are_all_recorded_must_leave_a_base(history: Path, ten: Path) -> None:
    done = gate(ten / "base-*", "--history", history)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "the runs given (10) are all in the history already, which has 0 others" in done.stderr
    with pytest.warns(UserWarning, match="all are judged, by the 7 others"):
        done = gate(*(ten / f"base-{i}" for i in range(3)), "--history", history)
    assert done.exit_code == 0


@pytest.fixture
def accepted(history: Path, tmp_path: Path) -> Path:
    fast = launches(tmp_path, "fast", 5, start=20, factors={"push": 0.9}, seed=3)
    accept(check(fast, history), "faster")
    launches(tmp_path, "back", 3, start=40, seed=4)
    assert gate(tmp_path / "back-*", "--history", history).exit_code == 1
    return folder_of(history, h200()) / "launches.jsonl"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda lines: lines[10:] + lines[:10],
            "are not those, or not in the order, that were there",
        ),
        (lambda lines: lines[:10] + lines[11:], "has lost 1 of the 5 launches of the level"),
        (lambda lines: lines[11:], "has lost 1 of the 5 launches of the level"),
    ],
)
def test_a_level_whose_lines_moved_or_are_lost_is_refused(
    accepted: Path, tmp_path: Path, change, said: str
) -> None:
    lines = accepted.read_text(encoding="utf-8").splitlines(keepends=True)
    accepted.write_text("".join(change(lines)), encoding="utf-8")
    done = gate(tmp_path / "back-*", "--history", accepted.parents[1])
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr


def test_what_a_level_would_not_read_again_is_not_written(accepted: Path, tmp_path: Path) -> None:
    before = accepted.read_bytes()
    late = launches(tmp_path, "late", 3, start=5, seed=5, factors={"push": 0.9})
    with pytest.raises(ResultsError, match="stands behind the level"):
        record(check(late, accepted.parents[1]))
    assert accepted.read_bytes() == before


def test_runs_are_recorded_in_the_order_of_time(tmp_path: Path) -> None:
    runs = launches(tmp_path, "some", 3)
    record(check(runs[::-1], tmp_path / "history"))
    read = History.read(folder_of(tmp_path / "history", h200())).launches
    assert [launch.run for launch in read] == ["some-0", "some-1", "some-2"]


def _dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("gone")


def _loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_dangling, "No such file"),
        (_loop, "Too many levels"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (Path.unlink, "is not there, but machine.json beside it"),
    ],
)
@pytest.mark.parametrize("command", ["check", "report"])
def test_a_history_that_lost_its_launches_is_not_a_new_one(
    history: Path, tmp_path: Path, command: str, damage, said: str
) -> None:
    launches(tmp_path, "slow", 3, start=20, factors=SLOW)
    damage(folder_of(history, h200()) / "launches.jsonl")
    if command == "check":
        done = gate(tmp_path / "slow-*", "--history", history)
    else:
        done = CliRunner().invoke(main, ["report", "--history", str(history)])
    assert (done.exit_code, done.stdout) == (2, ""), repr(done.exception)
    assert said in done.stderr


def test_a_file_or_a_broken_link_is_no_history(tmp_path: Path) -> None:
    launches(tmp_path, "slow", 3)
    path = tmp_path / "history"
    path.write_text("x")
    assert "is a file, a history is a folder" in gate(tmp_path / "slow-*", "--history", path).stderr
    path.unlink()
    path.symlink_to("nowhere")
    done = gate(tmp_path / "slow-*", "--history", path, "--record")
    assert done.exit_code == 2
    assert "is a link that leads nowhere" in done.stderr


def test_a_folder_that_a_glob_passes_over_is_said(history: Path, tmp_path: Path) -> None:
    launches(tmp_path, "same", 4, start=20, seed=2)
    (tmp_path / "same-3" / "run.json").unlink()
    with pytest.warns(UserWarning, match=r"same-3: passed over, it has no run\.json"):
        done = gate(tmp_path / "same-*", "--history", history)
    assert done.exit_code == 0


@pytest.mark.parametrize("command", ["check", "compare"])
def test_a_method_that_is_not_known_is_refused(tmp_path: Path, command: str) -> None:
    launches(tmp_path, "new", 3, method_version=99)
    runs = str(tmp_path / "new-*")
    more = ["--history", str(tmp_path / "h")] if command == "check" else [runs]
    done = CliRunner().invoke(main, [command, runs, *more])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "was measured with method version 99, this mokbench knows" in done.stderr
