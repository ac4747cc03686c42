import itertools
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
from mokbench.report.charts import imbalance, roofline, signaling, step_time
from mokbench.report.charts.style import fold, system_looks, wrap
from mokbench.report.rows import gather
from mokbench.results import RunFolder


def figures(module: Any, run: RunFolder) -> list[tuple[str, Figure]]:
    found: Iterator[tuple[str, Figure]] = module.figures(gather([run]))
    return list(found)


def words(figure: Figure) -> str:
    """Title and notes, with the breaks of their lines undone."""
    return " ".join(" ".join(text.get_text() for text in figure.texts).split())


def drawn_points(figure: Figure) -> list[Any]:
    return [bar.lines[0] for bar in figure.axes[0].containers]


def labels(figure: Figure) -> list[str]:
    return figure.axes[0].get_legend_handles_labels()[1]


def test_every_chart_is_written_as_png_and_svg(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", tokens=(16,), regimes=("isolated",))
    paths = charts.write([run], tmp_path / "charts")
    assert [path.name for path in paths] == [
        f"{stem}.{kind}"
        for stem in (
            "step_time-tiny-r4-bf16-isolated",
            "speedup-tiny-r4-bf16-isolated",
            "signaling-host-shm",
            "imbalance-tiny-r4",
        )
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
            assert any(unit in text for unit in ("(us)", "routed rows", "tokens per rank"))


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
    assert "more busy threads than its 2 cores: mok, push, alltoall with 4 ranks." in said
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
    assert "Left out: 4 of 12 routings." in words(figure)
    assert "Left out: 4 of 10 token counts." in words(figure)


def test_many_shapes_are_limited_and_counted(tmp_path: Path) -> None:
    rows = [row("mok", 10.0, model=f"m{i}", expert_counts=[1, 2]) for i in range(15)]
    run = stored(tmp_path, rows)
    found = figures(step_time, run)
    assert len(found) == step_time.MAX_FIGURES
    assert "3 more charts of this kind not drawn." in words(found[0][1])
    assert "7 more charts of this kind not drawn." in words(figures(imbalance, run)[0][1])


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
    assert "No line: a fit needs at least 3 rank counts, none oversubscribed" in words(figure)
    assert "alpha + beta" not in words(figure)
    assert figure.axes[0].get_lines() == drawn_points(figure)
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
    assert "Points without a line: a fit needs at least 3 rank counts" in words(figure)
    panel = figure.axes[0]
    ticks = [tick.get_text() for tick in panel.get_xticklabels()]
    assert ticks == ["2", "4", "8", "16\n(fit only)"]
    assert max(line.get_xdata()[-1] for line in panel.get_lines()) == 16
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
    assert panel.get_title() == "balanced\nmax/mean 2.00, 25 % empty"
    assert "Left out, same generators: 1 token/rank." in words(figure)


def test_runs_without_data_draw_nothing(tmp_path: Path) -> None:
    empty = stored(tmp_path / "empty", [])
    assert charts.write([empty], tmp_path / "a") == []
    dead = stored(tmp_path / "dead", [fake_record(status="failed", reason="why")])
    assert charts.write([dead], tmp_path / "b") == []


def test_two_shapes_of_one_name_get_two_files(tmp_path: Path) -> None:
    run = stored(tmp_path / "run", [row("mok", 1.0), row("push", 1.0, hidden=64)])
    names = [path.name for path in charts.write([run], tmp_path / "charts")]
    assert names[::2] == [
        "step_time-tiny-r4-bf16-isolated-h512.png",
        "step_time-tiny-r4-bf16-isolated-h64.png",
    ]


def test_placement_and_seed_are_in_the_title_and_in_the_file_name(tmp_path: Path) -> None:
    change = {"placement": "round_robin", "seed": 3, "expert_counts": [1] * 16}
    run = stored(
        tmp_path / "run", [row("mok", 1.0, expert_counts=[1] * 16), row("mok", 1.0, **change)]
    )
    for module, stem in (
        (step_time, "step_time-tiny-r4-bf16-isolated"),
        (imbalance, "imbalance-tiny-r4"),
    ):
        plain, (name, figure) = figures(module, run)
        assert (plain[0], name) == (f"{stem}-contiguous-seed0", f"{stem}-round_robin-seed3")
        assert "placement round_robin, seed 3" in words(figure)
        assert "placement" not in words(plain[1])
        assert ", ," not in words(figure)


def test_charts_of_several_runs_are_named_by_run(tmp_path: Path) -> None:
    runs = [
        fake_run(tmp_path / where / "run", tokens=(16,), regimes=("isolated",), signals=(4,))
        for where in ("one", "two")
    ]
    names = [path.stem for path in charts.write(runs, tmp_path / "charts")][::2]
    assert names == [
        "step_time-tiny-r4-bf16-isolated-one-run",
        "step_time-tiny-r4-bf16-isolated-two-run",
        "speedup-tiny-r4-bf16-isolated-one-run",
        "speedup-tiny-r4-bf16-isolated-two-run",
        "signaling-host-shm-one-run",
        "signaling-host-shm-two-run",
        "imbalance-tiny-r4",
    ]
    titles = [words(figure) for _, figure in step_time.figures(gather(runs))]
    assert "isolated, host, run one/run" in titles[0]


def test_variants_differ_and_no_line_joins_routings(tmp_path: Path) -> None:
    variants = ("", "block_m=32", "block_m=128")
    rows = [
        row("mok", 10.0, variant=v, routing=r, **CUDA)
        for v in variants
        for r in ("balanced", "lognormal-0.25+masked-0.1+uneven-0.5")
    ]
    ((_, figure),) = figures(step_time, stored(tmp_path, rows))
    points = drawn_points(figure)
    assert len({line.get_color() for line in points}) == len(variants)
    assert len({line.get_marker() for line in points}) == len(variants)
    assert {line.get_linestyle() for line in points} == {"None"}
    assert "lognormal-0.25\n+masked-0.1\n+uneven-0.5" in [
        tick.get_text() for tick in figure.axes[0].get_xticklabels()
    ]


def test_the_legend_and_labels_cover_nothing(tmp_path: Path) -> None:
    rows = [
        row("mok", 10.0, variant=v, routing=r, tokens_per_rank=t, **CUDA)
        for v in ("", "block_m=32,ring_tiles=2", "block_m=128,hidden_ring_tiles=16")
        for r in ("balanced", "extreme", "trace-deepseek-r1-layer36-l0", "dirichlet-0.5+masked-0.1")
        for t in (1, 2, 4)
    ]
    ((_, figure),) = figures(step_time, stored(tmp_path, rows))
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    for other in [*figure.texts, *figure.axes]:
        assert not box.overlaps(other.get_tightbbox())
    for panel in figure.axes:
        boxes = [tick.get_window_extent() for tick in panel.get_xticklabels()]
        assert all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes))


