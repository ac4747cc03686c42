"""Which ranks share a node, a GPU, an NVLink domain; what of their traffic stays inside of one.

A *node* is a kernel as one set of namespaces sees it: boot id, host name, network and IPC
namespace. Two containers of one machine are two nodes, since neither shared memory nor the file
descriptors of CUDA memory pass between them.

A *domain* is what NVLink joins: GPUs of a node with NVLink between them, or all GPUs of a
multi-node NVLink (MNNVL) clique. Ranks of one GPU are in one domain. Ranks without a GPU, on the
host fabric, are in their node's.
"""

import contextlib
import socket
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from mokbench.errors import MokbenchError
from mokbench.figures import Figures, Link, TrafficSplit
from mokbench.gpus import Gpus, read_gpus
from mokbench.machine import has_nic
from mokbench.workload import Cell

_BOOT_ID = Path("proc/sys/kernel/random/boot_id")
_NAMESPACES = Path("proc/self/ns")


class RankPlace(Figures):
    """Where one rank runs, as its own process sees it; ranks send theirs to one another.

    ``gpu`` is a UUID, null on the host fabric. ``nvlink_peers`` are the UUIDs of its node's GPUs
    that NVLink connects it with. ``mnnvl`` names the multi-node NVLink clique it has joined, null
    where it is in none. ``rdma``: the node has an InfiniBand or RoCE device.
    """

    node: str
    host: str
    gpu: str | None = None
    nvlink_peers: tuple[str, ...] = ()
    mnnvl: str | None = None
    rdma: bool = False


