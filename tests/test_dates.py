"""When a run was made is a date with a zone, and not one that is still to come."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner
from launches import SLOW, gate, h200, launches

from mokbench.cli import main
from mokbench.moment import now, read
from mokbench.regression.check import accept, check
from mokbench.regression.history import folder_of


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is no date and time"),
        ("yesterday", "'yesterday' is no date and time"),
        ("2026-02-30T00:00:00Z", "'2026-02-30T00:00:00Z' is no date and time"),
        ("x" * 100_000, "is no date and time"),
        ("2026-01-02", "'2026-01-02' has no zone"),
        ("2026-01-02T03:04:05", "'2026-01-02T03:04:05' has no zone"),
    ],
)
def test_what_is_no_date_with_a_zone_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(text)


def test_dates_of_all_zones_have_an_order() -> None:
    earlier, later = read("0001-01-01T00:00:00+14:00"), read("9999-12-31T23:59:59-14:00")
    assert earlier < read("2026-01-02T03:04:05Z") < read(now()) < later
    assert read("2026-01-02T03:04:05+01:00") == datetime(2026, 1, 2, 2, 4, 5, tzinfo=UTC)


def redate(run: Path, created: object) -> None:
    file = run / "run.json"
    meta = json.loads(file.read_text(encoding="utf-8")) | {"created": created}
    file.write_text(json.dumps(meta), encoding="utf-8")


def refused(*arguments: str | Path) -> str:
    done = CliRunner().invoke(main, [*map(str, arguments)])
    assert (done.exit_code, done.stdout) == (2, ""), repr(done.exception)
    return done.stderr


@pytest.mark.parametrize("created", ["", "garbage", "2026-01-01T20:00:00", 20260101])
@pytest.mark.parametrize("name", ["created", "finished"])
def test_a_run_of_no_date_is_refused_by_all_that_read_it(
    history: Path, tmp_path: Path, created: object, name: str
) -> None:
    launches(tmp_path, "slow", 3, start=20, factors=SLOW)
    file = tmp_path / "slow-1" / "run.json"
    meta = json.loads(file.read_text(encoding="utf-8")) | {name: created}
    file.write_text(json.dumps(meta), encoding="utf-8")
    runs = tmp_path / "slow-*"
    for arguments in (
        ["check", runs, "--history", history],
        ["compare", tmp_path / "slow-0", runs],
        ["report", runs, "--no-charts"],
    ):
        assert f"{file}: not a run description: {name}: " in refused(*arguments)


@pytest.mark.parametrize("options", [[], ["--record"], ["--accept", "agreed"]])
def test_a_run_that_is_dated_in_the_future_is_neither_judged_nor_taken_in(
    history: Path, tmp_path: Path, options: list[str]
) -> None:
    folder = folder_of(history, h200())
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    launches(tmp_path, "slow", 3, start=20, factors=SLOW)
    in_two_days = (datetime.now(UTC) + timedelta(days=2)).isoformat()
    for created in ("9999-12-31T23:59:59-14:00", in_two_days):
        redate(tmp_path / "slow-1", created)
        said = refused("check", tmp_path / "slow-*", "--history", history, *options)
        assert f"slow-1/run.json: was created at {created}, more than a day after now" in said
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_clock_that_is_hours_ahead_is_let_be(history: Path, tmp_path: Path) -> None:
    launches(tmp_path, "slow", 3, start=20, factors=SLOW)
    redate(tmp_path / "slow-1", (datetime.now(UTC) + timedelta(hours=23)).isoformat())
    assert gate(tmp_path / "slow-*", "--history", history, "--record").exit_code == 1


@pytest.mark.parametrize(
    ("file", "name"), [("launches.jsonl", "created"), ("levels.jsonl", "when")]
)
def test_a_line_of_a_history_of_no_date_is_refused(
    history: Path, tmp_path: Path, file: str, name: str
) -> None:
    accept(check(launches(tmp_path, "fast", 5, start=20, factors={"push": 0.9}), history), "agreed")
    path = folder_of(history, h200()) / file
    *rest, last = path.read_text(encoding="utf-8").splitlines()
    changed = json.dumps(json.loads(last) | {name: "2026-01-01"}, separators=(",", ":"))
    path.write_text("".join(f"{line}\n" for line in [*rest, changed]), encoding="utf-8")
    launches(tmp_path, "slow", 3, start=40)
    said = refused("check", tmp_path / "slow-*", "--history", history)
    where = f"{path}:{len(rest) + 1}: not a line of a history: {name}: "
    assert said.startswith(f"{where}Value error, '2026-01-01' has no zone")
