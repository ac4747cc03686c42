"""What is broken must be said; it must never lead to a verdict."""

import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from launches import SLOW, cell, gate, h200, launches, verdicts, write_launch
from runs import command

from mokbench.cli import main
from mokbench.errors import ResultsError
from mokbench.regression.check import check, record
from mokbench.regression.history import History, folder_of
from mokbench.regression.launch import Launch


def test_runs_of_two_machines_or_methods_are_refused(history: Path, tmp_path: Path) -> None:
    (one,) = launches(tmp_path, "one", 1)
    (other,) = launches(tmp_path, "two", 1, machine=h200(driver="999"))
    with pytest.raises(ResultsError, match="two machines"):
        check([one, other], history)
    (newer,) = launches(tmp_path, "new", 1, method_version=2)
    with pytest.raises(ResultsError, match=r"method version 1 and .* 2"):
        check([one, newer], history)


def test_another_machine_has_a_history_of_its_own(history: Path, tmp_path: Path) -> None:
    runs = launches(tmp_path, "two", 3, machine=h200(driver="999"), factors={"push": 2.0})
    assert set(verdicts(check(runs, history)).values()) == {"INSUFFICIENT"}


def test_another_gpu_of_the_kind_shares_the_history(history: Path, tmp_path: Path) -> None:
    runs = launches(tmp_path, "uuid", 3, machine=h200(gpu_uuids=["GPU-1"]), factors=SLOW, seed=2)
    assert verdicts(check(runs, history))["push"] == "SLOWER"


def test_launches_of_an_older_method_are_no_base(tmp_path: Path) -> None:
    root = tmp_path / "history"
    for run in launches(tmp_path, "old", 10, method_version=2):
        record(check([run], root))
    runs = launches(tmp_path, "now", 3, factors={"push": 2.0})
    assert set(verdicts(check(runs, root)).values()) == {"INSUFFICIENT"}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text.replace('"mok"', "", 1).replace("[", "", 1), "launches.jsonl:1"),
        (lambda text: text.replace('"history_version":1', '"history_version":0', 1), "version 0"),
        (lambda text: text.replace('"history_version":1', '"history_version":7', 1), "version 7"),
        (
            lambda text: text.replace('"clock_mhz":[1500.0', '"clock_mhz":[NaN', 1),
            "isolated: clock_mhz is nan",
        ),
        (lambda text: text.replace('"clock_mhz":[1500.0,', '"clock_mhz":[', 1), "lengths"),
        (lambda text: "[" * 100_000 + "\n" + text, "launches.jsonl:1"),
        (lambda text: "null\n" + text, "NoneType"),
        (lambda text: "\n" + text, "launches.jsonl:1"),
        (lambda text: text.replace('"machine":"', '"machine":"x', 1), "2 machines"),
    ],
)
def test_a_damaged_history_is_an_error_with_its_line(
    history: Path, tmp_path: Path, damage, said: str
) -> None:
    path = folder_of(history, h200()) / "launches.jsonl"
    path.write_text(damage(path.read_text(encoding="utf-8")), encoding="utf-8")
    launches(tmp_path, "slow", 3, start=20, factors=SLOW, seed=2)
    done = gate(tmp_path / "slow-*", "--history", history)
    assert done.exit_code == 2, done.stdout + done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_torn_last_line_is_left_out_and_said(history: Path, tmp_path: Path) -> None:
    path = folder_of(history, h200()) / "launches.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    runs = launches(tmp_path, "slow", 3, start=20, factors=SLOW, seed=2)
    with pytest.warns(UserWarning, match="cut short"):
        checked = check(runs, history)
    assert checked.judged[0].call.base_n == 9
    assert checked.judged[0].call.verdict == "SLOWER"
    record(checked)
    assert len(History.read(path.parent).launches) == 12


def test_a_history_copied_over_another_machines_is_refused(history: Path, tmp_path: Path) -> None:
    other = h200(driver="999")
    folder_of(history, h200()).rename(folder_of(history, other))
    runs = launches(tmp_path, "two", 3, machine=other)
    with pytest.raises(ResultsError, match="copied over another"):
        check(runs, history)


def test_the_folder_of_one_machine_is_no_history(history: Path, tmp_path: Path) -> None:
    runs = launches(tmp_path, "slow", 3, start=20, factors=SLOW, seed=2)
    with pytest.raises(ResultsError, match="give the folder that it is in"):
        check(runs, folder_of(history, h200()))


def test_a_full_disk_leaves_the_history_as_it_was(history: Path, tmp_path: Path) -> None:
    path = folder_of(history, h200()) / "launches.jsonl"
    before = path.read_bytes()
    launches(tmp_path, "same", 3, start=20)
    limit = f'ulimit -f {len(before) // 1024 + 1}; exec "$@"'
    arguments = command("check", tmp_path / "same-*", "--history", history, "--record")
    done = subprocess.run(
        ["bash", "-c", limit, "_", *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "free some space" in done.stderr
    assert path.read_bytes().startswith(before)
    assert path.read_bytes().endswith(b"\n")


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


def test_copies_of_one_launch_are_not_three_launches(history: Path, tmp_path: Path) -> None:
    (run,) = launches(tmp_path, "slow", 1, start=20, factors={"push": 1.2})
    for name in ("copy-1", "copy-2"):
        shutil.copytree(run.path, tmp_path / name)
    done = gate(run.path, tmp_path / "copy-*", "--history", history)
    assert done.exit_code == 2
    assert "copies of one launch" in done.stderr
    assert "SLOWER" not in done.stdout


def test_bad_options_are_bad_usage(history: Path, tmp_path: Path) -> None:
    launches(tmp_path, "same", 3)
    for options, said in (
        (["--metric", "speed"], "allowed: step_time_us"),
        (["--floor", "200%"], "a share such as 2%"),
        (["--confirm"], "--baseline-python"),
        (["--baseline-python", sys.executable], "goes with --confirm"),
    ):
        done = gate(tmp_path / "same-*", "--history", history, *options)
        assert done.exit_code == 2
        assert said in done.stderr


def test_a_launch_of_another_size_is_refused(tmp_path: Path) -> None:
    run = launches(tmp_path, "one", 1)[0]
    whole = Launch.of(run).model_dump()
    for change in ({"ids": whole["ids"][:1] * 3}, {"marks": [""]}):
        with pytest.raises(ValueError, match=r"twice|lengths"):
            Launch.model_validate(whole | change)
