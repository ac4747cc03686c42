"""Signaling in reports: intervals, the clocks' bound, and what it leaves open between protocols."""

import re
from pathlib import Path
from typing import Any

import pytest
from fake_run import CUDA, fake_meta, row, text_of

from mokbench import report
from mokbench.figures import SignalPoint
from mokbench.report.charts.signaling import figures
from mokbench.report.rows import gather
from mokbench.results import RunFolder


def quantity(median: float, half: float | None = 0.01) -> dict[str, Any]:
    low, high = (None, None) if half is None else (median - half, median + half)
    return {"median": median, "p99": 1.1 * median, "ci_low": low, "ci_high": high, "n": 400}


def run_with(folder: Path, ready: tuple[float, float], bound: float | None) -> RunFolder:
    """Pull and push ready in us, each with that bound of the clocks' offset."""
    pull, push = ready
    quantities = {
        "signal_hop_us": quantity(0.5),
        "signal_ready_us.pull": quantity(pull),
        "signal_ready_us.push": quantity(push),
        "signal_after_arrival_us.pull": quantity(0.4),
        "signal_after_arrival_us.push": quantity(0.6),
    }
    if bound is not None:
        quantities |= {
            f"clock_offset_bound_us.{way}": quantity(bound, None) | {"p99": bound, "n": 1}
            for way in ("pull", "push")
        }
    point = SignalPoint.model_validate(
        {"ranks": 2, "fabric": "cuda", "link": "nvlink", "quantities": quantities}
    )
    run = RunFolder.create(folder, fake_meta())
    run.append(row("push", 100.0, ranks=2, **CUDA))
    run.write_signals([point])
    run.finish("done")
    return RunFolder.open(folder)


def everywhere(run: RunFolder) -> list[str]:
    page = re.sub("<[^>]*>", " ", report.html_report([run])).replace("&#39;", "'")
    return [text_of([run], 250), report.markdown([run]), page]


def test_intervals_and_the_bound_stand_beside_what_they_are_of(tmp_path: Path) -> None:
    for text in everywhere(run_with(tmp_path, (0.92, 1.04), 0.3)):
        assert "0.920 (0.910-0.930) / 1.01, +- 0.300" in text
        assert "1.04 (1.03-1.05) / 1.14, +- 0.300" in text
        assert "0.400 (0.390-0.410) / 0.440, +- 0.300" in text
        # The flags and the payload are seen by one SM.
        assert "0.600 (0.590-0.610) / 0.660" in text
        assert "/ 0.660, +-" not in text
        assert "how wrong the offset between two SMs' clocks" in text


@pytest.mark.parametrize(
    ("push", "bound", "said"),
    [
        (1.04, 0.3, "0.120 (0.100 to 0.140) +- 0.600: not resolved"),
        (1.04, 0.04, "0.120 (0.100 to 0.140) +- 0.080"),
        (0.70, 0.04, "-0.220 (-0.240 to -0.200) +- 0.080"),
        (1.04, None, "0.120 (0.100 to 0.140)"),
        (0.93, None, "0.010 (-0.010 to 0.030): not resolved"),
    ],
)
def test_protocols_differ_only_beyond_interval_and_bounds(
    tmp_path: Path, push: float, bound: float | None, said: str
) -> None:
    for text in everywhere(run_with(tmp_path, (0.92, push), bound)):
        assert said in text
        assert ("not resolved" in text) == ("not resolved" in said)


def test_the_chart_has_the_interval_and_the_bound(tmp_path: Path) -> None:
    run = run_with(tmp_path / "with", (0.92, 1.04), 0.3)
    ((_, figure),) = figures(gather([run]))
    text = " ".join(
        part.get_text() for part in figure.findobj(match=lambda a: hasattr(a, "get_text"))
    )
    assert "95 % interval" in " ".join(text.split())
    assert "Pale bars" in text
    assert figure.axes[0].get_ylim()[1] > 1.34, "the bound of push's ready is inside"
    ((_, plain),) = figures(gather([run_with(tmp_path / "without", (0.92, 1.04), None)]))
    assert not any("Pale" in part.get_text() for part in plain.texts)
