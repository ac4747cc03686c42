"""Bytes of real routings split by topology: every byte once, and the same bytes as before."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest
from fake_run import fake_record

from mokbench import metrics
from mokbench.record import parse_record
from mokbench.routing import RoutingSpec, generate
from mokbench.row_traffic import node_matrix, pair_facts, row_traffic
from mokbench.topology import RankPlace, Topology
from mokbench.workload import Cell, Dtype, Model, Regime, Workload

WORK = Workload(
    model=Model("tiny", hidden=256, intermediate=64, experts=16, top_k=4),
    ranks=8,
    tokens_per_rank=40,
    dtype=Dtype.BF16,
    routing=RoutingSpec.model_validate(
        {"zipf": 0.8, "masked": 0.2, "uneven": 0.5, "empty_ranks": 1}
    ),
)


def nodes(count, ranks=8):
    """``ranks`` ranks, spread evenly over nodes, in order."""
    return Topology.from_ranks(
        [RankPlace(node=str(r * count // ranks), host="h") for r in range(ranks)]
    )


def facts_of(work):
    routing = generate(work)
    return {
        "traffic": metrics.traffic_by_protocol(routing, work),
        "pairs": pair_facts(routing, work),
        "num_tokens": sum(routing.num_tokens),
    }


def moved(system_traffic, topology, options=()):
    cell = Cell("id", "cuda", "deepep", options, WORK, Regime.ISOLATED)
    return row_traffic(cell, system_traffic, facts_of(WORK), topology)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "traffic, options",
    [("per_route", ()), ("per_rank", ()), ("all", ()), ("per_rank", (("dispatch_dtype", "fp8"),))],
)
def test_the_parts_are_the_whole_and_the_whole_is_what_phases_say(count, traffic, options):
    found = moved(traffic, nodes(count), options)
    for kind in ("useful", "wire"):
        split = found[kind]
        phases = found[f"dispatch_{kind}_bytes"] + found[f"combine_{kind}_bytes"]
        assert phases > 0
        assert split.same_domain_bytes + split.cross_domain_bytes == phases
        assert split.cross_node_bytes == split.cross_domain_bytes
        assert (split.cross_domain_bytes == 0) == (count == 1)
        assert (split.same_domain_bytes == 0) == (count == 8)
        assert split.local_bytes > 0
    assert found["domains"] == count


def test_bytes_between_nodes_counted_route_by_route():
    routing = generate(WORK)
    routes, tokens = 0, 0
    for source, idx in enumerate(routing.topk_idx):
        for row in idx:
            owners = [int(e) // 2 for e in row if e >= 0]
            routes += sum(owner // 4 != source // 4 for owner in owners)
            tokens += sum(owner // 4 != source // 4 for owner in set(owners))
    found = moved("per_route", nodes(2))
    assert found["wire"].cross_node_bytes == routes * 256 * 2 * 2
    assert found["useful"].cross_node_bytes == tokens * 256 * 2 * 2
    fp8 = moved("per_rank", nodes(2), (("dispatch_dtype", "fp8"),))
    assert fp8["useful"].cross_node_bytes == tokens * (256 + 2 * 4 + 256 * 2)


def test_rows_that_cross_once_for_a_node_are_passed_on_by_the_rank_of_the_same_place():
    """Two nodes of two ranks; rank 0 has ten tokens, all with experts on ranks 1, 2 and 3."""
    per_rank = np.zeros((4, 4), dtype=np.int64)
    per_rank[0] = [4, 10, 10, 10]
    by_node = np.zeros((4, 2), dtype=np.int64)
    by_node[0] = [10, 10]
    rows = np.zeros((4, 4), dtype=np.int64)
    rows[0, 0] = 4  # stays
    rows[0, 1] = 10  # within the node
    rows[0, 2] = 10  # to the rank of its place, which keeps them
    rows[2, 3] = 10  # and passes them on
    assert np.array_equal(node_matrix(per_rank, by_node), rows)
    per_rank[0, 3] = 3
    per_rank[0, 2] = 0  # no expert of its own, it only passes on
    by_node[0, 1] = rows[0, 2] = rows[2, 3] = 3
    assert np.array_equal(node_matrix(per_rank, by_node), rows)


def test_deepep_over_a_network_crosses_less_than_each_rank_needs():
    work = replace(WORK, nodes=2)
    cell = Cell("id", "cuda", "deepep", (), work, Regime.ISOLATED)
    facts = facts_of(work)
    found = row_traffic(cell, "per_node", facts, nodes(2))
    row_bytes = 2 * 256 * 2
    tokens = sum(
        len({int(e) // 8 for e in row if e >= 0} - {source // 4})
        for source, idx in enumerate(generate(work).topk_idx)
        for row in idx
    )
    assert found["wire"].cross_node_bytes == tokens * row_bytes
    assert found["wire"].cross_node_bytes < found["useful"].cross_node_bytes
    total = found["dispatch_wire_bytes"] + found["combine_wire_bytes"]
    assert found["wire"].same_domain_bytes + found["wire"].cross_domain_bytes == total
    # Within a node, and within a rack, rows go straight to their ranks.
    assert moved("per_node", nodes(1)) == moved("per_rank", nodes(1))


def test_a_system_that_moves_nothing_has_no_bytes():
    assert moved(None, nodes(2)) is None


def test_a_split_that_is_not_that_of_the_bytes_is_refused():
    found = moved("per_route", nodes(2))
    total = found["dispatch_wire_bytes"] + found["combine_wire_bytes"]
    good = fake_record(traffic=found, ranks=8, nodes=2)
    assert parse_record("f:1", good.to_json().encode()) == good
    wrong = found["wire"].model_copy(update={"same_domain_bytes": 1})
    broken = fake_record(traffic=found | {"wire": wrong}, ranks=8, nodes=2)
    with pytest.raises(Exception, match=f"traffic.wire is split into .* is {total}"):
        parse_record("f:1", broken.to_json().encode())


def test_rows_of_an_older_mokbench_are_read():
    old = fake_record(record_version=4).to_dict()
    phases = ("dispatch", "combine")
    old["traffic"] = {f"{p}_{kind}_bytes": 7 for p in phases for kind in ("useful", "wire")}
    read = parse_record("f:1", json.dumps(old).encode())
    assert read.traffic is not None
    assert (read.traffic.wire, read.traffic.domains) == (None, None)


def test_a_rack_is_split_quickly():
    """72 ranks of 256 experts: the split costs a fraction of what drawing the routes does."""
    work = replace(
        WORK, ranks=72, model=replace(WORK.model, experts=288, top_k=8), tokens_per_rank=1024
    )
    start = time.perf_counter()
    facts = facts_of(work)
    drawn = time.perf_counter() - start
    cell = Cell("id", "cuda", "mok", (), work, Regime.ISOLATED)
    start = time.perf_counter()
    found = row_traffic(cell, "per_route", facts, nodes(18, 72))
    assert time.perf_counter() - start < max(0.05, drawn)
    assert found["domains"] == 18
    # Of the 71 other ranks, 68 are on other nodes, and routing is nearly even over nodes.
    wire = found["wire"]
    assert 0.8 < wire.cross_node_bytes / (wire.cross_node_bytes + wire.same_domain_bytes) < 1
