"""What is broken must be said; it must never lead to a verdict."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from launches import SLOW, gate, h200, launches, verdicts
from runs import command

from mokbench import run_checks
from mokbench.cli import main
from mokbench.errors import ResultsError
from mokbench.record import METHOD_VERSION
from mokbench.regression.check import check, record
from mokbench.regression.history import History, folder_of
from mokbench.regression.launch import Launch
from mokbench.results import RunFolder


def test_runs_of_two_machines_or_methods_are_refused(
    history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_checks, "METHOD_VERSION", METHOD_VERSION + 1)
    (one,) = launches(tmp_path, "one", 1)
    (other,) = launches(tmp_path, "two", 1, machine=h200(driver="999"))
    with pytest.raises(ResultsError, match="two machines"):
        check([one, other], history)
    (newer,) = launches(tmp_path, "new", 1, method_version=METHOD_VERSION + 1)
    with pytest.raises(
        ResultsError, match=rf"method version {METHOD_VERSION} and .* {METHOD_VERSION + 1}"
    ):
        check([one, newer], history)


def with_stale_key(run: RunFolder) -> Path:
    """Let the run say another driver under the key it had before."""
    path = run.path / "run.json"
    text = path.read_text(encoding="utf-8")
    assert '"driver": "580.1"' in text
    path.write_text(text.replace('"driver": "580.1"', '"driver": "999"'), encoding="utf-8")
    return run.path


@pytest.mark.parametrize("command", ["check", "compare", "report"])
def test_a_key_that_is_not_its_machines_is_refused(
    history: Path, tmp_path: Path, command: str
) -> None:
    runs = launches(tmp_path, "same", 3, start=20, seed=2)
    stale = with_stale_key(runs[1])
    globbed = str(tmp_path / "same-*")
    arguments = {
        "check": [globbed, "--history", str(history)],
        "compare": [str(runs[0].path), globbed],
        "report": [globbed, "--no-charts"],
    }
    done = CliRunner().invoke(main, [command, *arguments[command]])
    assert done.exit_code == 2, done.output
    assert f"{stale / 'run.json'}: its machine key {runs[0].meta.machine.key} is not" in done.stderr
    assert done.stdout == ""
    if command == "compare":
        forced = CliRunner().invoke(main, [command, *arguments[command], "--force"])
        assert forced.exit_code == 0
        assert "warning: " in forced.stderr


def test_a_history_that_says_another_machine_is_refused(history: Path, tmp_path: Path) -> None:
    runs = launches(tmp_path, "same", 3, start=20, seed=2)
    path = folder_of(history, h200()) / "machine.json"
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole.replace('"580.1"', '"999"'), encoding="utf-8")
    with pytest.raises(ResultsError, match=r"machine\.json: its machine key"):
        check(runs, history)
    path.write_text(h200(driver="999").model_dump_json(), encoding="utf-8")
    with pytest.raises(ResultsError, match="the launches beside it are of"):
        check(runs, history)
    path.write_text(whole, encoding="utf-8")
    assert set(verdicts(check(runs, history)).values()) == {"SAME"}


def test_another_machine_has_a_history_of_its_own(history: Path, tmp_path: Path) -> None:
    runs = launches(tmp_path, "two", 3, machine=h200(driver="999"), factors={"push": 2.0})
    assert set(verdicts(check(runs, history)).values()) == {"INSUFFICIENT"}


def test_another_gpu_of_the_kind_shares_the_history(history: Path, tmp_path: Path) -> None:
    runs = launches(tmp_path, "uuid", 3, machine=h200(gpu_uuids=["GPU-1"]), factors=SLOW, seed=2)
    assert verdicts(check(runs, history))["push"] == "SLOWER"


def test_launches_of_another_method_are_no_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_checks, "METHOD_VERSION", METHOD_VERSION + 1)
    root = tmp_path / "history"
    for run in launches(tmp_path, "old", 10, method_version=METHOD_VERSION + 1):
        record(check([run], root))
    runs = launches(tmp_path, "now", 3, factors={"push": 2.0})
    assert set(verdicts(check(runs, root)).values()) == {"INSUFFICIENT"}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text.replace('"mok"', "", 1).replace("[", "", 1), "launches.jsonl:1"),
        (lambda text: text.replace('"history_version":2', '"history_version":0', 1), "version 0"),
        (lambda text: text.replace('"history_version":2', '"history_version":7', 1), "version 7"),
        (lambda text: text.replace('_version":2', '_version":"2"', 1), "version '2', this"),
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
        (["--baseline-python", sys.executable], "go with --confirm"),
        (["--good-commit"], "without RUNS"),
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
