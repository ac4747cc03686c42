"""A row that stands twice does not stand for one that is lost; one that failed may come again."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_run import fake_record
from launches import CELLS, SLOW, cell, gate, h200, launches, verdicts

from mokbench.cli import main
from mokbench.regression.check import check
from mokbench.results import RunFolder


def lines_of(run: RunFolder) -> list[bytes]:
    return (run.path / "records.jsonl").read_bytes().splitlines(keepends=True)


def next_attempt(line: bytes) -> bytes:
    changed = line.replace(b'"attempt":1', b'"attempt":2')
    assert changed != line
    return changed


@pytest.mark.parametrize("again", [bytes, next_attempt], ids=["copy", "next attempt"])
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("what", ["check", "compare", "report"])
def test_a_copy_of_a_row_does_not_stand_for_one_that_is_lost(
    history: Path, tmp_path: Path, what: str, counted: bool, again
) -> None:
    runs = launches(tmp_path, "slow", 3, start=20, factors=SLOW)
    path = runs[1].path / "records.jsonl"
    first, slow, _ = lines_of(runs[1])
    assert b"push" in slow
    path.write_bytes(first + again(first) * 2)
    if not counted:
        meta = runs[1].path / "run.json"
        meta.write_text(meta.read_text(encoding="utf-8").replace('"rows": 3', '"rows": null'))
    arguments = {
        "check": ["--history", str(history)],
        "compare": [str(runs[0].path)],
        "report": ["--no-charts"],
    }
    done = CliRunner().invoke(main, [what, str(tmp_path / "slow-*"), *arguments[what]])
    assert (done.exit_code, done.stdout) == (2, ""), repr(done.exception)
    assert f"{path}: tiny.mok." in done.stderr
    assert "beside attempt 1, which is ok; only failed rows are measured again" in done.stderr


def failed_first(folder: Path, hour: int) -> RunFolder:
    """A run whose row of push failed, and that was resumed and measured it."""
    (run,) = launches(folder, f"run-{hour}", 1, start=hour)
    path, meta = run.path, run.meta
    (path / "records.jsonl").unlink()
    with RunFolder.resume(path, meta.machine) as first:
        for system, value in CELLS.items():
            lost = {"status": "failed", "reason": "rank 2 was killed"}
            first.append(
                fake_record(system=system, fabric="cuda", **lost)
                if system == "push"
                else cell(system, value)
            )
        first.finish("failed")
    with RunFolder.resume(path, h200()) as again:
        again.append(cell("push", CELLS["push"] * 1.05))
        again.finish("done")
    return RunFolder.open(path)


def test_a_row_that_failed_and_was_measured_again_is_judged(history: Path, tmp_path: Path) -> None:
    runs = [failed_first(tmp_path, hour) for hour in (20, 21, 22)]
    assert runs[0].meta.rows == 4
    assert [(r.system, r.status, r.attempt) for r in runs[0].records()] == [
        ("mok", "ok", 1),
        ("push", "ok", 2),
        ("alltoall", "ok", 1),
    ]
    assert verdicts(check(runs, history)) == {"push": "SLOWER", "mok": "SAME", "alltoall": "SAME"}


def test_an_attempt_does_not_stand_for_another_that_is_lost(history: Path, tmp_path: Path) -> None:
    runs = [failed_first(tmp_path, hour) for hour in (20, 21, 22)]
    mok, failed, alltoall, measured = lines_of(runs[1])
    path = runs[1].path / "records.jsonl"
    for left, twice in (
        ([mok, failed, failed, measured], "tiny.push"),
        ([mok, measured, alltoall, measured], "tiny.push"),
        ([mok, failed, alltoall, alltoall], "tiny.alltoall"),
        ([mok, failed, measured, next_attempt(mok)], "tiny.mok"),
    ):
        path.write_bytes(b"".join(left))
        done = gate(*(run.path for run in runs), "--history", history)
        assert (done.exit_code, done.stdout) == (2, "")
        assert f"{path}: {twice}." in done.stderr
    # The measured attempt alone: one line less than the run ended with.
    path.write_bytes(mok + alltoall + measured)
    done = gate(*(run.path for run in runs), "--history", history)
    assert "has 3 rows, but the run ended with 4" in done.stderr
