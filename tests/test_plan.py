"""Estimated time and memory against figures worked out by hand."""

import pytest

from mokbench import cells, config
from mokbench.plan import CHECK_PASSES, OVERHEAD_S, STARTUP_S, Plan, plan
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
    assert [each.weights_bytes for each in made.cells] == [weights] * 4
    assert [each.inputs_bytes for each in made.cells] == [0, 0, inputs, inputs]
    assert [each.workspace_bytes for each in made.cells] == [1000, 0, 1000, 0]
    assert made.cells[2].memory_bytes == weights + inputs + 1000 == made.peak_bytes
    assert made.peak_rank_bytes == (weights + inputs + 1000) // 4


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
    assert made.cells[2].bound_s == pytest.approx(fixed_s + 2.0)
    assert made.startup_s == STARTUP_S
    assert made.likely_s == pytest.approx(STARTUP_S + 2 * (OVERHEAD_S + 1.0) + 2 * (fixed_s + 1.0))
    assert made.bound_s == pytest.approx(made.likely_s + 4 * 1.0)


def test_no_row_outlives_its_deadline_and_each_rank_count_starts_once() -> None:
    made = plan_of(TEXT.replace("ranks: 4", "ranks: [4, 2, 1]"), 1e3)
    assert made.startup_s == 3 * STARTUP_S
    assert {each.bound_s for each in made.cells if each.cell.workload.tokens_per_rank} == {10.0}
    assert all(each.likely_s <= each.bound_s for each in made.cells)


def test_default_rate_is_never_faster_than_no_compute() -> None:
    made = plan_of(TEXT, None)
    assert made.cells[2].likely_s > made.cells[0].likely_s


def test_nothing_to_run_costs_nothing() -> None:
    made = plan(config.parse(TEXT), [], workspace)
    assert (made.peak_bytes, made.peak_rank_bytes, made.likely_s, made.bound_s) == (0, 0, 0, 0)
