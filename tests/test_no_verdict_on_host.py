"""What is a ratio on the host fabric says beside it that it is no performance verdict."""

from pathlib import Path

import pytest
from fake_run import CUDA, fake_run, text_of

from mokbench import report
from mokbench.report import wording
from mokbench.report.charts import speedup
from mokbench.report.rows import gather
from mokbench.results import RunFolder

HOST = {"fabric": "host", "link": "shm"}


def made(path: Path, fabric: dict[str, str]) -> RunFolder:
    return fake_run(path, changes=fabric, tokens=[16], regimes=["isolated"])


def shown(run: RunFolder) -> list[str]:
    return [*text_of([run], 200).splitlines(), *report.markdown([run]).splitlines()]


@pytest.mark.parametrize("fabric", [HOST, CUDA], ids=["host", "cuda"])
def test_headings_of_ratios_and_sentences_on_them_say_it_on_the_host_alone(
    tmp_path: Path, fabric: dict[str, str]
) -> None:
    on_host = fabric is HOST
    lines = shown(made(tmp_path / "run", fabric))
    headings = [line for line in lines if "step us" in line and "mok us / row us" in line]
    assert len(headings) == 2 * 3  # three routings, two formats
    for line in headings:
        assert ("mok us / row us (95 % CI), no verdict" in line) == on_host
    sentences = [line for line in lines if "of the step time of push" in line]
    assert len(sentences) == 2 * 3
    for line in sentences:
        assert ("no performance verdict; isolated: mok took" in line) == on_host
    assert sum("mok us / row us: step time of mok divided by" in line for line in lines) == 2


@pytest.mark.parametrize("fabric", [HOST, CUDA], ids=["host", "cuda"])
def test_slowdowns_say_it_on_the_host_alone(tmp_path: Path, fabric: dict[str, str]) -> None:
    lines = shown(made(tmp_path / "run", fabric))
    said = [line for line in lines if line.strip(" -") == wording.NO_VERDICT]
    assert len(said) == (2 if fabric is HOST else 0)


@pytest.mark.parametrize("fabric", [HOST, CUDA], ids=["host", "cuda"])
def test_the_heat_map_is_a_speed_up_on_gpus_alone(tmp_path: Path, fabric: dict[str, str]) -> None:
    (drawn,) = speedup.figures(gather([made(tmp_path / "run", fabric)]))
    title = " ".join(drawn[1].texts[0].get_text().split())
    expected = (
        "Step time relative to mok (host fabric, no performance verdict)"
        if fabric is HOST
        else "Speed-up of mok"
    )
    assert title.startswith(f"{expected} over tokens and imbalance: tiny, 4 ranks")


def test_a_page_of_the_host_promises_no_speed_up(tmp_path: Path) -> None:
    page = report.html_report([made(tmp_path / "run", HOST)])
    assert "Step time over that of one system, by tokens and imbalance" in page
    assert "Speed-up" not in page
    assert wording.HOST in page
