"""Run folders that are corrupt or half-written: an error that says where, never a verdict."""

import math
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from launches import SLOW, cell, gate, launches, write_launch

from mokbench.cli import main


@pytest.mark.parametrize(
    ("file", "damage", "said"),
    [
        ("records.jsonl", lambda text: text.replace('"id"', '"identity"', 1), "records.jsonl:1"),
        ("records.jsonl", lambda text: text.replace('_version":1', '_version":0', 1), "older"),
        ("records.jsonl", lambda text: text.replace('_version":1', '_version":9', 1), "newer"),
        ("records.jsonl", lambda _: "", "no rows"),
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
