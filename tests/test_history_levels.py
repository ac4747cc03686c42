"""An accepted level that is lost, torn or says nothing is exit 2, and never what was before it."""

import json
import multiprocessing
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from click.testing import CliRunner
from launches import gate, h200, launches

from mokbench.cli import main
from mokbench.regression import history as history_module
from mokbench.regression.check import accept, check, record
from mokbench.regression.history import History, folder_of
from mokbench.results import RunFolder

FAST, BACK = {"push": 0.9}, {"push": 1.0}


@pytest.fixture
def folder(history: Path, tmp_path: Path) -> Path:
    """Folder of a history in which two levels of push were accepted, and runs slower than that."""
    accept(check(launches(tmp_path, "fast", 5, start=20, factors=FAST, seed=3), history), "tiles")
    more = launches(tmp_path, "more", 5, start=40, factors={"push": 0.8}, seed=4)
    accept(check(more, history), "more tiles")
    launches(tmp_path, "back", 3, start=60, factors=BACK, seed=5)
    assert gate(tmp_path / "back-*", "--history", history).exit_code == 1
    return folder_of(history, h200())


def change(**fields: object) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        first, last = path.read_text(encoding="utf-8").splitlines()
        path.write_text(f"{first}\n{json.dumps(json.loads(last) | fields)}\n", encoding="utf-8")

    return damage


def keep(lines: int, of_last: int = 0) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        whole = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(whole[:lines]) + whole[-1][:of_last])

    return damage


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (Path.unlink, "has 0 accepted levels, 2 were accepted"),
        (keep(1), "has 1 accepted levels, 2 were accepted"),
        (keep(1, 60), "levels.jsonl:2: not a line of a history"),
        (keep(2, 60), "levels.jsonl:3: not a line of a history"),
        (keep(0), "is empty"),
        (change(launches=[]), "levels.jsonl:2: not a line of a history: launches"),
        (change(series=[]), "levels.jsonl:2: not a line of a history: series"),
        (change(reason=" "), "levels.jsonl:2: not a line of a history: reason"),
        (change(launches=["abc"]), "has lost 1 of the 1 launches of the level"),
        (change(series=[["x", "step_time_us", ""]]), "of which its launches have no value"),
        (change(history_version=1), "history_version 1, this mokbench reads 2"),
        (change(lines=99), "its first 99 launches are not those"),
    ],
)
@pytest.mark.parametrize("command", ["check", "report"])
def test_levels_that_are_lost_or_say_nothing_are_refused(
    folder: Path, tmp_path: Path, command: str, damage: Callable[[Path], object], said: str
) -> None:
    damage(folder / "levels.jsonl")
    if command == "check":
        done = gate(tmp_path / "back-*", "--history", folder.parent, "--record")
    else:
        done = CliRunner().invoke(main, ["report", "--history", str(folder.parent)])
    assert (done.exit_code, done.stdout) == (2, ""), repr(done.exception)
    assert said in done.stderr


def test_a_machine_that_does_not_read_is_refused(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "machine.json").read_bytes()
    (folder / "machine.json").write_bytes(whole[:-20])
    done = gate(tmp_path / "back-*", "--history", folder.parent)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "machine.json: does not describe a machine" in done.stderr


def test_a_last_level_that_lacks_only_its_newline_counts(folder: Path, tmp_path: Path) -> None:
    path = folder / "levels.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    assert gate(tmp_path / "back-*", "--history", folder.parent).exit_code == 1


def test_a_crash_between_level_and_its_count_is_mended(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = launches(tmp_path, "third", 5, start=80, factors={"push": 0.7}, seed=6)
    checked = record(check(runs, folder.parent))

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(history_module, "tell", crash)
        with pytest.raises(KeyboardInterrupt):
            accept(checked, "crashed")
    assert len(History.read(folder).levels) == 3
    assert json.loads((folder / "machine.json").read_text())["levels"] == 2
    later = launches(tmp_path, "later", 3, start=100, factors={"push": 0.7}, seed=7)
    record(check(later, folder.parent))
    assert json.loads((folder / "machine.json").read_text())["levels"] == 3


def _record(root: Path, name: str, reason: str, barrier: Barrier) -> None:
    runs = [RunFolder.open(root / f"{name}-{i}") for i in range(3)]
    checked = check(runs, root / "history")
    barrier.wait(60)
    if reason:
        accept(checked, reason)
    else:
        record(checked)


def test_levels_are_counted_whoever_records_at_the_same_time(folder: Path, tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(4)
    jobs = []
    for number, reason in enumerate(["", "a", "", "b"]):
        factors = {"push": 1.1 + 0.2 * number}
        launches(tmp_path, f"p{number}", 3, start=90, factors=factors, seed=number)
        told = (tmp_path, f"p{number}", reason, barrier)
        jobs.append(spawn.Process(target=_record, args=told))
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert [job.exitcode for job in jobs] == [0] * 4
    read = History.read(folder)
    assert len(read.levels) == 4
    assert json.loads((folder / "machine.json").read_text())["levels"] == 4
    assert len(read.launches) == 32


def test_launches_that_were_recorded_out_of_time_do_not_block_an_accept(
    history: Path, tmp_path: Path
) -> None:
    early = launches(tmp_path, "early", 3, start=20, seed=2)
    fast = launches(tmp_path, "fast", 5, start=30, factors=FAST, seed=3)
    checked = check(fast, history)
    record(checked)
    record(check(early, history))
    assert gate(tmp_path / "fast-*", "--history", history, "--accept", "tiles").exit_code == 0
    read = History.read(folder_of(history, h200()))
    assert [launch.run for launch in read.launches[10:13]] == ["early-0", "early-1", "early-2"]
    assert read.lines[10:15] == [launch.launch for launch in read.launches[13:]]
    launches(tmp_path, "back", 3, start=60, factors=BACK, seed=5)
    done = gate(tmp_path / "back-*", "--history", history)
    assert (done.exit_code, "5+3" in done.stdout) == (1, True), done.output
