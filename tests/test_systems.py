"""Every system of the table against the FP32 oracle, on real ranks, over the awkward workloads."""

from collections import Counter

import pytest
from runs import mokbench

from mokbench.results import RunFolder
from mokbench.systems import SYSTEM_OPTIONS, system_class

CONFIG = """\
name: matrix
ranks: {ranks}
model: {{name: tiny, hidden: 64, intermediate: 128, experts: {experts}, top_k: {top_k}}}
systems: {systems}
dtype: [bf16, fp32]
sweep:
  tokens_per_rank: [1, 37]
  routing: {routing}
measure: {{regimes: [isolated], noise: 50%, blocks: 1, max_time: 20ms, deadline: 30s,
  wait_bound: 5s, signals: false, min_step: false, warmup: 1}}
"""
AWKWARD = """
    - balanced
    - {hot_expert: 0.9}
    - {hot_rank: 1.5}
    - {generator: balanced, masked: 1.0}
    - {generator: balanced, masked: 0.3, uneven: 1.0}
    - {generator: balanced, empty_experts: 2, empty_ranks: 1}"""
TOLERANCE = {"bf16": 8e-3, "fp32": 1e-5}


def run_matrix(tmp_path, **values):
    config = tmp_path / "matrix.yaml"
    config.write_text(CONFIG.format(**values), encoding="utf-8")
    out = tmp_path / "run"
    done = mokbench("run", config, "--out", out, "--no-charts", "--quiet")
    assert done.returncode == 0, done.stderr
    return RunFolder.open(out).records()


# What may refuse every cell of the matrix: a system that is not here has to run.
NOT_ON_HOST = {"deepep"}
NOT_ON_SEVERAL_RANKS = NOT_ON_HOST | {"local"}
# Variants that are awkward in themselves: the smallest rings, tiles that divide nothing.
VARIANTS = ["{mok: {ring_tiles: 1, hidden_ring_tiles: 1, block_m: 3}}"]
ALL_SYSTEMS = f"[{', '.join([*SYSTEM_OPTIONS, *VARIANTS])}]"


def assert_right(records, may_refuse):
    """Every system ran some cells, and all that ran is right; refused cells say why."""
    able = [record for record in records if record.status == "ok"]
    assert {record.system for record in able} == set(SYSTEM_OPTIONS) - may_refuse
    for record in able:
        assert record.rel_error <= TOLERANCE[record.dtype], record.id
        assert record.nan_count == 0
        assert record.bitwise_repeat is True or not system_class(record.system).deterministic
    refused = [record for record in records if record.status != "ok"]
    assert {record.status for record in refused} <= {"unsupported"}
    assert all(record.reason for record in refused)
    return able, refused


@pytest.mark.slow
@pytest.mark.parametrize("ranks, experts, top_k", [(2, 6, 3), (3, 9, 1), (4, 16, 8)])
def test_every_system_matches_the_oracle_on_several_ranks(tmp_path, ranks, experts, top_k):
    records = run_matrix(
        tmp_path, ranks=ranks, experts=experts, top_k=top_k, systems=ALL_SYSTEMS, routing=AWKWARD
    )
    able, refused = assert_right(records, NOT_ON_SEVERAL_RANKS)
    cells_of_each = Counter((record.system, record.variant) for record in able)
    assert min(cells_of_each.values()) >= 2 * 2 * 5
    for record in refused:
        assert record.system in NOT_ON_SEVERAL_RANKS or "hot_" in record.routing


@pytest.mark.slow
def test_every_system_on_one_rank(tmp_path):
    records = run_matrix(
        tmp_path, ranks=1, experts=4, top_k=2, systems=ALL_SYSTEMS, routing="[balanced]"
    )
    able, _ = assert_right(records, NOT_ON_HOST)
    for record in able:
        assert record.wire_bytes == 0
        assert record.link == "none"


def test_local_is_refused_on_several_ranks_with_the_reason(tmp_path):
    records = run_matrix(
        tmp_path, ranks=2, experts=4, top_k=2, systems="[local]", routing="[balanced]"
    )
    assert {record.status for record in records} == {"unsupported"}
    assert "ranks: 1 only" in records[0].reason