class Topology(Figures):
    """Nodes, GPUs and domains of the ranks by number, from 0 in the order of their first ranks.

    ``gpu_of_rank`` and ``gpus`` (UUIDs) are empty on the host fabric. ``hosts`` are the nodes'
    host names. ``rdma``: every node has an InfiniBand or RoCE device.
    """

    node_of_rank: tuple[int, ...] = Field(min_length=1)
    gpu_of_rank: tuple[int, ...] = ()
    domain_of_rank: tuple[int, ...]
    hosts: tuple[str, ...]
    gpus: tuple[str, ...] = ()
    rdma: bool = False

    @model_validator(mode="after")
    def _sound(self) -> Self:
        ranks = len(self.node_of_rank)
        for name, numbers in (("node", self.node_of_rank), ("domain", self.domain_of_rank)):
            if len(numbers) != ranks or list(numbers) != _numbered(numbers):
                raise ValueError(f"{name}_of_rank is not one of {ranks} ranks in their order")
        if self.gpu_of_rank and (
            len(self.gpu_of_rank) != ranks or list(self.gpu_of_rank) != _numbered(self.gpu_of_rank)
        ):
            raise ValueError(f"gpu_of_rank is not one of {ranks} ranks in their order")
        if len(self.hosts) != self.nodes or len(self.gpus) != len(set(self.gpu_of_rank)):
            raise ValueError("hosts name the nodes and gpus the GPUs, one each")
        return self

    @classmethod
    def from_ranks(cls, places: Sequence[RankPlace]) -> Self:
        """What the descriptions of all ranks, in the order of ranks, say of them together.

        Raises MokbenchError where only some have a GPU: those ranks are not on one fabric.
        """
        with_gpu = [place.gpu for place in places if place.gpu is not None]
        if with_gpu and len(with_gpu) < len(places):
            lacking = [rank for rank, place in enumerate(places) if place.gpu is None]
            raise MokbenchError(
                f"ranks {lacking} see no GPU and others do; give every rank one, or set "
                "fabric: host"
            )
        return cls(
            node_of_rank=tuple(_numbered([place.node for place in places])),
            gpu_of_rank=tuple(_numbered(with_gpu)),
            domain_of_rank=tuple(_numbered(_domains(places))),
            hosts=tuple({place.node: place.host for place in places}.values()),
            gpus=tuple(dict.fromkeys(with_gpu)),
            rdma=all(place.rdma for place in places),
        )

    @property
    def ranks(self) -> int:
        """How many ranks it is of."""
        return len(self.node_of_rank)

    @property
    def nodes(self) -> int:
        """Nodes that have a rank."""
        return len(set(self.node_of_rank))

    @property
    def domains(self) -> int:
        """NVLink domains that have a rank; on the host fabric, nodes."""
        return len(set(self.domain_of_rank))

    @property
    def is_mnnvl(self) -> bool:
        """Whether one NVLink domain joins the ranks of several nodes."""
        return self.nodes > 1 and self.domains == 1 and bool(self.gpu_of_rank)

    def local(self, rank: int) -> tuple[int, int]:
        """A rank's number among those of its node, and how many these are."""
        node = self.node_of_rank[rank]
        return self.node_of_rank[:rank].count(node), self.node_of_rank.count(node)

    @property
    def is_even(self) -> bool:
        """Whether nodes have equally many ranks, one node's after another's."""
        share = self.ranks // self.nodes
        return list(self.node_of_rank) == [rank // share for rank in range(self.ranks)]

    def first(self, ranks: int) -> "Topology":
        """That of the first ``ranks`` ranks alone, which a smaller number of ranks runs on."""
        places = range(min(ranks, self.ranks))
        gpus = [self.gpu_of_rank[rank] for rank in places] if self.gpu_of_rank else []
        nodes = [self.node_of_rank[rank] for rank in places]
        return Topology(
            node_of_rank=tuple(nodes),
            gpu_of_rank=tuple(gpus),
            domain_of_rank=self.domain_of_rank[: len(nodes)],
            # Numbers follow the first ranks, so those of fewer ranks are the smallest.
            hosts=self.hosts[: len(set(nodes))],
            gpus=self.gpus[: len(set(gpus))],
            rdma=self.rdma,
        )

    def link(self, within: Callable[[int], str]) -> Link:
        """What lies between the ranks: the slowest; ``within`` a node, by its number of ranks."""
        if self.nodes == 1:
            return within(self.ranks)  # type: ignore[return-value]
        if self.is_mnnvl:
            return "mnnvl"
        return "rdma" if self.rdma and self.gpu_of_rank else "tcp"

    def differs(self, other: "Topology") -> str | None:
        """What of the shape of two topologies of one number of ranks differs, host names apart."""
        for name in ("node_of_rank", "gpu_of_rank", "domain_of_rank"):
            mine, its = getattr(self, name), getattr(other, name)
            if mine != its:
                return f"{name} {list(mine)} against {list(its)}"
        return None


def split_bytes(moved: NDArray[np.int64], topology: Topology) -> TrafficSplit:
    """Split bytes [ranks, ranks] from the row's to the column's rank; exact."""
    local = int(np.trace(moved))
    total = int(moved.sum())
    cross_domain = int(moved[_apart(topology.domain_of_rank)].sum())
    return TrafficSplit(
        local_bytes=local,
        same_domain_bytes=total - local - cross_domain,
        cross_domain_bytes=cross_domain,
        cross_node_bytes=int(moved[_apart(topology.node_of_rank)].sum()),
    )


def describe_ranks(fabric: str, local_ranks: int, gpus: Gpus) -> list[RankPlace]:
    """Where each of the ranks of this node is; neighbours share a GPU where there are too few."""
    node, host, rdma = node_identity(), socket.gethostname(), has_nic()
    if fabric == "host":
        return [RankPlace(node=node, host=host, rdma=rdma)] * local_ranks
    share = gpus.ranks_per_gpu(local_ranks)
    made = []
    for rank in range(local_ranks):
        uuid = gpus.uuid(rank // share)
        made.append(
            RankPlace(
                node=node,
                host=host,
                # Where NVML tells no UUID, the device's number tells the node's GPUs apart.
                gpu=uuid or f"{node}/{rank // share}",
                nvlink_peers=gpus.linked_to(uuid),
                mnnvl=gpus.mnnvl_domain(uuid),
                rdma=rdma,
            )
        )
    return made


def describe_rank(fabric: str, local_rank: int, local_ranks: int, gpus: Gpus) -> RankPlace:
    """Where this process's rank is: number ``local_rank`` of the ``local_ranks`` of its node."""
    return describe_ranks(fabric, local_ranks, gpus)[local_rank]


def together(fabric: str, rank: int, gather: Callable[[object], list[Any]]) -> Topology:
    """Topology of ranks that can already talk; collective, the same on every rank.

    ``gather`` gives every rank's value, by rank, on every rank.
    """
    nodes = gather(node_identity())
    local_rank, local_ranks = nodes[:rank].count(nodes[rank]), nodes.count(nodes[rank])
    gpus = read_gpus() if fabric == "cuda" else Gpus()
    return Topology.from_ranks(gather(describe_rank(fabric, local_rank, local_ranks, gpus)))


def node_identity(root: Path = Path("/")) -> str:
    """Equal on two ranks where they are on one node as the module defines it.

    The host name alone where the system has no /proc. ``root`` is for tests.
    """
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append((root / _BOOT_ID).read_text(encoding="ascii").strip())
        parts += [str((root / _NAMESPACES / name).readlink()) for name in ("net", "ipc")]
    return " ".join(parts)


def placed(cells: Iterable[Cell], topology: Callable[[int], Topology]) -> list[Cell]:
    """``cells`` with the nodes that their ranks are on; ``topology`` by number of ranks.

    Ids stay: they name what was asked for, and a run has one topology for a number of ranks.
    """
    made = []
    for cell in cells:
        found = topology(cell.workload.ranks)
        work = replace(cell.workload, nodes=found.nodes, mnnvl=found.is_mnnvl)
        made.append(replace(cell, workload=work))
    return made


def one_machine(fabric: str, gpus: Gpus) -> Callable[[int], Topology]:
    """Topologies, by number of ranks, of ranks that this command starts, all on this node."""
    known: dict[int, Topology] = {}

    def topology(ranks: int) -> Topology:
        if ranks not in known:
            known[ranks] = Topology.from_ranks(describe_ranks(fabric, ranks, gpus))
        return known[ranks]

    return topology


def _domains(places: Sequence[RankPlace]) -> list[int]:
    """A number for each rank, equal for ranks that a chain of shared names connects."""
    parent: dict[Hashable, Hashable] = {}

    def root(name: Hashable) -> Hashable:
        while parent.setdefault(name, name) != name:
            name = parent[name]
        return name

    for place in places:
        own: Hashable = ("node", place.node) if place.gpu is None else ("gpu", place.gpu)
        joined = [("gpu", peer) for peer in place.nvlink_peers]
        joined += [("mnnvl", place.mnnvl)] if place.mnnvl else []
        for name in joined if place.gpu is not None else ():
            parent[root(name)] = root(own)
    return _numbered([root(("node", p.node) if p.gpu is None else ("gpu", p.gpu)) for p in places])


def _numbered(names: Sequence[Hashable]) -> list[int]:
    """Each name's place among the different names, by first appearance."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(name, len(numbers)) for name in names]


def _apart(numbers: Sequence[int]) -> NDArray[np.bool_]:
    """[ranks, ranks]: whether two ranks have different numbers."""
    column = np.asarray(numbers)[:, None]
    apart: NDArray[np.bool_] = column != column.T
    return apart
