"""Which systems run on which topologies, with the reason where they do not."""

import pytest

from mokbench import reach
from mokbench.reach import maps_peers, reach_reason
from mokbench.routing import RoutingSpec
from mokbench.systems import system_class
from mokbench.systems.options import SYSTEM_OPTIONS
from mokbench.topology import RankPlace, Topology, placed
from mokbench.workload import Cell, Dtype, Model, Regime, Workload

MEANS = ("memory", "collectives", "elastic", "legacy")
MODEL = Model("m", hidden=2048, intermediate=768, experts=128, top_k=8)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """A plan: the machine is another."""
    monkeypatch.setattr(reach, "visible_gpus", lambda: 0)
    return monkeypatch


def ranks_on(*nodes, mnnvl=None, gpu=True, shared=False):
    """A rank on each node named; ``shared`` ranks of a node have one GPU."""
    return Topology.from_ranks(
        [
            RankPlace(
                node=node,
                host=node,
                gpu=f"GPU-{node}-{0 if shared else rank}" if gpu else None,
                mnnvl=mnnvl,
            )
            for rank, node in enumerate(nodes)
        ]
    )


def cell(topology, system="mok", fabric="cuda"):
    work = Workload(MODEL, topology.ranks, 128, Dtype.BF16, RoutingSpec())
    (made,) = placed([Cell("c", fabric, system, (), work, Regime.ISOLATED)], lambda ranks: topology)
    return made


def reasons(topology, fabric="cuda"):
    return {means: reach_reason(cell(topology, fabric=fabric), means, "it") for means in MEANS}


@pytest.mark.parametrize(
    "topology, fabric",
    [
        (ranks_on("a", "a", "a", "a"), "cuda"),
        (ranks_on("a", "a", "a", "a", shared=True), "cuda"),
        (ranks_on("a", "a", gpu=False), "host"),
        (ranks_on("a"), "cuda"),
    ],
)
def test_one_node_is_reached_by_all_means(topology, fabric):
    assert set(reasons(topology, fabric).values()) == {None}
    assert maps_peers(cell(topology).workload)


def test_a_rack_of_one_nvlink_domain_is_reached_through_memory():
    rack = ranks_on("a", "a", "b", "b", "c", "c", mnnvl="cluster-1")
    found = reasons(rack)
    assert found["memory"] is found["collectives"] is found["elastic"] is None
    assert "legacy Buffer is driven within one node only" in found["legacy"]
    assert maps_peers(cell(rack).workload)


def test_two_nodes_that_a_network_joins_are_reached_by_collectives_and_deepep():
    found = reasons(ranks_on("a", "a", "b", "b"))
    assert found["collectives"] is found["elastic"] is None
    assert found["memory"].startswith("it works in its peers' memory over NVLink, no NVLink domain")
    assert "joins the 2 nodes" in found["memory"]
    assert found["memory"].endswith("or alltoall and deepep over several")
    assert not maps_peers(cell(ranks_on("a", "b")).workload)


def test_two_racks_are_no_rack():
    racks = [RankPlace(node=n, host=n, gpu=n, mnnvl=f"cluster-{n in 'cd'}") for n in "abcd"]
    found = reasons(Topology.from_ranks(racks))
    assert "no RDMA path yet" in found["memory"]
    assert "4 nodes" in found["memory"]


def test_hosts_share_no_memory():
    found = reasons(ranks_on("a", "b", gpu=False), "host")
    assert found["collectives"] is None
    assert "which processes share within one node only" in found["memory"]


def test_gpus_are_not_shared_over_several_nodes(no_gpu):
    no_gpu.setattr(reach, "visible_gpus", lambda: 2)
    found = reasons(ranks_on(*"aaabbb", mnnvl="c-1"))
    assert all("3 ranks a node are more than the 2 GPUs here" in found[means] for means in MEANS)
    found = reasons(ranks_on(*"aabb", mnnvl="c-1"))
    assert [means for means in MEANS if found[means]] == ["legacy"]


def test_deepep_wants_as_many_ranks_on_every_node():
    found = reasons(ranks_on("a", "a", "b"))
    assert "3 ranks on 2 nodes are not; start as many on each" in found["elastic"]
    assert found["collectives"] is None


@pytest.mark.parametrize("system", ["mok", "push"])
@pytest.mark.parametrize("fabric", ["host", "cuda"])
def test_systems_that_work_in_memory_refuse_what_memory_does_not_reach(system, fabric):
    apart = cell(ranks_on("a", "b", gpu=fabric == "cuda"), system, fabric)
    reason = system_class(system, fabric).supports(apart)
    assert reason == reach_reason(apart, "memory", system)
    assert reason is not None


def test_every_system_says_something_of_two_hosts():
    """On the host fabric alltoall alone goes over several nodes."""
    apart = ranks_on("a", "b", gpu=False)
    able = {
        name
        for name in SYSTEM_OPTIONS
        if system_class(name).supports(cell(apart, name, "host")) is None
    }
    assert able == {"alltoall"}


def test_a_rack_runs_what_one_node_runs():
    rack, node = ranks_on(*"aabb", mnnvl="c-1"), ranks_on(*"aaaa")
    for name in ("mok", "push", "alltoall"):
        supports = system_class(name, "cuda").supports
        assert supports(cell(rack, name)) == supports(cell(node, name))
