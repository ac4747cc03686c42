import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_run import CUDA, fake_machine, fake_record, fake_run, row, stored
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

from mokbench.errors import ResultsError
from mokbench.report import charts, wording
from mokbench.report.charts import imbalance, signaling, step_time
from mokbench.report.charts.style import system_look, wrap
from mokbench.report.rows import gather
from mokbench.results import RunFolder


def figures(module: Any, run: RunFolder) -> list[tuple[str, Figure]]:
    found: Iterator[tuple[str, Figure]] = module.figures(gather([run]))
    return list(found)


def words(figure: Figure) -> str:
    """Title and notes, with the breaks of their lines undone."""
    return " ".join(" ".join(text.get_text() for text in figure.texts).split())


def labels(figure: Figure) -> list[str]:
    return figure.axes[0].get_legend_handles_labels()[1]


def test_every_chart_is_written_as_png_and_svg(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", tokens=(16,), regimes=("isolated",))
    paths = charts.write([run], tmp_path / "charts")
    assert [path.name for path in paths] == [
        f"{stem}.{kind}"
        for stem in ("step_time-tiny-r4-bf16-isolated", "signaling-host-shm", "imbalance-tiny-r4")
        for kind in ("png", "svg")
    ]
    assert sorted(path.name for path in (tmp_path / "charts").iterdir()) == sorted(
        path.name for path in paths
    )
    for path in paths:
        if path.suffix == ".png":
            width, height = Image.open(path).size
            assert 600 < width < 3000
            assert 300 < height < 3000
        else:
            text = "".join(ElementTree.parse(path).getroot().itertext())
            assert any(unit in text for unit in ("(us)", "routed rows"))


def test_charts_are_the_same_bytes_each_time(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", tokens=(16,), regimes=("isolated",))
    first = [path.read_bytes() for path in charts.write([run], tmp_path / "a")]
    second = [path.read_bytes() for path in charts.write([run], tmp_path / "b")]
    assert first == second


def test_step_time_shows_the_stored_medians_and_intervals(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", tokens=(16,), regimes=("isolated",), routings=("balanced",))
    ((_, figure),) = figures(step_time, run)
    (panel,) = figure.axes
    mok, push, _ = run.records()
    drawn: dict[str, Any] = {str(bar.get_label()): bar for bar in panel.containers}
    for record in (mok, push):
        assert record.step_time_us is not None
        line, _, (interval,) = drawn[record.system].lines
        assert line.get_ydata()[0] == record.step_time_us.median
        (low, high) = (point[1] for point in interval.get_segments()[0])
        assert (low, high) == pytest.approx(
            (record.step_time_us.ci_low, record.step_time_us.ci_high)
        )
    assert panel.get_ylabel() == "step time (us)"
    assert panel.get_ylim()[0] == 0
    expert = mok.imbalance.expert_max_over_mean if mok.imbalance else None
    assert panel.get_xticklabels()[0].get_text() == f"balanced\nexpert {expert:.2f}\nrank 1.00"


def test_the_host_draws_mok_and_push_only_and_says_so(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", tokens=(16,), regimes=("isolated",))
    ((_, figure),) = figures(step_time, run)
    assert labels(figure) == ["mok", "push"]
    said = words(figure)
    assert wording.HOST in said
    assert "Oversubscribed host: 4 ranks on 2 cores." in said
    assert "Not drawn, since only mok and push compare: alltoall." in said


def test_a_shared_gpu_is_said_in_its_charts(tmp_path: Path) -> None:
    changes = {"fabric": "cuda", "link": "hbm", "ranks_per_gpu": 4}
    run = fake_run(
        tmp_path / "run", tokens=(16,), regimes=("isolated",), changes=changes, signals=()
    )
    ((_, figure),) = figures(step_time, run)
    assert "Ranks share one GPU; ratios do not predict NVLink." in words(figure)
    assert labels(figure) == ["mok", "push", "alltoall"]


def test_many_cells_are_limited_and_what_is_left_out_is_said(tmp_path: Path) -> None:
    rows = [
        row("mok", 10.0, tokens_per_rank=count, routing=f"zipf-{s}", **CUDA)
        for count in range(1, 11)
        for s in range(12)
    ]
    ((_, figure),) = figures(step_time, stored(tmp_path, rows))
    assert len(figure.axes) == step_time.MAX_PANELS
    assert [panel.get_title() for panel in figure.axes][:: step_time.MAX_PANELS - 1] == [
        "1 token/rank",
        "10 tokens/rank",
    ]
    assert len(figure.axes[0].get_xticklabels()) == step_time.MAX_ROUTINGS
    assert "4 of 12 routings left out." in words(figure)
    assert "4 of 10 token counts left out." in words(figure)


def test_many_shapes_are_limited_and_counted(tmp_path: Path) -> None:
    rows = [row("mok", 10.0, model=f"m{i}", expert_counts=[1, 2]) for i in range(15)]
    run = stored(tmp_path, rows)
    found = figures(step_time, run)
    assert len(found) == step_time.MAX_FIGURES
    assert "3 more shapes and regimes have no chart." in words(found[0][1])
    assert "7 more shapes have no chart." in words(figures(imbalance, run)[0][1])


def test_routings_go_from_even_to_uneven_and_wide_ranges_by_decades(tmp_path: Path) -> None:
    skew = {"rank_max_over_mean": 1.0, "pair_max_over_mean": 1.0, "cv": 0, "gini": 0}
    rows = [
        row(
            "mok",
            value,
            routing=name,
            imbalance={**skew, "expert_max_over_mean": worst, "empty_experts": 0},
        )
        for name, value, worst in (("b", 5.0, 9.0), ("balanced", 50.0, 1.5), ("a", 500.0, 2.0))
    ]
    ((_, figure),) = figures(step_time, stored(tmp_path, rows))
    ticks = [tick.get_text().split("\n")[0] for tick in figure.axes[0].get_xticklabels()]
    assert ticks == ["balanced", "a", "b"]
    assert figure.axes[0].get_yscale() == "log"


def test_signaling_draws_a_fit_only_over_one_kind_of_points(tmp_path: Path) -> None:
    few = fake_run(tmp_path / "few", tokens=(16,), signals=(2, 3, 4))
    ((_, figure),) = figures(signaling, few)
    assert "No fit: it needs 3 rank counts" in words(figure)
    assert "Hollow: oversubscribed, more threads than the 2 cores" in words(figure)
    assert wording.HOST in words(figure)
    assert not any(" N" in label for label in labels(figure))
    machine = fake_machine(cores=64, usable_cores=64)
    many = fake_run(tmp_path / "many", tokens=(16,), signals=(2, 4, 8), machine=machine)
    ((_, figure),) = figures(signaling, many)
    (label,) = [text for text in labels(figure) if text.startswith("ready, push")]
    alpha, beta = (float(part.split()[0]) for part in label.split(": ")[1].split(" + "))
    assert alpha == pytest.approx(1.8 * 1.1, rel=0.15)  # the fake's line, times its noise
    assert beta == pytest.approx(0.6 * 1.1, rel=0.15)
    assert "dotted where only the fit goes on" in words(figure)
    panel = figure.axes[0]
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("ranks N", "latency (us)")


def test_imbalance_draws_the_stored_counts_by_rank(tmp_path: Path) -> None:
    rows = [
        row("mok", 1.0, ranks=2, experts=4, expert_counts=[4, 0, 3, 1]),
        row("mok", 1.0, ranks=2, experts=4, expert_counts=[9, 9, 9, 9], tokens_per_rank=1),
    ]
    ((_, figure),) = figures(imbalance, stored(tmp_path, rows))
    (panel,) = figure.axes
    bars: list[Any] = list(panel.patches)
    assert [bar.get_height() for bar in bars] == [4, 0, 3, 1]
    colours = [to_hex(bar.get_facecolor()) for bar in bars]
    assert colours[0] == colours[1] != colours[2] == colours[3]
    assert panel.get_title() == "balanced: max/mean 2.00, 25 % empty"
    assert "Left out: 1 tokens/rank, same generators." in words(figure)


def test_runs_without_data_draw_nothing(tmp_path: Path) -> None:
    empty = stored(tmp_path / "empty", [])
    assert charts.write([empty], tmp_path / "a") == []
    dead = stored(tmp_path / "dead", [fake_record(status="failed", reason="why")])
    assert charts.write([dead], tmp_path / "b") == []


def test_two_shapes_of_one_name_get_two_files(tmp_path: Path) -> None:
    run = stored(tmp_path / "run", [row("mok", 1.0), row("push", 1.0, hidden=64)])
    names = [path.name for path in charts.write([run], tmp_path / "charts")]
    assert names[::2] == [
        "step_time-tiny-r4-bf16-isolated.png",
        "step_time-tiny-r4-bf16-isolated-2.png",
    ]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    run = stored(tmp_path / "run", [row("mok", 1.0)])
    with pytest.raises(ResultsError, match=r"writing charts failed: .*name a folder"):
        charts.write([run], tmp_path / "file")


def test_systems_differ_in_colour_and_in_marker() -> None:
    looks = [system_look(name) for name in ("mok", "push", "deepep", "alltoall", "local")]
    looks += [system_look("new", place) for place in range(3)]
    assert len({colour for colour, _ in looks}) == len(looks)
    assert len({marker for _, marker in looks}) == len(looks)


def test_wrap() -> None:
    assert wrap("a bb ccc dddd", 5) == ["a bb", "ccc", "dddd"]
    assert wrap("overlong a", 3) == ["overlong", "a"]


def test_the_backend_of_the_user_does_not_matter(tmp_path: Path) -> None:
    fake_run(tmp_path / "run", tokens=(16,), regimes=("isolated",), signals=())
    code = (
        "import sys; from mokbench.report import charts; from mokbench.results import open_runs; "
        "print(len(charts.write(open_runs(sys.argv[1:2]), sys.argv[2])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run"), str(tmp_path / "charts")],
        env={"MPLBACKEND": "module://no_such_backend", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "4", done.stderr
