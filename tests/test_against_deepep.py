"""Ratios to DeepEP and their largest cause, on made-up rows whose answer is known."""

from pathlib import Path
from typing import Any

import pytest
from fake_run import CUDA, fake_record, step, stored, text_of

from mokbench import report
from mokbench.record import Record

SWEEP = "num_sms 24 is the fastest here; us a pass by num_sms: 8: 410, 24: 300"


def phase(median: float, half: float = 1.0) -> dict[str, Any]:
    low, high = median - half, median + half
    return {"median": median, "p99": high, "ci_low": low, "ci_high": high, "n": 50}


def made(
    system: str, whole: float, dispatch: float, combine: float, half: float = 1.0, **more: Any
) -> Record:
    """An isolated row measured in turn with the others, all intervals ``half`` wide each way."""
    blocks = [whole - half, whole, whole, whole, whole, whole + half]
    fields: dict[str, Any] = {
        "turn": "t",
        "block_us": blocks,
        "step_time_us": step(whole, half),
        "dispatch_us": dispatch,
        "combine_us": combine,
        "signal_detail": {
            "dispatch_us": phase(dispatch, half),
            "combine_us": phase(combine, half),
        },
        "min_step_us": whole / 10,
        **CUDA,
    }
    return fake_record(system=system, **{**fields, **more})


def pairs(rows: list[Record], path: Path) -> dict[str, dict[str, Any]]:
    found = report.json_report([stored(path, rows)])["against_deepep"]
    return {each["id"].split(".")[1]: each for each in found}


def test_the_largest_phase_in_the_steps_direction_is_the_cause(tmp_path: Path) -> None:
    rows = [
        made("deepep", 1000, dispatch=100, combine=200),
        # 100 us slower: dispatch 250 more, combine 50 more, the rest 200 less.
        made("push", 1100, dispatch=350, combine=250),
        # 300 us faster: dispatch 80 less, combine 150 less, the rest 70 less.
        made("alltoall", 700, dispatch=20, combine=50),
    ]
    found = pairs(rows, tmp_path)
    assert set(found) == {"push", "alltoall"}
    assert found["push"]["ratio"]["value"] == pytest.approx(1.1)
    assert found["push"]["cause"] == {
        "phase": "dispatch",
        "difference_us": 250.0,
        "low_us": 248.0,
        "high_us": 252.0,
    }
    assert found["alltoall"]["cause"]["phase"] == "combine"
    assert found["alltoall"]["cause"]["difference_us"] == -150.0


def test_what_is_neither_dispatch_nor_combine_can_be_the_cause(tmp_path: Path) -> None:
    rows = [
        made("deepep", 1000, dispatch=100, combine=200),
        made("push", 1500, dispatch=110, combine=190),
    ]
    cause = pairs(rows, tmp_path)["push"]["cause"]
    assert cause["phase"] == "experts and waits"
    # 1200 +- 3 against 700 +- 3.
    assert (cause["difference_us"], cause["low_us"], cause["high_us"]) == (500.0, 494.0, 506.0)


@pytest.mark.parametrize(
    "push",
    [
        made("push", 1000, dispatch=400, combine=100),  # the steps do not differ
        made("push", 1100, dispatch=140, combine=240, half=60),  # every interval holds 0
        made("push", 1100, dispatch=350, combine=250, signal_detail={}),  # phases not known
        made("push", 1100, 350, 250, block_us=[1100.0] * 3),  # too few pairs for an interval
    ],
    ids=["equal", "wide", "no phases", "few blocks"],
)
def test_what_is_not_shown_is_not_resolved(tmp_path: Path, push: Record) -> None:
    half = 60 if push.step_time_us and push.step_time_us.ci_low == 1040 else 1
    deepep = made("deepep", 1000, dispatch=100, combine=200, half=half)
    run = stored(tmp_path, [deepep, push])
    (found,) = report.json_report([run])["against_deepep"]
    assert found["cause"] is None
    assert "not resolved" in text_of([run], 200)


def test_a_faster_row_is_not_explained_by_what_it_is_slower_in(tmp_path: Path) -> None:
    rows = [
        made("deepep", 1000, dispatch=100, combine=200),
        # 50 us faster although dispatch takes 400 more: the rest takes 500 less, combine 50 more.
        made("push", 950, dispatch=500, combine=250),
    ]
    cause = pairs(rows, tmp_path)["push"]["cause"]
    assert (cause["phase"], cause["difference_us"]) == ("experts and waits", -500.0)


@pytest.mark.parametrize(("mhz", "named"), [(1544.0, True), (1700.0, False)])
def test_a_difference_of_clocks_has_no_cause(tmp_path: Path, mhz: float, named: bool) -> None:
    rows = [
        made("deepep", 1000, dispatch=100, combine=200, sm_clock_mhz=1500.0),
        made("push", 1100, dispatch=350, combine=250, sm_clock_mhz=mhz),
    ]
    found = pairs(rows, tmp_path)["push"]
    assert (found["cause"] is not None) == named
    assert found["cycle_ratio"] == pytest.approx(1.1 * mhz / 1500)
    text = text_of([stored(tmp_path / "again", rows)], 250)
    assert ("SM 1700 against 1500 MHz; in SM cycles 1.25" in text) == (not named)


def test_the_table_has_what_the_reader_needs(tmp_path: Path) -> None:
    swept = made("deepep", 1000, 100, 200, variant="num_sms=best", notes=[SWEEP])
    torch_gemm = made("deepep", 1050, 100, 201, variant="gemm=torch,num_sms=best", notes=[SWEEP])
    run = stored(tmp_path, [swept, torch_gemm, made("push", 900, 40, 180)])
    for text in (text_of([run], 200), report.markdown([run])):
        assert "Against DeepEP" in text
        assert "deepep is deepep (num" in text
        assert "is the fastest here; us a pass by num" in text
        assert "dispatch: -60.0 us (-62.0 to -58.0)" in text
        assert "0.90 (0.90-0.90)" in text
        assert "experts and waits: +49.0 us" in text
    line = next(line for line in text_of([run], 200).splitlines() if "dispatch: -60" in line)
    assert line.split()[:4] == ["push", "isolated", "900", "(899-901)"]
    assert "90.0" in line  # the minimal step


def test_steady_rows_have_a_ratio_and_no_cause(tmp_path: Path) -> None:
    rows = [
        made("deepep", 1000, 100, 200, regime="steady", signal_detail={}),
        made("push", 1100, 350, 250, regime="steady", signal_detail={}),
    ]
    found = pairs(rows, tmp_path)["push"]
    assert found["cause"] is None
    assert found["ratio"]["value"] == pytest.approx(1.1)


def test_rows_of_another_turn_are_marked(tmp_path: Path) -> None:
    rows = [made("deepep", 1000, 100, 200), made("push", 1100, 350, 250, turn="later")]
    run = stored(tmp_path, rows)
    assert pairs(rows, tmp_path / "again")["push"]["basis"] == "separate"
    assert "~1.10" in text_of([run], 200)


def test_without_deepep_there_is_no_such_section(tmp_path: Path) -> None:
    for number, rows in enumerate(([made("push", 900, 40, 180)], [made("deepep", 1000, 100, 200)])):
        run = stored(tmp_path / str(number), rows)
        assert "Against DeepEP" not in text_of([run], 200)
        assert report.json_report([run])["against_deepep"] == []


def test_other_work_is_never_held_against_deepep(tmp_path: Path) -> None:
    deepep = made("deepep", 1000, 100, 200, routing_digest="a")
    push = made("push", 1100, 350, 250, routing_digest="b")
    assert pairs([deepep, push], tmp_path) == {}
