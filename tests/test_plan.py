"""Estimated time and memory against figures worked out by hand."""

import io

import pytest
from rich.console import Console

from mokbench import cells, config
from mokbench.dry_run import print_plan
from mokbench.gpus import Gpus
from mokbench.plan import (
    CHECK_PASSES,
    MIN_STEP_S,
    OVERHEAD_S,
    PROCESS_BYTES,
    RANDOM_PER_S,
    REPORT_S,
    SIGNALS_S,
    STARTUP_S,
    Plan,
    plan,
)
from mokbench.plan_table import plan_table
from mokbench.workload import Cell

TEXT = """\
ranks: 4
model: {hidden: 512, intermediate: 256, experts: 32, top_k: 4}
systems: [mok, alltoall]
sweep: {tokens_per_rank: [0, 16]}
measure: {regimes: [isolated], max_time: 2s, deadline: 10s, warmup: 3, blocks: 6}
"""


def workspace(cell: Cell) -> int:
    return 1000 if cell.system == "mok" else 0


def plan_of(text: str, flops_per_s: float | None = 1e12) -> Plan:
    suite = config.parse(text)
    return plan(suite, cells.expand(suite), workspace, flops_per_s)


def test_memory_of_all_ranks() -> None:
    made = plan_of(TEXT)
    # 32 experts of 3 * 512 * 256 BF16 elements.
    weights = 32 * 393_216 * 2
    # 4 ranks * 16 tokens of two BF16 rows of 512, and 4 ids and 4 weights of 4 bytes.
    inputs = 64 * (2 * 1024 + 32)
    # x, y and |terms| of FP32, and the FP32 weights of one expert a rank.
    truth = 64 * 3 * 512 * 4 + 4 * 393_216 * 4
    assert [each.weights_bytes for each in made.cells] == [weights] * 4
    assert [each.inputs_bytes for each in made.cells] == [0, 0, inputs, inputs]
    assert [each.workspace_bytes for each in made.cells] == [1000, 0, 1000, 0]
    assert made.cells[2].truth_bytes == truth
    held = weights + inputs + 1000 + truth + 4 * PROCESS_BYTES
    assert made.cells[2].memory_bytes == held == made.peak_bytes
    assert made.peak_rank_bytes == held // 4


def test_what_is_refused_costs_nothing() -> None:
    suite = config.parse(TEXT)
    made = plan(suite, cells.expand(suite), lambda cell: None)
    assert (made.peak_bytes, made.likely_s, made.bound_s) == (0, 0, 0)
    assert len(made.cells) == 4


def test_a_plan_that_needs_more_than_there_is_is_warned_of() -> None:
    made = plan_of(TEXT)
    console = Console(width=200, file=io.StringIO())
    console.print(plan_table(made, lambda cell: None, made.peak_bytes - 1))
    console.print(plan_table(made, lambda cell: None, made.peak_bytes))
    text = console.file.getvalue()
    assert text.count("warning: this machine has") == 1
    assert "t16.balanced.bf16.isolated needs more" in text


def test_fp32_doubles_weights_and_activations_but_not_routes() -> None:
    each = plan_of(TEXT + "dtype: fp32\n").cells[2]
    assert each.weights_bytes == 32 * 393_216 * 4
    assert each.inputs_bytes == 64 * (4 * 1024 + 32)


def test_time_from_the_measure_options() -> None:
    # One pass: 4 * 16 * 4 rows, 6 * 512 * 256 operations each, at 1 GFLOP/s.
    pass_s = 256 * 786_432 / 1e9
    made = plan_of(TEXT, 1e9)
    fixed_s = OVERHEAD_S + (3 + CHECK_PASSES + 6) * pass_s
    assert made.cells[0].likely_s == pytest.approx(OVERHEAD_S + 1.0)
    assert made.cells[2].likely_s == pytest.approx(fixed_s + 1.0)
    # The stop rule ends at twice max_time; a quarter of it goes to dispatch and combine alone.
    assert made.cells[2].bound_s == pytest.approx(fixed_s + 4.5)
    assert made.likely_s == pytest.approx(
        made.startup_s + 2 * (OVERHEAD_S + 1.0) + 2 * (fixed_s + 1.0)
    )
    assert made.bound_s == pytest.approx(made.likely_s + 4 * 3.5)


def test_what_comes_once_a_rank_count_system_and_workload(monkeypatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    without = TEXT.replace("blocks: 6", "blocks: 6, signals: false, min_step: false")
    # 32 experts' weights, made once as a rank's own and by each of 4 ranks for the truth.
    random_s = 2 * 32 * 393_216 * 5 / RANDOM_PER_S / 4
    assert plan_of(without).startup_s == pytest.approx(REPORT_S + STARTUP_S + random_s)
    once = 3 * SIGNALS_S + 2 * MIN_STEP_S
    assert plan_of(TEXT).startup_s == pytest.approx(plan_of(without).startup_s + once)
    more = plan_of(without.replace("ranks: 4", "ranks: [4, 2, 1]"))
    assert more.startup_s > plan_of(without).startup_s + 2 * STARTUP_S


def test_no_row_outlives_its_deadline() -> None:
    made = plan_of(TEXT.replace("ranks: 4", "ranks: [4, 2, 1]"), 1e3)
    assert {each.bound_s for each in made.cells if each.cell.workload.tokens_per_rank} == {10.0}
    assert all(each.likely_s <= each.bound_s for each in made.cells)


def test_default_rate_is_never_faster_than_no_compute() -> None:
    made = plan_of(TEXT, None)
    assert made.cells[2].likely_s > made.cells[0].likely_s


def test_nothing_to_run_costs_nothing() -> None:
    made = plan(config.parse(TEXT), [], workspace)
    assert (made.peak_bytes, made.peak_rank_bytes, made.likely_s, made.bound_s) == (0, 0, 0, 0)


def test_a_plan_for_gpus_says_where_none_is(capsys: pytest.CaptureFixture[str]) -> None:
    suite = config.parse("fabric: cuda\n" + TEXT.replace("mok, alltoall", "push"))
    planned = cells.expand(suite, fabric="cuda")
    none = Gpus(note="no driver")
    print_plan(suite, planned, "cuda", none)
    said = " ".join(capsys.readouterr().out.split())
    assert "none of these cells can run here: fabric: cuda needs a GPU" in said
    assert "no driver" in said
    print_plan(suite, cells.expand(suite), "host", none)
    assert "can run here" not in capsys.readouterr().out
