import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fake_run import fake_record
from launches import CELLS, cell, h200, launches, write_launch
from test_html import Page

from mokbench.cli import main
from mokbench.errors import ResultsError
from mokbench.regression.check import accept, check, record
from mokbench.report import history as history_report


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 launches; from the 16th on push is 6 % slower, called so, and accepted 4 later."""
    folder = tmp_path_factory.mktemp("history")
    history = folder / "history"
    for i in range(16):
        (run,) = launches(folder, f"b{i}", 1, start=i, seed=i)
        record(check([run], history, commit=f"{i:040d}"))
    for start, accepted in ((16, False), (20, True)):
        runs = [
            run
            for i in range(start, start + 4)
            for run in launches(folder, f"s{i}", 1, start=i, seed=i, factors={"push": 1.06})
        ]
        checked = check(runs, history, commit=f"{start:040d}")
        accept(checked, "exact sums, agreed in review") if accepted else record(checked)
    return history


def show(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def test_the_table_puts_the_slower_series_first(root: Path) -> None:
    done = show("--history", root)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    (title,) = [line for line in lines if "launches, 2026-01-01" in line]
    assert title.startswith("1 x NVIDIA H200, driver 580.1, torch 2.11.0, key")
    series = [line for line in lines if line.startswith("tiny.")]
    assert "tiny.push." in series[0]
    for word in ("SLOWER", "exact sums, agreed in review", "0000000000..0000000000"):
        assert word in series[0]
    assert len(series) == len(CELLS)


def test_change_points_levels_and_verdicts_are_in_the_json(root: Path) -> None:
    (machine,) = json.loads(show("--history", root, "--format", "json").stdout)
    push = next(one for one in machine["series"] if ".push." in one["series"][0])
    (change,) = push["changes"]
    assert change["at"] == 16
    assert change["ratio"] == pytest.approx(1.06, abs=0.015)
    assert change["commits"] == f"{15:040d}"[:10] + ".." + f"{16:040d}"[:10]
    assert push["levels"] == pytest.approx([1000, 1060], rel=0.01)
    assert push["verdicts"] == [""] * 16 + ["SLOWER"] * 8
    assert push["accepted"] == [{"at": 20, "reason": "exact sums, agreed in review"}]
    others = [one for one in machine["series"] if one is not push]
    assert all(one["changes"] == [] and not any(one["verdicts"]) for one in others)


def test_the_charts_show_points_levels_changes_and_reasons(root: Path, tmp_path: Path) -> None:
    from mokbench.report.charts.history import figures

    (machine,) = history_report.read(root)
    ((stem, figure),) = figures(machine.trends, machine.title)
    assert stem == "history-1"
    panel = figure.axes[0]
    points, *marked = [line for line in panel.lines if line.get_linestyle() == "None"]
    assert list(points.get_ydata()) == list(machine.trends[0].values)
    assert [len(line.get_xdata()) for line in marked] == [8, 0, 0, 1]
    dashed = [line for line in panel.lines if line.get_linestyle() == "--"]
    assert [line.get_xdata()[0] for line in dashed] == [15.5]
    words = " ".join(text.get_text() for text in figure.texts).replace("\n", " ")
    assert "exact sums, agreed in review" in words
    done = show("--history", root, "--charts", tmp_path / "charts")
    assert "(2 files)" in done.stderr
    assert {path.suffix for path in (tmp_path / "charts").iterdir()} == {".png", ".svg"}


def test_the_page_is_one_file_with_everything(root: Path) -> None:
    done = show("--history", root, "--format", "html")
    found = Page(done.stdout)
    assert found.fetched == []
    assert len(set(found.ids)) == len(found.ids)
    assert "3 series, 1 of them with a change of level; 1 whose last launch" in found.text
    assert "exact sums, agreed in review" in found.text


def test_marks_of_shared_gpus_are_in_table_and_chart(tmp_path: Path) -> None:
    from mokbench.report.charts.history import figures

    for i in range(4):
        shared = cell("push", 100.0 + i, ranks_per_gpu=4, link="hbm")
        run = write_launch(tmp_path / f"r{i}", [shared], i)
        record(check([run], tmp_path / "history"))
    (machine,) = history_report.read(tmp_path / "history")
    assert "ratios do not predict NVLink" in history_report.markdown([machine])
    ((_, figure),) = figures(machine.trends, machine.title)
    assert any("predict NVLink" in text.get_text() for text in figure.texts)


def test_another_cell_under_an_old_id_begins_anew(tmp_path: Path) -> None:
    for i, digest in enumerate(["all-old"] * 5 + ["all-new"] * 2):
        run = write_launch(tmp_path / f"r{i}", [cell("push", 100.0, cell_digest=digest)], i)
        record(check([run], tmp_path / "history"))
    (machine,) = history_report.read(tmp_path / "history")
    assert [len(trend.values) for trend in machine.trends] == [2]


def test_two_machines_are_two_parts(tmp_path: Path) -> None:
    for driver in ("1", "2"):
        (run,) = launches(tmp_path, driver, 1, machine=h200(driver=driver))
        record(check([run], tmp_path / "history"))
    machines = history_report.read(tmp_path / "history")
    assert len(machines) == 2
    done = show("--history", tmp_path / "history", "--format", "markdown")
    assert done.stdout.count("\n### 1 x NVIDIA H200") == 2
    one = show("--history", machines[0].history.folder)
    assert one.exit_code == 0


def test_what_is_no_history_is_said(tmp_path: Path, root: Path) -> None:
    with pytest.raises(ResultsError, match="mokbench check RUNS --history DIR --record starts"):
        history_report.read(tmp_path)
    for arguments in ([], [tmp_path, "--history", root]):
        done = show(*arguments)
        assert done.exit_code == 2
        assert "name run folders, or a history" in done.stderr


def test_a_history_without_a_value_says_so(tmp_path: Path) -> None:
    failed = fake_record(system="push", status="failed", reason="rank 1 died", fabric="cuda")
    record(check([write_launch(tmp_path / "one", [failed], 0)], tmp_path / "history"))
    for form in ("table", "markdown", "html"):
        done = show("--history", tmp_path / "history", "--format", form)
        assert done.exit_code == 0, repr(done.exception)
        assert "No launch has a value." in done.stdout
