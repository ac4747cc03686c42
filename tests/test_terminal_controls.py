"""Text of others in a terminal: control characters are seen, and do nothing."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from launches import CELLS, cell, gate, launches, write_launch
from runs import mokbench

from mokbench.cli import main
from mokbench.regression.check import accept, check

WILD = "\x1b[31mred\x07\x1b]0;title\x07\x9b"
SHOWN = "\u241b[31mred\u2407\u241b]0;title\u2407\ufffd"


def shown(*arguments: str | Path) -> str:
    done = CliRunner().invoke(main, [*map(str, arguments)])
    assert done.exit_code in (0, 3), done.output
    assert not set("\x1b\x07\x9b") & set(done.stdout)
    return done.stdout


def test_reasons_and_notes_of_a_report(tmp_path: Path) -> None:
    rows = [cell(system, value, notes=[WILD]) for system, value in CELLS.items()]
    failed = {"id": "f", "status": "failed", "reason": WILD, "step_time_us": None}
    run = write_launch(tmp_path / "x", [*rows, rows[0].model_copy(update=failed)], 1)
    assert SHOWN in shown("report", run.path, "--no-charts")


def test_cells_and_headline_of_check_and_compare(history: Path, tmp_path: Path) -> None:
    runs = launches(tmp_path, "some", 3, start=20, seed=2)
    for run in runs:
        path = run.path / "records.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines[0]["id"] = "c\x9b2J"  # an id may have no ESC, but C1 is a CSI too
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (other,) = launches(tmp_path, "other", 1, start=30)
    checked = gate(tmp_path / "some-*", "--history", history, "--commit", WILD)
    assert f"..{SHOWN}" in checked.stdout
    for said in (
        checked.stdout,
        shown("compare", runs[0].path, runs[1].path),
        shown("compare", other.path, runs[1].path),
    ):
        assert "c\ufffd2J" in said
        assert not set("\x1b\x07\x9b") & set(said)


@pytest.mark.parametrize("format_", ["table", "markdown"])
def test_the_reason_of_a_level(history: Path, tmp_path: Path, format_: str) -> None:
    fast = launches(tmp_path, "fast", 5, start=20, factors={"push": 0.9}, seed=3)
    accept(check(fast, history), WILD)
    said = shown("report", "--history", history, "--format", format_)
    assert "\u241b" in said


def test_errors_and_warnings(ten: Path, tmp_path: Path) -> None:
    """As a process: the test runner of click takes colours away by itself."""
    (run,) = launches(tmp_path, "one", 1)
    meta = json.loads((run.path / "run.json").read_text()) | {"status": WILD}
    (run.path / "run.json").write_text(json.dumps(meta))
    (tmp_path / f"two{WILD}").mkdir()
    for arguments in (("report", run.path), ("report", tmp_path / "*", "--no-charts")):
        done = mokbench(*arguments)
        assert done.returncode == 2
        assert not set("\x1b\x07\x9b") & set(done.stderr), repr(done.stderr)
    assert f"two{SHOWN}: passed over" in done.stderr
