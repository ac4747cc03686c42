"""More suspects than a confirmation takes: those left out are neither confirmed nor cleared."""

from pathlib import Path

import numpy as np
import pytest
from launches import cell, h200, write_launch

from mokbench.regression import confirm
from mokbench.regression.check import check, record
from mokbench.regression.confirm import Confirmation
from mokbench.regression.history import History, folder_of
from mokbench.regression.launch import Launch
from mokbench.regression.output import headline
from mokbench.results import RunFolder

CELLS = 60


def launch(path: Path, hour: int, factor: float = 1.0, count: int = CELLS) -> RunFolder:
    noise = np.exp(np.random.default_rng(hour).normal(0, 0.004, CELLS))
    rows = [cell(f"s{i}", 1000 * factor * noise[i]) for i in range(count)]
    return write_launch(path, rows, hour)


def test_suspects_beyond_the_limit_keep_their_verdict_and_are_no_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "history"
    for i in range(10):
        record(check([launch(tmp_path / f"base-{i}", i)], root, commit="good"))

    def measure(_plan: Confirmation, ids: list[str]) -> tuple[list[Launch], list[Launch]]:
        assert len(ids) == confirm.MOST_CELLS
        made = [Launch.of(launch(tmp_path / f"again-{i}", 50 + i)) for i in range(6)]
        return made[:3], made[3:]

    monkeypatch.setattr(confirm, "measure", measure)
    monkeypatch.setattr(confirm, "_check", lambda _: None)
    runs = [launch(tmp_path / f"slow-{i}", 20 + i, 1.1) for i in range(3)]
    how = Confirmation(Path("p"), Path("c"), tmp_path / "out", baseline_commit="good")
    checked = record(check(runs, root, confirmation=how))
    left = [one for one in checked.judged if not one.again]
    assert len(left) == CELLS - confirm.MOST_CELLS
    assert all(one.call.verdict == "SLOWER" for one in left)
    assert "not measured again: --confirm takes the worst 50 cells" in left[0].call.why
    assert checked.exit_code(strict=False) == 1
    assert "50 of 60 suspects measured again" in headline(checked)
    flagged = History.read(folder_of(root, h200())).launches[-1].flags["step_time_us"]
    assert set(flagged) == {one.series[0] for one in checked.judged if not one.cleared}
    assert set(flagged) >= {one.series[0] for one in left}
