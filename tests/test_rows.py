"""From a measured result to the stored row: what depends on the system and what is left out."""

import numpy as np
import pytest

from mokbench.gpus import Gpus
from mokbench.record import parse_record
from mokbench.routing import RoutingSpec
from mokbench.rows import MEMORY_NOTE, Surroundings, measured_record
from mokbench.topology import one_machine
from mokbench.workload import Cell, Dtype, Model, Regime, Workload

WORK = Workload(
    model=Model("tiny", hidden=64, intermediate=64, experts=8, top_k=2),
    ranks=4,
    tokens_per_rank=5,
    dtype=Dtype.BF16,
    routing=RoutingSpec(),
    seed=0,
)
CELL = Cell("id", "host", "alltoall", (), WORK, Regime.ISOLATED)
USEFUL = {"dispatch_useful": 1280, "combine_useful": 1280}
FACTS = {
    "routing_digest": "0" * 64,
    "imbalance": None,
    "expert_counts": [5] * 8,
    "traffic": {
        "per_route": USEFUL | {"dispatch_wire": 2560, "combine_wire": 2560},
        "per_rank": USEFUL | {"dispatch_wire": 1280, "combine_wire": 1280},
    },
    # All to the next rank, and some to the own.
    "pairs": {
        "per_route": np.roll(np.diag([5] * 4), 1, axis=1) + np.eye(4, dtype=np.int64),
        "per_rank": np.roll(np.diag([3, 3, 2, 2]), 1, axis=1) + np.eye(4, dtype=np.int64),
        "tokens": [5] * 4,
    },
    "num_tokens": 20,
}
AROUND = Surroundings("tcp", one_machine("host", Gpus())(4), False, 0.001, {}, None)


def stored(moved):
    class Sender:
        signal = None
        traffic = moved

    result = {
        "blocks": [np.ones((4, 3, 3))],
        "rejected": [],
        "block_us": [1.0],
        "rank_spread_us": 0.0,
        "measured_s": 0.1,
        "stop_reason": "time",
        "peak_memory_bytes": 12345,
    }
    return measured_record(CELL, Sender, FACTS, result, AROUND)[0]


# To all: 20 tokens of 64 * 2 bytes to 3 other ranks, and as much back.
@pytest.mark.parametrize(
    "moved, useful, wire",
    [
        ("per_route", 2560, 5120),
        ("per_rank", 2560, 2560),
        ("all", 2560, 2 * 20 * 128 * 3),
        (None, 0, 0),
    ],
)
def test_wire_bytes_follow_what_the_system_moves(moved, useful, wire):
    record = stored(moved)
    assert (record.useful_bytes, record.wire_bytes) == (useful, wire)
    if moved is not None:
        assert record.traffic.useful.same_domain_bytes == useful
        assert record.traffic.wire.same_domain_bytes == wire
    assert parse_record("f:1", record.to_json().encode()) == record


def test_memory_of_a_process_that_other_rows_shaped_is_not_a_rows_own():
    record = stored("per_rank")
    assert record.peak_memory_bytes is None
    assert MEMORY_NOTE in record.notes
