"""A run that an error ended half way, or that lost rows since, is not judged as a whole one."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_run import fake_record
from launches import SLOW, cell, gate, launches, verdicts, write_launch
from runs import write_config

from mokbench import command as run_module
from mokbench.cli import main
from mokbench.errors import MokbenchError
from mokbench.regression.check import check
from mokbench.results import RunFolder


def change_meta(path: Path, **changes: object) -> None:
    file = path / "run.json"
    meta = json.loads(file.read_text(encoding="utf-8")) | changes
    file.write_text(json.dumps(meta), encoding="utf-8")


def judge(what: str, runs: str, one: Path, history: Path, *more: str):
    arguments = {
        "check": [runs, "--history", str(history)],
        "compare": [runs, str(one)],
        "report": [runs, "--no-charts"],
    }
    return CliRunner().invoke(main, [what, *arguments[what], *more])


class Broken:
    """A sweep that ends with an error of ours before its last cell."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def run(self, _: object) -> None:
        raise MokbenchError("the ranks are gone")


def test_a_run_that_an_error_ends_is_aborted_and_may_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, out = write_config(tmp_path), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "Sweep", Broken)
        done = CliRunner().invoke(main, ["run", str(config), "--out", str(out), "--quiet"])
    assert done.exit_code == 3, done.output
    meta = RunFolder.open(out).meta
    assert (meta.status, meta.rows) == ("aborted", 0)
    with RunFolder.resume(out, meta.machine) as again:
        assert (again.meta.status, again.meta.rows) == ("running", None)


@pytest.mark.parametrize("status", ["aborted", "interrupted"])
@pytest.mark.parametrize("what", ["check", "compare"])
def test_an_aborted_run_is_refused(history: Path, tmp_path: Path, what: str, status: str) -> None:
    runs = launches(tmp_path, "slow", 3, start=20, factors=SLOW)
    change_meta(runs[1].path, status=status)
    done = judge(what, str(tmp_path / "slow-*"), runs[0].path, history)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert f"{runs[1].path}: was {status}; finish it (mokbench run --resume" in done.stderr
    if what == "compare":
        forced = judge(what, str(tmp_path / "slow-*"), runs[0].path, history, "--force")
        assert forced.exit_code == 0
        assert f"warning: {runs[1].path}: was {status}" in forced.stderr


def test_a_run_that_failed_to_its_end_is_judged(history: Path, tmp_path: Path) -> None:
    runs = []
    for i in range(3):
        rows = [cell("mok", 900.0), cell("push", 1000.0)]
        failed = fake_record(system="alltoall", status="failed", reason="it broke", fabric="cuda")
        runs.append(write_launch(tmp_path / f"run-{i}", [*rows, failed], 20 + i))
        change_meta(runs[-1].path, status="failed")
    opened = [RunFolder.open(run.path) for run in runs]
    assert verdicts(check(opened, history))["alltoall"] == "FAILED"
    # As an older mokbench left it: it did not count rows, and said the same of an aborted run.
    for run in runs:
        change_meta(run.path, rows=None, record_version=3)
    opened = [RunFolder.open(run.path) for run in runs]
    assert verdicts(check(opened, history))["alltoall"] == "FAILED"


def test_a_failed_run_of_an_older_mokbench_without_a_failed_row_was_aborted(
    history: Path, tmp_path: Path
) -> None:
    runs = launches(tmp_path, "slow", 3, start=20, factors=SLOW)
    change_meta(runs[1].path, status="failed", rows=None, record_version=3)
    done = gate(tmp_path / "slow-*", "--history", history)
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"{runs[1].path}: was aborted" in done.stderr


@pytest.mark.parametrize("what", ["check", "compare", "report"])
def test_a_run_that_lost_whole_rows_is_refused(history: Path, tmp_path: Path, what: str) -> None:
    runs = launches(tmp_path, "slow", 3, start=20, factors=SLOW)
    path = runs[1].path / "records.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for left in (lines[:2], lines + lines[:1]):
        path.write_bytes(b"".join(left))
        done = judge(what, str(tmp_path / "slow-[12]"), runs[0].path, history)
        assert (done.exit_code, done.stdout) == (2, ""), done.output
        assert f"{path}: has {len(left)} rows, but the run ended with 3" in done.stderr
    # An older mokbench stored no number, and its runs are judged by what they have.
    change_meta(runs[1].path, rows=None, record_version=2)
    path.write_bytes(b"".join(lines[:2]))
    assert judge(what, str(tmp_path / "slow-[12]"), runs[0].path, history).exit_code != 2
