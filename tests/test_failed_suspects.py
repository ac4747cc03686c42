"""A cell that failed in a candidate fails the build, whatever is found out about the others."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from launches import CELLS, cell, write_launch
from test_check_failing import SHARED, candidates, ended

from mokbench.regression import confirm
from mokbench.regression.check import accept, check, record
from mokbench.regression.confirm import Confirmation
from mokbench.results import RunFolder


def runs_of(folder: Path, push: Sequence[float | None], start: int = 20) -> list[RunFolder]:
    """Launches of which each has push at that time, or a push that failed."""
    rows = [cell("push", x, sm_clock_mhz=1500.0) if x else ended("failed") for x in push]
    candidates(folder, rows, start)
    return [RunFolder.open(folder / f"c{start}-{i}") for i in range(len(push))]


def confirmed_at(monkeypatch: pytest.MonkeyPatch, folder: Path, **candidate: object):
    """A confirmation whose runs measure push at the base's time, the candidate as told."""
    count = [0]

    def run(_python: Path, side: str, _config: Path, _ids: Sequence[str], out: Path) -> None:
        count[0] += 1
        told = {"value": CELLS["push"] + count[0], **candidate}
        own = told if side == "candidate" else {**told, "value": CELLS["push"] + count[0]}
        write_launch(out, [cell("push", **own)], 200 + count[0])

    monkeypatch.setattr(confirm, "_run", run)
    monkeypatch.setattr(confirm, "_check", lambda _: None)
    return Confirmation(Path("/base"), folder / "one.yaml", folder / "again", baseline_commit="ok")


@pytest.mark.parametrize("push", [[None, 1060.0, 1062.0], [None, 1060.0, 1061.0, 1062.0]])
def test_a_confirmation_does_not_undo_a_failure(
    history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, push: list[float | None]
) -> None:
    runs = runs_of(tmp_path, push)
    checked = check(runs, history, confirmation=confirmed_at(monkeypatch, tmp_path))
    (one,) = [one for one in checked.judged if ".push." in one.series[0]]
    assert (one.call.verdict, one.again, one.cleared) == ("FAILED", True, False)
    assert one.call.why.startswith(f"not confirmed, no base yet: failed in 1 of {len(push)}")
    assert checked.exit_code(strict=False) == 3


def test_one_that_is_confirmed_is_slower_and_says_that_it_failed(
    history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = runs_of(tmp_path, [None, 1060.0, 1061.0, 1062.0])
    plan = confirmed_at(monkeypatch, tmp_path, value=1060.0)
    checked = check(runs, history, confirmation=plan)
    assert checked.judged[0].call.verdict == "SLOWER"
    assert checked.judged[0].call.why.startswith("failed in 1 of 4 candidates; the others: +")
    assert checked.exit_code(strict=False) == 1


def test_a_row_that_never_gates_stays_failed_when_it_is_slower_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(8):
        run = write_launch(tmp_path / f"b{i}", [cell("push", 1000.0 + i, **SHARED)], i)
        record(check([run], tmp_path / "history"))
    rows = [ended("failed", **SHARED), *(cell("push", 1060.0 + i, **SHARED) for i in range(3))]
    runs = [write_launch(tmp_path / f"c{i}", [row], 20 + i) for i, row in enumerate(rows)]
    plan = confirmed_at(monkeypatch, tmp_path, **(SHARED | {"value": 1060.0}))
    checked = check(runs, tmp_path / "history", confirmation=plan)
    assert (checked.judged[0].call.verdict, checked.exit_code(strict=False)) == ("FAILED", 3)


def test_accepting_what_is_slower_does_not_accept_its_failure(
    history: Path, tmp_path: Path
) -> None:
    checked = check(runs_of(tmp_path, [None, 1060.0, 1061.0, 1062.0]), history)
    assert checked.exit_code(strict=False) == 1
    assert accept(checked, "exact sums").exit_code(strict=False) == 3
