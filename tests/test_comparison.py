from pathlib import Path
from typing import Any

import pytest
from fake_run import CUDA, row, stored, text_of

from mokbench import report
from mokbench.report import wording
from mokbench.results import RunFolder


def ratios(run: RunFolder) -> list[tuple[str, str, float, float | None, float | None]]:
    found = report.json_report([run])["comparisons"]
    return [
        (
            c["other_id"].split(".")[1],
            c["basis"],
            *(c["ratio"][k] for k in ("value", "low", "high")),
        )
        for c in found
    ]


def test_ratio_of_rows_in_turn_comes_from_their_blocks(tmp_path: Path) -> None:
    mok = row("mok", 999.0, turn="t1", block_us=[8.0, 9, 10, 11, 12, 13])
    push = row("push", 1.0, turn="t1", block_us=[10.0, 10, 10, 10, 10, 10])
    run = stored(tmp_path, [mok, push])
    assert ratios(run) == [("push", "turn", 1.05, 0.8, 1.3)]
    text = text_of([run])
    assert "1.05 (0.80-1.30)" in text
    assert "isolated: mok took 1.05 (0.80-1.30) of the step time of push." in text
    assert "~" not in text


def test_ratio_of_rows_apart_is_wide_and_marked(tmp_path: Path) -> None:
    run = stored(tmp_path, [row("mok", 10.0, turn="t1"), row("push", 20.0, turn="t2")])
    assert ratios(run) == [("push", "separate", 0.5, 9 / 21, 11 / 19)]
    text = text_of([run])
    assert "~0.50 (0.43-0.58)" in text
    assert "0.50 (0.43-0.58) [separate medians, not measured in turn] of the step" in text
    assert "~ before a ratio: from separate medians" in text


def test_few_blocks_give_a_ratio_and_say_why_no_interval(tmp_path: Path) -> None:
    rows = [row(s, 1.0, turn="t", block_us=[v] * 3) for s, v in (("mok", 5.0), ("push", 4.0))]
    run = stored(tmp_path, rows)
    assert ratios(run) == [("push", "turn", 1.25, None, None)]
    text = text_of([run])
    assert "1.25 (no CI)" in text
    assert "mok took 1.25 [3 block pairs; an interval needs 6] of the step time of push." in text


@pytest.mark.parametrize(
    "mok_us, verdict",
    [
        ([8.0] * 6, "mok is faster: 0.80 (0.80-0.80) of the step time of deepep"),
        ([12.0] * 6, "mok is slower: 1.20 (1.20-1.20) of the step time of deepep"),
        ([9.0, 9, 9, 11, 11, 11], "no difference shown between mok and deepep: 1.00 (0.90-1.10)"),
        ([9.0, 9], "too little for a verdict on mok and deepep: 0.90 [2 block pairs"),
    ],
)
def test_verdicts_on_cuda(tmp_path: Path, mok_us: list[float], verdict: str) -> None:
    mok = row("mok", 1.0, turn="t", block_us=mok_us, **CUDA)
    phases = {"dispatch_us": 3.0, "combine_us": 2.0}
    deepep = row("deepep", 1.0, turn="t", block_us=[10.0] * 6, **phases, **CUDA)
    text = text_of([stored(tmp_path, [mok, deepep])], 200)
    assert f"isolated: {verdict}" in text
    assert ", which spends 3.00 us in dispatch and 2.00 us in combine." in text
    assert wording.HOST not in text


def test_separate_medians_on_cuda_are_no_verdict(tmp_path: Path) -> None:
    text = text_of([stored(tmp_path, [row("mok", 10.0, **CUDA), row("push", 50.0, **CUDA)])], 200)
    assert "too little for a verdict on mok and push: 0.20" in text


@pytest.mark.parametrize(
    "change",
    [
        {"regime": "steady"},
        {"graph": True},
        {"dtype": "fp32"},
        {"tokens_per_rank": 64},
        {"routing": "extreme"},
        {"ranks_per_gpu": 2},
        {"seed": 1},
        {"routing_digest": "b"},
    ],
)
def test_rows_of_different_work_are_never_compared(tmp_path: Path, change: dict[str, Any]) -> None:
    base = {"routing_digest": "a", **CUDA}
    run = stored(tmp_path, [row("mok", 1.0, **base), row("push", 2.0, **(base | change))])
    assert ratios(run) == []


def test_mok_variants_each_meet_the_others_and_defaults_are_the_reference(tmp_path: Path) -> None:
    rows = [
        row("mok", 10.0, variant="block_m=32", **CUDA),
        row("mok", 20.0, **CUDA),
        row("push", 40.0, **CUDA),
    ]
    run = stored(tmp_path, rows)
    assert [value for _, _, value, *_ in ratios(run)] == [0.25, 0.5]
    text = text_of([run])
    assert "mok (block_m=32)" in text
    assert "~0.50 (0.46-0.54)" in text  # the default against push
    assert "~2.00 (1.73-2.33)" in text  # the default against the variant
    assert "mok us / row us: mok is mok with default options" in text
    for name, ratio in (("mok", "0.50"), ("mok (block_m=32)", "0.25")):
        assert f"too little for a verdict on {name} and push: {ratio}" in text


def test_a_variant_that_stands_for_mok_is_named(tmp_path: Path) -> None:
    rows = [row("mok", 10.0, variant="block_m=32"), row("push", 40.0)]
    assert "mok us / row us: mok is mok (block_m=32)" in text_of([stored(tmp_path, rows)])
