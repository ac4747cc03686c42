"""A line of a history that has lost values is refused: without them its launch is no base."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fake_run import fake_record
from launches import SLOW, gate, h200, launches, write_launch

from mokbench.cli import main
from mokbench.regression.check import check, record
from mokbench.regression.history import History, folder_of

Line = dict[str, Any]
NO_STEP = "is ok and has no step_time_us"


def no_cells(line: Line) -> Line:
    columns = ("ids", "digests", "status", "marks", "clock_mhz")
    return line | {key: [] for key in columns} | {"values": {}}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda line: line | {"values": {}}, f"isolated: {NO_STEP}"),
        (lambda line: line | {"values": {"min_step_us": [1.0] * 3}}, f"isolated: {NO_STEP}"),
        (lambda line: line | {"values": {"step_time_us": [None] * 3}}, f"isolated: {NO_STEP}"),
        (lambda line: line | {"values": {"step_time_us": [900.0, None, 2500.0]}}, NO_STEP),
        (no_cells, "ids: List should have at least 1 item"),
    ],
)
@pytest.mark.parametrize("command", ["check", "report"])
def test_a_line_without_its_values_is_refused_with_its_number(
    history: Path, tmp_path: Path, command: str, damage: Callable[[Line], Line], said: str
) -> None:
    launches(tmp_path, "slow", 3, start=20, factors=SLOW)
    path = folder_of(history, h200()) / "launches.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[3] = json.dumps(damage(json.loads(lines[3])), separators=(",", ":"))
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    arguments = ["check", str(tmp_path / "slow-*")] if command == "check" else ["report"]
    done = CliRunner().invoke(main, [*arguments, "--history", str(history)])
    assert (done.exit_code, done.stdout) == (2, ""), repr(done.exception)
    assert done.stderr.startswith(f"{path}:4: not a line of a history: ")
    assert said in done.stderr


def test_a_launch_of_failed_cells_alone_has_no_values_and_is_kept(
    history: Path, tmp_path: Path
) -> None:
    failed = fake_record(system="push", status="failed", reason="it broke", fabric="cuda")
    record(check([write_launch(tmp_path / "failed", [failed], 20)], history))
    assert History.read(folder_of(history, h200())).launches[-1].values == {}
    launches(tmp_path, "slow", 3, start=30, factors=SLOW)
    assert gate(tmp_path / "slow-*", "--history", history).exit_code == 1
