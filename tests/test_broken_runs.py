"""Run folders that are corrupt or half-written: an error that says where, never a verdict."""

import errno
import json
import math
import re
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner
from launches import SLOW, cell, gate, launches, write_launch

from mokbench.cli import main
from mokbench.record import METHOD_VERSION, RECORD_VERSION

VERSION = f'_version":{RECORD_VERSION}'


@pytest.mark.parametrize(
    ("file", "damage", "said"),
    [
        ("records.jsonl", lambda text: text.replace('"id"', '"identity"', 1), "records.jsonl:1"),
        ("records.jsonl", lambda text: text.replace(VERSION, '_version":0', 1), "older"),
        ("records.jsonl", lambda text: text.replace(VERSION, '_version":9', 1), "newer"),
        ("records.jsonl", lambda _: "", "has 0 rows, but the run ended with 3"),
        ("run.json", lambda text: text[: len(text) // 2], "not a run description"),
        ("run.json", lambda text: text.replace('"done"', '"interrupted"'), "--resume"),
        ("run.json", lambda text: text.replace('"done"', '"running"'), "--resume"),
    ],
)
def test_broken_and_unfinished_runs_are_refused(
    history: Path, tmp_path: Path, file: str, damage, said: str
) -> None:
    launches(tmp_path, "slow", 3, start=20, factors=SLOW)
    path = tmp_path / "slow-1" / file
    path.write_text(damage(path.read_text(encoding="utf-8")), encoding="utf-8")
    done = gate(*(tmp_path / f"slow-{i}" for i in range(3)), "--history", history)
    assert done.exit_code == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert "SLOWER" not in done.stdout


def step_set_to(value: str):
    """Put ``value`` in the place of the first row's median step time."""
    return lambda text: re.sub(r'("median":)[0-9.]+', rf"\g<1>{value}", text, count=1)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (step_set_to("NaN"), "step_time_us.median is nan"),
        (step_set_to("Infinity"), "step_time_us.median is inf"),
        (step_set_to("9e999"), "step_time_us.median is inf"),
        (step_set_to("-900.0"), "step_time_us.median is -900.0"),
        (step_set_to("0"), "step_time_us.median is 0"),
        (step_set_to("90.5"), "step_time_us.median is 90.5, outside its own min"),
        (lambda text: text.replace('mhz":1500.0', 'mhz":-1500.0', 1), "sm_clock_mhz is -1500.0"),
        (lambda text: text.replace('"block_us":[]', '"block_us":[1,-2]', 1), "block_us[1] is -2"),
        (lambda text: text.replace('"dispatch_us":null', '"dispatch_us":-1', 1), "dispatch_us is"),
        (lambda text: text.replace('"n":9', '"n":0', 1), "step_time_us.n is 0"),
    ],
)
@pytest.mark.parametrize("command", ["check", "compare", "report"])
def test_a_figure_that_cannot_be_is_an_error_with_row_and_value(
    history: Path, tmp_path: Path, command: str, damage, said: str
) -> None:
    launches(tmp_path, "slow", 3, start=20, factors=SLOW)
    path = tmp_path / "slow-1" / "records.jsonl"
    damaged = damage(path.read_text(encoding="utf-8"))
    assert damaged != path.read_text(encoding="utf-8")
    path.write_text(damaged, encoding="utf-8")
    runs = str(tmp_path / "slow-*")
    arguments = {
        "check": [runs, "--history", str(history)],
        "compare": [str(tmp_path / "slow-0"), runs],
        "report": [runs, "--no-charts"],
    }
    done = CliRunner().invoke(main, [command, *arguments[command]])
    assert done.exit_code == 2, done.output
    assert f"{path}:1: tiny.mok.r4.t128.balanced.bf16.isolated: {said}" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("command", ["check", "compare", "report"])
