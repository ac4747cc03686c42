"""Speed-up, link, roofline and timeline charts: what they draw is what the rows say."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fake_run import CUDA, fake_meta, fake_run, row, stored
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure

from mokbench.report.charts import link, roofline, speedup, timeline
from mokbench.report.rows import gather
from mokbench.results import RunFolder

TURN = {"turn": "t", **CUDA}


def words(figure: Figure) -> str:
    return " ".join(" ".join(text.get_text() for text in figure.texts).split())


def only(figures) -> Figure:
    ((_, figure),) = figures
    return figure


def test_the_heat_map_shows_ratios_and_marks_what_is_not_shown(tmp_path: Path) -> None:
    rows = []
    for count, ratio in ((16, 2.0), (128, 1.0)):
        blocks = [100.0, 101.0, 99.0] * 3
        rows.append(row("mok", 100.0, tokens_per_rank=count, block_us=blocks, **TURN))
        other = [ratio * us for us in ([101.0, 99.0, 100.0] * 3)]
        rows.append(row("push", 100 * ratio, tokens_per_rank=count, block_us=other, **TURN))
        rows.append(row("deepep", 150.0, tokens_per_rank=count, **CUDA))
    figure = only(speedup.figures(gather([stored(tmp_path, rows)])))
    push, deepep = figure.axes
    assert push.get_title() == "push over it"
    (mesh,) = (found for found in push.collections if isinstance(found, QuadMesh))
    assert np.asarray(mesh.get_array()).ravel() == pytest.approx([1.0, 0.0], abs=0.02)
    assert [text.get_text() for text in push.texts] == ["2.02", "1.01?"]
    assert [text.get_text() for text in deepep.texts] == ["~1.50", "~1.50"]
    assert [tick.get_text() for tick in push.get_xticklabels()] == ["16", "128"]
    assert "above 1 (purple), mok takes less time" in words(figure)


def test_without_mok_the_heat_map_is_of_push(tmp_path: Path) -> None:
    rows = [row("alltoall", 300.0, **CUDA), row("push", 100.0, **CUDA)]
    figure = only(speedup.figures(gather([stored(tmp_path / "a", rows)])))
    assert words(figure).startswith("Speed-up of push over")
    alone = [row("push", 100.0, **CUDA)]
    assert list(speedup.figures(gather([stored(tmp_path / "b", alone)]))) == []


def test_link_use_has_useful_filled_and_wire_hollow_against_the_peak(tmp_path: Path) -> None:
    rows = [
        row("mok", 1.0, link_utilization=0.4, wire_utilization=0.6, **CUDA),
        row("push", 1.0, link_utilization=0.3, **CUDA),
        row("local", 1.0, **CUDA),
    ]
    figure = only(link.figures(gather([stored(tmp_path, rows)])))
    (panel,) = figure.axes
    drawn = [
        (float(line.get_ydata()[0]), line.get_markerfacecolor() != "white")
        for line in panel.lines
        if len(line.get_ydata()) == 1
    ]
    assert drawn == [(0.4, True), (0.6, False), (0.3, True)]
    (peak,) = (line for line in panel.lines if line.get_linestyle() == "--")
    assert list(peak.get_ydata()) == [1.0, 1.0]
    assert panel.get_ylim()[0] == 0
    none = [row("push", 1.0, fabric="cuda", link="hbm", ranks_per_gpu=2)]
    assert list(link.figures(gather([stored(tmp_path / "none", none)]))) == []


def test_the_roofline_chart_goes_from_zero_and_shows_every_ratio(tmp_path: Path) -> None:
    rows = [
        row("push", 1.0, roofline_ratio=value, tokens_per_rank=count, **CUDA)
        for count, value in ((1, 3.0), (64, 1.5))
    ]
    figure = only(roofline.figures(gather([stored(tmp_path, rows)])))
    (panel,) = figure.axes
    assert list(panel.lines[0].get_ydata()) == [3.0, 1.5]
    assert panel.get_ylim()[0] == 0


def samples(durations: list[list[float]]) -> pd.DataFrame:
    """``durations[iteration][rank]`` in one block; a last iteration that was thrown away."""
    lines = [
        {"block": 0, "iteration": i, "rank": rank, "duration_us": us, "accepted": True}
        for i, by_rank in enumerate(durations)
        for rank, us in enumerate(by_rank)
    ]
    bad = {"block": 0, "iteration": 99, "rank": 0, "duration_us": 1e6, "accepted": False}
    frame = pd.DataFrame([*lines, bad])
    return frame.assign(start_us=0.0, sm_clock_mhz=np.nan)


def test_the_timeline_is_the_pass_of_median_length(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", fake_meta())
    run.append(
        row("push", 20.0, ranks=2, rank_spread_us=10.0, **CUDA),
        samples([[10.0, 11.0], [20.0, 12.0], [13.0, 90.0]]),
    )
    run.finish("done")
    run = RunFolder.open(tmp_path / "run")
    figure = only(timeline.figures(gather([run]), [run]))
    (panel,) = figure.axes
    assert [bar.get_width() for bar in panel.patches] == [20.0, 12.0]
    assert "8.00 us apart" in panel.get_title()
    assert [tick.get_text() for tick in panel.get_yticklabels()] == ["rank 0", "rank 1"]


def test_a_lost_samples_file_leaves_only_its_panel_out(tmp_path: Path) -> None:
    run = fake_run(
        tmp_path / "run",
        tokens=(16,),
        routings=("balanced",),
        regimes=("isolated",),
        keep_samples=True,
    )
    (gone,) = (r for r in run.records() if r.system == "push")
    (run.path / str(gone.samples_file)).unlink()
    figure = only(timeline.figures(gather([run]), [run]))
    assert [panel.get_title().split("\n")[0] for panel in figure.axes] == ["mok", "alltoall"]


def test_a_report_of_thousands_of_rows_draws_few_figures(tmp_path: Path) -> None:
    from launches import write_launch

    rows = [
        row("push", 1.0, roofline_ratio=1.0, model=f"m{i % 6}", routing=f"r{i}", **CUDA)
        for i in range(2100)
    ]
    large = gather([write_launch(tmp_path / "large", rows, 0)])
    drawn = list(roofline.figures(large))
    assert len(drawn) == 1
    assert "5 more charts of this kind not drawn." in words(drawn[0][1])
    small = gather([write_launch(tmp_path / "small", rows[:60], 0)])
    assert len(list(roofline.figures(small))) == 6
