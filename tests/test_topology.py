"""Nodes, GPUs and domains of ranks from what each rank sees, and bytes split by them."""

import numpy as np
import pytest
from fake_nvml import Box
from pydantic import ValidationError

from mokbench.errors import MokbenchError
from mokbench.gpus import Gpus, read_gpus
from mokbench.routing import RoutingSpec
from mokbench.topology import (
    RankPlace,
    Topology,
    describe_rank,
    describe_ranks,
    node_identity,
    one_machine,
    placed,
    split_bytes,
)
from mokbench.workload import Cell, Dtype, Model, Regime, Workload

HOST = [RankPlace(node=node, host=node) for node in ("a", "a", "b", "b")]


def gpu_node(node, gpus=2, linked=True, mnnvl=None, rdma=True):
    """Ranks of one node, a GPU each."""
    names = [f"GPU-{node}{i}" for i in range(gpus)]
    return [
        RankPlace(
            node=node,
            host=f"host-{node}",
            gpu=name,
            nvlink_peers=tuple(other for other in names if linked and other != name),
            mnnvl=mnnvl,
            rdma=rdma,
        )
        for name in names
    ]


def test_hosts_of_the_host_fabric_are_nodes_and_domains():
    found = Topology.from_ranks(HOST)
    assert found.node_of_rank == found.domain_of_rank == (0, 0, 1, 1)
    assert (found.gpu_of_rank, found.gpus, found.hosts) == ((), (), ("a", "b"))
    assert (found.ranks, found.nodes, found.domains, found.is_mnnvl) == (4, 2, 2, False)


@pytest.mark.parametrize(
    "places, nodes, domains, link",
    [
        (gpu_node("a"), (0, 0), (0, 0), "within"),
        (gpu_node("a", linked=False), (0, 0), (0, 1), "within"),
        (gpu_node("a") + gpu_node("b"), (0, 0, 1, 1), (0, 0, 1, 1), "rdma"),
        (gpu_node("a") + gpu_node("b", rdma=False), (0, 0, 1, 1), (0, 0, 1, 1), "tcp"),
        (gpu_node("a", mnnvl="c-1") + gpu_node("b", mnnvl="c-1"), (0, 0, 1, 1), (0,) * 4, "mnnvl"),
        # Another clique of the same cluster is out of NVLink's reach.
        (
            gpu_node("a", mnnvl="c-1") + gpu_node("b", mnnvl="c-2"),
            (0, 0, 1, 1),
            (0, 0, 1, 1),
            "rdma",
        ),
    ],
)
def test_domains_are_what_nvlink_joins(places, nodes, domains, link):
    found = Topology.from_ranks(places)
    assert found.node_of_rank == nodes
    assert found.gpu_of_rank == tuple(range(len(places)))
    assert found.domain_of_rank == domains
    assert found.is_mnnvl == (link == "mnnvl")
    assert found.link(lambda ranks: "within" if ranks == 2 else "wrong") == link


def test_ranks_of_one_gpu_are_in_one_domain_without_nvlink():
    shared = gpu_node("a", gpus=1) * 3
    found = Topology.from_ranks([*shared, *gpu_node("b", gpus=1)])
    assert found.gpu_of_rank == found.domain_of_rank == (0, 0, 0, 1)
    assert found.gpus == ("GPU-a0", "GPU-b0")


def test_ranks_need_not_stand_node_by_node():
    a, b = gpu_node("a"), gpu_node("b")
    found = Topology.from_ranks([a[0], b[0], a[1], b[1]])
    assert found.node_of_rank == found.domain_of_rank == (0, 1, 0, 1)
    assert found.hosts == ("host-a", "host-b")


def test_bridges_join_by_chains():
    """Four GPUs, of which NVLink connects 0-1 and 1-2 alone."""
    names = [f"GPU-{i}" for i in range(4)]
    peers = [names[1:2], [names[0], names[2]], names[1:2], []]
    found = Topology.from_ranks(
        [
            RankPlace(node="a", host="a", gpu=name, nvlink_peers=tuple(linked))
            for name, linked in zip(names, peers, strict=True)
        ]
    )
    assert found.domain_of_rank == (0, 0, 0, 1)