def test_a_run_that_ended_and_lost_the_end_of_a_row_is_refused(
    history: Path, tmp_path: Path, command: str
) -> None:
    launches(tmp_path, "slow", 3, start=20, factors=SLOW)
    path = tmp_path / "slow-2" / "records.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    runs = str(tmp_path / "slow-*")
    arguments = {
        "check": [runs, "--history", str(history)],
        "compare": [runs, str(tmp_path / "slow-0")],
        "report": [str(path.parent), "--format", "html"],
    }
    done = CliRunner().invoke(main, [command, *arguments[command]])
    assert done.exit_code == 2, done.output
    assert f"{path}: the run ended, but its last row is cut short" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"median": math.nan}, "step_time_us.median was nan: stored as null"),
        ({"median": math.inf}, "step_time_us.median was inf: stored as null"),
        (None, "is ok and has no step_time_us"),
    ],
)
def test_a_step_time_that_the_measurement_lost_is_no_missing_launch(
    history: Path, tmp_path: Path, changes: dict | None, said: str
) -> None:
    runs = launches(tmp_path, "same", 2, start=20, seed=2)
    whole = cell("push", 1000.0)
    step = None if changes is None else whole.to_dict()["step_time_us"] | changes
    broken = type(whole).model_validate({**whole.to_dict(), "step_time_us": step})
    runs.append(write_launch(tmp_path / "broken", [broken], 30))
    done = gate(*(run.path for run in runs), "--history", history)
    assert done.exit_code == 2, done.output
    assert f"{tmp_path / 'broken'}: {whole.id}: {said}" in done.stderr
    assert done.stdout == ""


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _edit(old: str, new: str):
    return lambda path: path.write_text(path.read_text().replace(old, new, 1))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_folder, "records.jsonl: reading failed: Is a directory"),
        (_loop, "records.jsonl: reading failed: Too many levels"),
        (
            lambda path: path.write_text(
                re.sub(r'("(?:median|p95|ci_high)":)[0-9.]+', r"\g<1>1e306", path.read_text())
            ),
            "step_time_us.median is 1e+306, a number from",
        ),
        (_edit('"expert_counts":[]', f'"expert_counts":[{10**30}]'), "expert_counts[0] is 1000"),
    ],
)
@pytest.mark.parametrize("command", ["check", "compare", "report"])
def test_what_cannot_be_read_or_counted_is_one_line_and_exit_2(
    history: Path, tmp_path: Path, command: str, damage, said: str
) -> None:
    launches(tmp_path, "slow", 3, start=20, factors=SLOW)
    damage(tmp_path / "slow-1" / "records.jsonl")
    runs = str(tmp_path / "slow-*")
    arguments = {
        "check": [runs, "--history", str(history)],
        "compare": [str(tmp_path / "slow-0"), runs],
        "report": [runs, "--no-charts"],
    }
    done = CliRunner().invoke(main, [command, *arguments[command]])
    assert done.exit_code == 2, repr(done.exception)
    assert said in done.stderr
    assert done.stdout == ""


