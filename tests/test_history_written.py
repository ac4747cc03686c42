"""What a record writes to a history: all or nothing, once, whatever ends or runs beside it."""

import os
import subprocess
from pathlib import Path

import pytest
from launches import SLOW, gate, h200, launches, verdicts
from runs import command

from mokbench.durable import Lock
from mokbench.regression import history as history_module
from mokbench.regression.check import accept, check, record
from mokbench.regression.history import History, folder_of


@pytest.fixture
def file(history: Path) -> Path:
    return folder_of(history, h200()) / "launches.jsonl"


def test_a_full_disk_takes_all_launches_of_a_record_or_none(
    history: Path, file: Path, tmp_path: Path
) -> None:
    before = file.read_bytes()
    line = len(before) // 10
    launches(tmp_path, "slow", 3, start=20, factors=SLOW)
    # Room for one line of three, and then some.
    limit = f'ulimit -f {(len(before) + line) // 1024 + 1}; exec "$@"'
    arguments = command("check", tmp_path / "slow-*", "--history", history, "--record")
    done = subprocess.run(
        ["bash", "-c", limit, "_", *arguments], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, file.read_bytes()) == (2, before), done.stderr
    assert gate(tmp_path / "slow-*", "--history", history, "--record").exit_code == 1


def test_ctrl_c_while_a_record_is_written_leaves_none_of_it(
    history: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = file.read_bytes()
    checked = check(launches(tmp_path, "slow", 3, start=20, factors=SLOW), history)
    real, line = os.write, len(before) // 10

    def interrupted(descriptor: int, content) -> int:
        if len(content) < line // 2 or file.read_bytes() == before:
            return real(descriptor, bytes(content)[: line + 50])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            record(checked)
    assert file.read_bytes() == before


@pytest.mark.parametrize("recorded", [1, 2])
def test_the_rest_of_a_half_recorded_check_is_judged_with_what_is_there(
    history: Path, tmp_path: Path, recorded: int
) -> None:
    launches(tmp_path, "slow", 3, start=20, factors=SLOW)
    for i in range(recorded):
        assert gate(tmp_path / f"slow-{i}", "--history", history, "--record").exit_code == 0
    with pytest.warns(UserWarning, match=f"{recorded} of the 3 .* all are judged, by the 10 oth"):
        done = gate(tmp_path / "slow-*", "--history", history, "--record")
    assert done.exit_code == 1, done.output
    assert "10+3" in done.stdout
    assert f"{3 - recorded} run" in done.stdout
    newest = History.read(folder_of(history, h200())).launches[-1]
    assert list(newest.flags["step_time_us"].values()) == ["SLOWER"]


def test_an_earlier_night_does_not_outvote_two_new_launches(history: Path, tmp_path: Path) -> None:
    launches(tmp_path, "night-0", 3, start=20, seed=2)
    gate(tmp_path / "night-*", "--history", history, "--record")
    launches(tmp_path, "night-1", 2, start=40, factors=SLOW)
    done = gate(tmp_path / "night-*", "--history", history, "--record")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "3 of the 5 runs given are in the history already, and the 2 others are" in done.stderr


def test_a_half_recorded_check_without_other_base_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "history"
    record(check(launches(tmp_path, "base", 4), root))
    runs = launches(tmp_path, "slow", 3, start=20, factors=SLOW)
    for run in runs[:2]:
        record(check([run], root))
    done = gate(tmp_path / "slow-*", "--history", root)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "2 of the 3 runs given are in the history already, which has 4 others" in done.stderr


def test_of_two_checks_of_the_same_runs_one_records(history: Path, tmp_path: Path) -> None:
    runs = launches(tmp_path, "same", 3, start=20, seed=2)
    first, second = check(runs, history), check(runs, history)
    assert record(first).recorded == 3
    with pytest.warns(UserWarning, match="another check recorded these runs just now"):
        assert record(second).recorded == 0
    assert len(History.read(folder_of(history, h200())).launches) == 13


def test_a_check_adds_what_another_one_did_not(history: Path, tmp_path: Path) -> None:
    runs = launches(tmp_path, "slow", 5, start=20, factors=SLOW)
    first, second = check(runs[:3], history), check(runs, history)
    record(first)
    accept(second, "agreed")
    read = History.read(folder_of(history, h200()))
    assert [launch.run for launch in read.launches[10:]] == [f"slow-{i}" for i in range(5)]
    assert len(read.levels[0].launches) == 5


def test_a_last_launch_without_its_newline_is_kept(
    history: Path, file: Path, tmp_path: Path
) -> None:
    before = file.read_bytes()
    file.write_bytes(before[:-1])
    checked = check(launches(tmp_path, "same", 3, start=20, seed=2), history)
    assert {one.call.base_n for one in checked.judged} == {10}
    assert record(checked).recorded == 3
    assert file.read_bytes().startswith(before)
    assert len(History.read(file.parent).launches) == 13


def test_a_first_launch_cut_short_is_replaced(history: Path, file: Path, tmp_path: Path) -> None:
    file.write_bytes(file.read_bytes()[:50])
    (file.parent / "machine.json").unlink()
    with pytest.warns(UserWarning, match="cut short"):
        checked = check(launches(tmp_path, "same", 3, start=20, seed=2), history)
    assert set(verdicts(checked).values()) == {"INSUFFICIENT"}
    assert record(checked).recorded == 3
    assert len(History.read(file.parent).launches) == 3


def test_a_lock_that_is_a_folder_is_said(history: Path, file: Path, tmp_path: Path) -> None:
    (file.parent / ".lock").unlink()
    (file.parent / ".lock").mkdir()
    launches(tmp_path, "same", 3, start=20, seed=2)
    done = gate(tmp_path / "same-*", "--history", history, "--record")
    assert done.exit_code == 2
    assert (
        done.stderr == f"{file.parent}/.lock: is a folder, and must be a file to lock: remove it\n"
    )


def test_a_lock_that_another_check_holds_too_long_is_said(
    history: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches(tmp_path, "same", 3, start=20, seed=2)
    monkeypatch.setattr(history_module, "_LOCK_WAIT_S", 0.05)
    held = Lock(file.parent)
    done = gate(tmp_path / "same-*", "--history", history, "--record")
    held.release()
    assert done.exit_code == 2
    assert "is writing here" in done.stderr
