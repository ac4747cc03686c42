import json
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import pytest
from fake_run import fake_record
from pydantic import ValidationError

from mokbench.cell_digest import cell_digest, lacks_defaults
from mokbench.errors import ResultsError
from mokbench.figures import StepTime
from mokbench.record import Record, parse_record
from mokbench.routing import RoutingSpec
from mokbench.systems.options import SYSTEM_OPTIONS, PushOptions
from mokbench.workload import Cell, Dtype, Model, Regime, Workload

# The contract of the machine-readable report, word for word.
CONTRACT = """id, system, status, reason, fabric, variant, link, ranks, nodes, ranks_per_gpu,
model, hidden, intermediate, experts, top_k, tokens_per_rank, dtype, routing, pass, regime, graph,
step_time_us, rank_spread_us, tflops_per_gpu, peak_tflops, roofline_us, roofline_ratio,
tokens_per_s, signal_hop_us, local_hop_us, signal_entry_us, signal_ready_us, min_step_us,
dispatch_us, combine_us, wire_bytes, useful_bytes, physical_bytes, link_utilization,
wire_utilization, link_peak_gbs, num_sms, placement, l2_state, stop_reason, rejected_samples,
t_first_us, notes, imbalance, rel_error, nan_count, bitwise_repeat, sm_clock_mhz,
peak_memory_bytes"""

STEP = {"median": 10.0, "p95": 12.0, "min": 9.0, "ci_low": 9.5, "ci_high": 10.5, "n": 40}


def cell(**changes: Any) -> Cell:
    work = Workload(
        model=Model("tiny", 512, 256, 16, 4),
        ranks=4,
        tokens_per_rank=128,
        dtype=Dtype.BF16,
        routing=RoutingSpec.model_validate("balanced"),
        seed=3,
    )
    fields: dict[str, Any] = {
        "id": "tiny.mok.r4",
        "fabric": "host",
        "system": "mok",
        "options": (("block_m", 32),),
        "workload": work,
        "regime": Regime.STEADY,
        "graph": True,
    }
    return Cell(**(fields | changes))


def test_names_are_the_contract() -> None:
    names = [name.strip() for name in CONTRACT.replace("\n", " ").split(",")]
    stored = list(fake_record().to_dict())
    assert [name for name in stored if name in names] == names
    assert list(StepTime.model_fields) == ["median", "p95", "min", "ci_low", "ci_high", "n"]