def test_a_run_that_may_not_be_read_is_not_passed_over(
    history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches(tmp_path, "slow", 3, start=20, factors=SLOW)
    _lock(monkeypatch, tmp_path / "slow-1")
    done = gate(tmp_path / "slow-*", "--history", history)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "slow-1: reading failed: Permission denied" in done.stderr


def test_a_machine_that_may_not_be_read_is_not_passed_over(
    history: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder,) = history.iterdir()
    _lock(monkeypatch, folder)
    done = CliRunner().invoke(main, ["report", "--history", str(history)])
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"{folder}: reading failed: Permission denied" in done.stderr


def _lock(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Refuse what is inside ``folder``, as chmod 0 does to those who are not root."""
    stat = Path.stat

    def refusing(path: Path, **options):
        if path.parent == folder:
            raise PermissionError(errno.EACCES, "Permission denied")
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refusing)


COLUMNS = {
    "block": [0, 0],
    "iteration": [0, 0],
    "rank": [0, 1],
    "start_us": [0.0, 0.0],
    "duration_us": [5.0, 6.0],
    "sm_clock_mhz": [1.0, 2.0],
    "accepted": [True, True],
}


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"a": [1]}, "it has no column block"),
        ({name: ["x"] for name in COLUMNS}, "its column block is"),
        (COLUMNS | {"duration_us": [math.nan, 1.0]}, "that is not finite"),
        (COLUMNS | {"accepted": [False, False]}, "hold no accepted pass"),
        (None, "cannot be read"),
    ],
)
def test_samples_that_are_broken_are_said_in_the_page(tmp_path: Path, columns, said: str) -> None:
    row = cell("push", 1000.0, samples_file="samples/x.parquet")
    run = write_launch(tmp_path / "one", [row], 0)
    if columns is not None:
        pd.DataFrame(columns).to_parquet(run.path / "samples" / "x.parquet")
    done = CliRunner().invoke(main, ["report", str(run.path), "--format", "html"])
    assert done.exit_code == 0, repr(done.exception)
    assert said in done.stdout
    assert "kept its samples" not in done.stdout


def _step(**changes: object) -> str:
    step = {"median": 9, "p95": 9, "min": 9, "ci_low": 9, "ci_high": 9, "n": 9} | changes
    return f'"step_time_us":{json.dumps(step)},"step_time_us"'


@pytest.mark.parametrize(
    ("file", "damage", "said"),
    [
        ("records.jsonl", step_set_to("true"), "step_time_us.median: Input should be a valid num"),
        ("records.jsonl", step_set_to('"900"'), "step_time_us.median: Input should be a valid num"),
        (
            "records.jsonl",
            lambda text: text.replace('"step_time_us"', _step(), 1),
            "step_time_us stands in it twice",
        ),
        (
            "run.json",
            lambda text: text.replace('"name"', '"name":"x","name"', 1),
            "name stands in it twice",
        ),
        (
            "run.json",
            lambda text: re.sub(r'("method_version": )([0-9]+)', r'\1"\2"', text),
            "method_version: Input should be a valid integer",
        ),
    ],
)
def test_words_for_numbers_and_names_that_stand_twice_are_refused(
    history: Path, tmp_path: Path, file: str, damage, said: str
) -> None:
    launches(tmp_path, "slow", 3, start=20, factors=SLOW)
    path = tmp_path / "slow-1" / file
    before = path.read_text(encoding="utf-8")
    path.write_text(damage(before), encoding="utf-8")
    assert path.read_text(encoding="utf-8") != before
    done = gate(tmp_path / "slow-*", "--history", history)
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr


def test_the_last_attempt_counts_in_whatever_order_lines_stand(tmp_path: Path) -> None:
    rows = [cell("push", 1000.0, attempt=2), cell("push", 900.0, attempt=1)]
    (row,) = write_launch(tmp_path / "one", rows, 0).records()
    assert row.attempt == 2


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"status":["ok"', '"status":["failed"', "is failed and has step_time_us"),
        ('"clock_mhz":[1500.0', '"clock_mhz":["1500"', "valid number"),
        (f'"method_version":{METHOD_VERSION}', '"method_version":true', "valid integer"),
        ('"commit":null', '"commit":null,"commit":null', "commit stands in it twice"),
    ],
)
def test_a_history_with_a_value_of_a_failed_cell_or_no_number_is_refused(
    history: Path, tmp_path: Path, old: str, new: str, said: str
) -> None:
    launches(tmp_path, "slow", 3, start=20, factors=SLOW)
    (folder,) = history.iterdir()
    path = folder / "launches.jsonl"
    before = path.read_text(encoding="utf-8")
    assert old in before
    path.write_text(before.replace(old, new, 1), encoding="utf-8")
    done = gate(tmp_path / "slow-*", "--history", history)
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr
