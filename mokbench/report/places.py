"""Where ranks were, and the bytes that went between NVLink domains and between nodes."""

from collections.abc import Iterator, Set

from mokbench.figures import TrafficSplit
from mokbench.record import Record
from mokbench.report import units
from mokbench.run_meta import RunMeta
from mokbench.topology import Topology

SAME_DOMAIN, CROSS_DOMAIN, CROSS_NODE = "in domain", "cross domain", "cross node"
_LEGENDS = {
    CROSS_DOMAIN: f"{SAME_DOMAIN}, {CROSS_DOMAIN}: wire bytes between ranks of one NVLink domain "
    "(on the host fabric: of one node), and between ranks of two.",
    CROSS_NODE: f"{CROSS_NODE}: wire bytes between ranks on two nodes, over NVLink or a network.",
}
_MOST_HOSTS = 4


def same_domain(record: Record) -> int | None:
    """Wire bytes within domains, of a row whose ranks are in several."""
    split = _split(record)
    return split.same_domain_bytes if split and _domains(record) > 1 else None


def cross_domain(record: Record) -> int | None:
    """Wire bytes between domains, of a row whose ranks are in several."""
    split = _split(record)
    return split.cross_domain_bytes if split and _domains(record) > 1 else None


def cross_node(record: Record) -> int | None:
    """Wire bytes between nodes, of a row whose ranks are on several."""
    split = _split(record)
    return split.cross_node_bytes if split and record.nodes > 1 else None


def legends(titles: Set[str]) -> list[str]:
    """What the columns of these titles mean."""
    return [text for title, text in _LEGENDS.items() if title in titles]


def lines(name: str, meta: RunMeta) -> Iterator[str]:
    """What must be known of a run whose ranks are on several nodes or in several domains."""
    for found in meta.topologies:
        if found.nodes > 1 or found.domains > 1:
            yield f"{name}: {_where(found)}"


def _where(found: Topology) -> str:
    ranks = units.count(found.ranks, "rank")
    hosts = ", ".join(found.hosts[:_MOST_HOSTS])
    more = f" and {found.nodes - _MOST_HOSTS} more" if found.nodes > _MOST_HOSTS else ""
    nodes = f"{ranks} on {units.count(found.nodes, 'node')} ({hosts}{more})"
    if not found.gpu_of_rank:
        return nodes
    gpus = units.count(len(found.gpus), "GPU")
    return f"{nodes}, {gpus}, {units.count(found.domains, 'NVLink domain')}"


def _split(record: Record) -> TrafficSplit | None:
    return None if record.traffic is None else record.traffic.wire


def _domains(record: Record) -> int:
    return (record.traffic.domains if record.traffic else None) or 1
