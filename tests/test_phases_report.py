"""What reports show of the phases inside of a kernel."""

import json

import pytest
from click.testing import CliRunner
from fake_run import CUDA, fake_meta, row
from mok_stamps_data import stamps

from mokbench.cli import main
from mokbench.kernel_phases import phases_by_rank
from mokbench.mok_stamps import mok_phase_times
from mokbench.report.charts import phases
from mokbench.report.rows import gather
from mokbench.results import RunFolder


def run_with_phases(folder, ranks_per_gpu, ranks=2):
    """Rank r began r us later than rank 0."""
    times = [mok_phase_times(stamps(10**18 + 1000 * rank)) for rank in range(ranks)]
    run = RunFolder.create(folder, fake_meta())
    found = phases_by_rank(times, ranks_per_gpu)
    run.append(row("mok", 100.0, ranks=ranks, kernel_phases=found, **CUDA))
    run.append(row("push", 120.0, ranks=ranks, **CUDA))
    run.finish("done")
    return str(folder)


def report(*arguments):
    done = CliRunner().invoke(main, ["report", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def cells_of(text, rank):
    (line,) = [line for line in text.splitlines() if line.split()[:1] == [str(rank)]]
    return line.split()[1:]


def test_a_table_has_each_ranks_phases_on_the_clock_they_share(tmp_path):
    text = report(run_with_phases(tmp_path / "run", 2), "--no-charts")
    assert "us from the begin of the first CTA of all ranks, which share one GPU's clock" in text
    spans = ["0.00-2.00", "1.50-4.00", "3.60-5.50", "5.10-20.0", "6.00-29.0", "13.0-40.0"]
    assert cells_of(text, 0) == [*spans, "40.0-49.1", "49.0-60.5", "0.500", "/", "0.700"]
    assert cells_of(text, 1)[:2] == ["1.00-3.00", "2.50-5.00"]


def test_ranks_of_several_gpus_each_count_from_their_own_begin(tmp_path):
    text = report(run_with_phases(tmp_path / "run", 1), "--no-charts")
    assert "GPUs share no clock" in text
    assert cells_of(text, 1) == cells_of(text, 0)


def test_a_row_without_stamps_has_no_such_table(tmp_path):
    run = RunFolder.create(tmp_path / "run", fake_meta())
    run.append(row("push", 120.0, ranks=2, **CUDA))
    run.finish("done")
    assert "Phases inside of the kernel" not in report(str(run.path), "--no-charts")


@pytest.mark.parametrize("ranks", [1, 40])
def test_charts_draw_a_lane_a_rank(tmp_path, ranks):
    folder = run_with_phases(tmp_path / "run", ranks, ranks)
    ((stem, figure),) = phases.figures(gather([RunFolder.open(tmp_path / "run")]))
    (axes,) = figure.axes
    lanes = [tick.get_text() for tick in axes.get_yticklabels()]
    assert lanes == [f"rank {rank}" for rank in range(min(ranks, phases.MAX_RANKS))]
    bars = [bar for bar in axes.patches if bar.get_width() > 0]
    assert (bars[0].get_x(), bars[0].get_width()) == (0.0, 2.0)
    assert len(bars) == 8 * len(lanes)
    report(folder, "--charts", str(tmp_path / "charts"))
    drawn = {path.name for path in (tmp_path / "charts").glob("timeline-*")}
    assert drawn == {f"{stem}.png", f"{stem}.svg"}


def test_html_and_json_have_them_too(tmp_path):
    folder = run_with_phases(tmp_path / "run", 2)
    assert "Phases inside of the kernel" in report(folder, "--format", "html")
    cells = {
        cell["system"]: cell for cell in json.loads(report(folder, "--format", "json"))["cells"]
    }
    assert [found["clock"] for found in cells["mok"]["kernel_phases"]] == [0, 0]
    assert cells["mok"]["kernel_phases"][1]["spans"][0] == {
        "name": "stage",
        "begin_us": 1.0,
        "end_us": 3.0,
    }
    assert cells["push"]["kernel_phases"] == []