def test_rows_satisfy_the_schema_they_publish() -> None:
    schema = Record.model_json_schema(mode="serialization")
    jsonschema.validate(fake_record(step_time_us=STEP).to_dict(), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(fake_record().to_dict() | {"ranks": "four"}, schema)


def test_from_cell_fills_in_what_the_cell_is() -> None:
    record = Record.from_cell(cell(), status="ok", step_time_us=STEP, link="shm")
    stored = record.to_dict()
    expected = {
        "id": "tiny.mok.r4", "system": "mok", "fabric": "host", "variant": "block_m=32",
        "ranks": 4, "nodes": 1, "model": "tiny", "hidden": 512, "intermediate": 256, "experts": 16,
        "top_k": 4, "tokens_per_rank": 128, "dtype": "bf16", "routing": "balanced",
        "pass": "forward", "regime": "steady", "graph": True, "placement": "contiguous", "seed": 3,
        "step_time_us": STEP, "link": "shm", "status": "ok", "reason": None,
    }  # fmt: skip
    assert {name: stored[name] for name in expected} == expected
    assert record.name == "mok (block_m=32)"
    assert Record.from_cell(cell(options=()), status="ok").name == "mok"


def test_digest_follows_content_and_not_the_name() -> None:
    assert cell_digest(cell()) == cell_digest(cell(id="another"))
    assert cell_digest(cell()) != cell_digest(cell(graph=False))


def test_digest_covers_options_left_at_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, asked = cell(system="push", options=()), (("gemm", "ours"),)
    before = cell_digest(plain)
    assert before == cell_digest(cell(system="push", options=asked))
    assert not lacks_defaults(before)

    class Changed(PushOptions):
        gemm: Literal["ours", "torch"] = "torch"

    monkeypatch.setitem(SYSTEM_OPTIONS, "push", Changed)
    assert cell_digest(plain) != before
    assert cell_digest(cell(system="push", options=asked)) == before


def test_digest_is_the_same_in_a_checkout_elsewhere() -> None:
    digests = set()
    for folder in ("/here", "/there"):
        spec = RoutingSpec.model_validate({"trace": f"{folder}/t.npz"})
        digests.add(cell_digest(cell(workload=replace(cell().workload, routing=spec))))
    assert len(digests) == 1


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(ValidationError, match="step_time_s"):
        Record.from_cell(cell(), status="ok", step_time_s=1.0)


@pytest.mark.parametrize("status", ["failed", "unsupported"])
def test_rows_without_success_carry_a_reason_and_no_performance(status: Any) -> None:
    with pytest.raises(ValidationError, match=f"status {status} needs a reason"):
        Record.from_cell(cell(), status=status)
    with pytest.raises(ValidationError, match="performance figures: step_time_us"):
        Record.from_cell(cell(), status=status, reason="why", step_time_us=STEP)
    detail = {"signal_hop_us": {"median": 1, "p99": 2, "ci_low": 1, "ci_high": 1, "n": 9}}
    with pytest.raises(ValidationError, match="performance figures: block_us, signal_detail"):
        Record.from_cell(cell(), status=status, reason="why", block_us=[1], signal_detail=detail)
    row = Record.from_cell(cell(), status=status, reason="why", rel_error=0.5, nan_count=3)
    assert row.nan_count == 3


@dataclass
class Skew:
    expert_max_over_mean: float = 2.0
    rank_max_over_mean: float = math.nan
    pair_max_over_mean: float = 1.0
    cv: float = 0.5
    gini: float = 0.25
    empty_experts: int = 0


def test_only_finite_numbers_are_stored() -> None:
    row = fake_record(
        tokens_per_s=math.inf,
        rel_error=np.float32("nan"),
        useful_bytes=np.int64(7),
        imbalance=Skew(),
        block_us=[1.0, math.nan],
        step_time_us=StepTime.model_validate(STEP | {"median": math.nan}),
        notes=["as told"],
    )
    assert row.tokens_per_s is None
    assert row.rel_error is None
    assert row.useful_bytes == 7
    assert row.imbalance is not None
    assert row.imbalance.rank_max_over_mean is None
    assert row.imbalance.gini == 0.25
    assert row.block_us == []
    assert row.step_time_us is None
    assert row.notes == [
        "as told",
        "tokens_per_s was inf: stored as null",
        "rel_error was nan: stored as null",
        "imbalance.rank_max_over_mean was nan: stored as null",
        "block_us[1] was nan: stored as null",
        "step_time_us.median was nan: stored as null",
    ]
    json.loads(row.to_json(), parse_constant=lambda name: pytest.fail(f"{name} was stored"))


def test_a_signaling_figure_without_median_is_left_out() -> None:
    whole = {"median": 1.0, "p99": 2.0, "ci_low": None, "ci_high": None, "n": 3}
    row = fake_record(signal_detail={"a": whole, "b": whole | {"median": math.nan}})
    assert list(row.signal_detail) == ["a"]


def test_reading_gives_the_same_row() -> None:
    row = fake_record(step_time_us=STEP, block_us=[1.5], notes=["NaN is a word, too"])
    assert parse_record("file:1", row.to_json().encode()) == row


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"rel_error":null', '"rel_error":NaN', "rel_error is nan"),
        ('"rel_error":null', '"rel_error":9e999', "rel_error is inf"),
        ('"imbalance":null', '"imbalance":{"cv":-Infinity}', "imbalance.cv is -inf"),
        ('"block_us":[]', '"block_us":[1.0,NaN]', r"block_us\[1\] is nan"),
        ('"min_step_us":null', '"min_step_us":0', r"min_step_us is 0.0, .* above 0"),
    ],
)
def test_a_stored_figure_that_cannot_be_is_refused_with_row_and_value(
    old: str, new: str, said: str
) -> None:
    record = fake_record()
    line = record.to_json()
    assert old in line
    with pytest.raises(ResultsError, match=f"^file:1: {record.id}: {said}"):
        parse_record("file:1", line.replace(old, new).encode())


@pytest.mark.parametrize("bad", ["", "a/b", "../x", ".hidden", "two words", "x" * 501, "a\x00b"])
def test_ids_that_are_no_file_names_are_refused(bad: str) -> None:
    with pytest.raises(ValidationError):
        fake_record(id=bad)


def test_redundancy() -> None:
    assert fake_record(useful_bytes=100, wire_bytes=150).redundancy == 1.5
    assert fake_record(useful_bytes=0, wire_bytes=0).redundancy is None
    assert fake_record().redundancy is None