@pytest.mark.parametrize("far, said", [(20.0, "All panels have one"), (200.0, "Each panel has")])
def test_panels_share_their_scale_or_say_that_they_do_not(
    tmp_path: Path, far: float, said: str
) -> None:
    rows = [row("mok", 10.0, **CUDA), row("mok", far, tokens_per_rank=4096, **CUDA)]
    ((_, figure),) = figures(step_time, stored(tmp_path, rows))
    limits = {panel.get_ylim() for panel in figure.axes}
    assert (len(limits) == 1) == said.startswith("All")
    assert said in words(figure)


def test_signaling_at_one_rank_count_stands_over_its_tick(tmp_path: Path) -> None:
    ((_, figure),) = figures(signaling, fake_run(tmp_path / "run", tokens=(16,), signals=(4,)))
    panel = figure.axes[0]
    low, high = panel.get_xlim()
    spread = [line.get_xdata()[0] for line in drawn_points(figure)]
    assert max(spread) - min(spread) < 0.15 * (high - low)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    run = stored(tmp_path / "run", [row("mok", 1.0)])
    with pytest.raises(ResultsError, match=r"writing charts failed: .*name a folder"):
        charts.write([run], tmp_path / "file")


def test_systems_differ_in_colour_and_in_marker() -> None:
    names = ("mok", "push", "deepep", "alltoall", "local", "mok (a)", "mok (b)", "push (a)", "new")
    looks = system_looks(names)
    assert len({colour for colour, _ in looks.values()}) == len(names)
    assert len({marker for _, marker in looks.values()}) == len(names)
    assert looks["push"] == system_looks(["push"])["push"]


def test_fold() -> None:
    assert fold("hot_rank-2.5", 14) == "hot_rank-2.5"
    assert fold("zipf-0.8+masked-0.1", 14) == "zipf-0.8\n+masked-0.1"
    assert fold("x" * 20, 14) == "x" * 14 + "\n" + "x" * 6


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
    assert done.stdout.strip() == "6", done.stderr


def test_no_marker_is_cut_by_the_frame(tmp_path: Path) -> None:
    rows = [row("push", 1000.0, roofline_ratio=1.2, tokens_per_rank=t, **CUDA) for t in (1, 2)]
    for module in (step_time, roofline):
        ((_, figure),) = figures(module, stored(tmp_path / module.__name__, rows))
        for panel in figure.axes:
            highest = max(max(line.get_ydata()) for line in panel.lines if len(line.get_ydata()))
            assert panel.get_ylim()[1] >= 1.05 * highest