def test_fewer_ranks_have_the_topology_of_the_first():
    full = Topology.from_ranks(gpu_node("a") + gpu_node("b") + gpu_node("c"))
    for ranks in range(1, 7):
        part = full.first(ranks)
        assert part.node_of_rank == full.node_of_rank[:ranks]
        assert (part.nodes, part.domains) == (-(-ranks // 2),) * 2
        assert part.hosts == full.hosts[: part.nodes]
        assert part.gpus == full.gpus[:ranks]
    assert full.first(6) == full
    assert Topology.from_ranks(HOST).first(3).hosts == ("a", "b")


def test_ranks_of_two_fabrics_are_refused():
    with pytest.raises(MokbenchError, match=r"ranks \[2\] see no GPU.*set fabric: host"):
        Topology.from_ranks([*gpu_node("a"), HOST[0]])


@pytest.mark.parametrize(
    "change",
    [
        {"node_of_rank": [0, 0, 2, 2]},
        {"domain_of_rank": [0, 0, 1]},
        {"domain_of_rank": [1, 1, 0, 0]},
        {"hosts": ["a"]},
        {"gpu_of_rank": [0, 1, 2, 3]},
        {"gpu_of_rank": [0, 2, 1, 3], "gpus": ["1", "2", "3", "4"]},
    ],
)
def test_a_stored_topology_that_cannot_be_is_refused(change):
    stored = Topology.from_ranks(HOST).model_dump()
    assert Topology.model_validate(stored).model_dump() == stored
    with pytest.raises(ValidationError):
        Topology.model_validate(stored | change)


def test_differences_name_what_differs_and_not_the_hosts():
    found = Topology.from_ranks(HOST)
    renamed = [RankPlace(node=p.node * 2, host="other") for p in HOST]
    assert found.differs(Topology.from_ranks(renamed)) is None
    moved = Topology.from_ranks([HOST[0], *HOST[2:], HOST[3]])
    assert found.differs(moved) == "node_of_rank [0, 0, 1, 1] against [0, 1, 1, 1]"


def test_bytes_split_by_hand():
    moved = np.array([[1, 2, 4, 8], [16, 32, 64, 128], [256, 512, 1024, 2048], [0, 0, 4096, 8192]])
    rack = Topology.from_ranks(
        gpu_node("a", 1, mnnvl="c") + gpu_node("b", 1, mnnvl="c") + gpu_node("d")
    )
    assert rack.domain_of_rank == (0, 0, 1, 1)
    split = split_bytes(moved, rack)
    assert split.local_bytes == 1 + 32 + 1024 + 8192
    assert split.same_domain_bytes == 2 + 16 + 2048 + 4096
    assert split.cross_domain_bytes == 4 + 8 + 64 + 128 + 256 + 512
    # Ranks 0 and 1 share the domain and not the node.
    assert split.cross_node_bytes == split.cross_domain_bytes + 2 + 16
    whole = split_bytes(moved, one_machine("host", Gpus())(4))
    assert whole.cross_domain_bytes == whole.cross_node_bytes == 0
    assert whole.local_bytes + whole.same_domain_bytes == moved.sum()


def identity(folder, boot="b", net="net:[1]", ipc="ipc:[1]"):
    (folder / "proc/sys/kernel/random").mkdir(parents=True)
    (folder / "proc/self/ns").mkdir(parents=True)
    (folder / "proc/sys/kernel/random/boot_id").write_text(f"{boot}\n")
    (folder / "proc/self/ns/net").symlink_to(net)
    (folder / "proc/self/ns/ipc").symlink_to(ipc)
    return node_identity(folder)


def test_a_node_is_a_boot_in_its_namespaces(tmp_path, monkeypatch):
    plain = identity(tmp_path / "plain")
    assert identity(tmp_path / "same") == plain
    others = [
        identity(tmp_path / "boot", boot="c"),
        identity(tmp_path / "net", net="net:[2]"),
        identity(tmp_path / "ipc", ipc="ipc:[2]"),
        node_identity(tmp_path / "without proc"),
    ]
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    others.append(identity(tmp_path / "name"))
    assert len({plain, *others}) == 6


def test_this_machines_ranks_are_on_one_node():
    places = describe_ranks("host", 3, Gpus())
    assert places == [describe_rank("host", rank, 3, Gpus()) for rank in range(3)]
    found = Topology.from_ranks(places)
    assert found.node_of_rank == found.domain_of_rank == (0, 0, 0)


def test_gpus_are_those_that_cuda_shows(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    Box(gpus=4).install(monkeypatch)
    gpus = read_gpus()
    topology = one_machine("cuda", gpus)
    assert topology(4).gpus == ("GPU-0", "GPU-1", "GPU-2", "GPU-3")
    assert topology(8).gpu_of_rank == (0, 0, 1, 1, 2, 2, 3, 3)
    assert topology(8).domain_of_rank == (0,) * 8
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-1")
    assert one_machine("cuda", gpus)(4).gpus == ("GPU-3", "GPU-1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert one_machine("cuda", gpus)(2).nodes == 1  # a plan, made where no GPU is shown


def test_domains_of_a_machine_follow_its_bridges(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    apart = {(a, b, 2): 5 for a in range(4) for b in range(4) if a // 2 != b // 2}
    Box(gpus=4, peer=apart).install(monkeypatch)
    assert one_machine("cuda", read_gpus())(4).domain_of_rank == (0, 0, 1, 1)
    Box(gpus=2, links=None).install(monkeypatch)
    assert one_machine("cuda", read_gpus())(2).domain_of_rank == (0, 1)


@pytest.mark.parametrize(
    "cluster, fabric, mnnvl", [(9, (3, 0), True), (0, (3, 0), False), (9, (2, 0), False)]
)
def test_only_a_joined_fabric_with_a_cluster_is_multi_node(monkeypatch, cluster, fabric, mnnvl):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    Box(gpus=2, cluster=cluster, fabric=fabric).install(monkeypatch)
    name = f"{9:02x}{'00' * 15}-7" if mnnvl else None
    assert [place.mnnvl for place in describe_ranks("cuda", 2, read_gpus())] == [name] * 2


def test_cells_know_their_nodes():
    work = Workload(Model("m", 64, 64, 8, 2), 2, 4, Dtype.BF16, RoutingSpec())
    cells = [
        Cell(f"r{ranks}", "cuda", "push", (), Workload(**{**vars(work), "ranks": ranks}), regime)
        for ranks, regime in ((2, Regime.ISOLATED), (4, Regime.STEADY))
    ]
    rack = Topology.from_ranks(gpu_node("a", mnnvl="c") + gpu_node("b", mnnvl="c"))
    made = placed(cells, rack.first)
    assert [(cell.workload.nodes, cell.workload.mnnvl) for cell in made] == [(1, False), (2, True)]
    assert [cell.id for cell in made] == ["r2", "r4"]
    assert Cell.from_dict(made[1].to_dict()) == made[1]
