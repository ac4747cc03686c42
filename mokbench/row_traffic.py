"""Bytes of a row: by phase, and by how far they go on the ranks' nodes and domains."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mokbench import metrics
from mokbench.figures import TrafficSplit
from mokbench.reach import maps_peers
from mokbench.topology import Topology, split_bytes
from mokbench.workload import Cell, Workload

if TYPE_CHECKING:
    from mokbench.routing import Routing


def pair_facts(routing: "Routing", workload: Workload) -> dict[str, Any]:
    """What the split of a row is made of: rows between ranks, int64 [ranks, ranks], and tokens.

    ``per_route`` counts routes, ``per_rank`` tokens, from the row's rank to the column's, own
    ranks included; ``tokens`` are those of each rank. ``per_node`` is there where only a network
    joins nodes of equally many ranks.
    """
    experts, ranks = workload.model.experts, workload.ranks
    per_rank = metrics.token_matrix(routing, experts, ranks)
    facts: dict[str, Any] = {
        "per_route": metrics.route_matrix(routing, experts, ranks),
        "per_rank": per_rank,
        "tokens": list(routing.num_tokens),
    }
    if not maps_peers(workload) and ranks % workload.nodes == 0:
        by_node = metrics.token_matrix(routing, experts, workload.nodes)
        facts["per_node"] = node_matrix(per_rank, by_node)
    return facts


def node_matrix(per_rank: NDArray[np.int64], by_node: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows from rank to rank, int64 [ranks, ranks], where a token crosses once for each node.

    It goes to the rank of its own place there, and that one passes it on to each rank of the node
    that has an expert of it. ``by_node`` [ranks, nodes] are the tokens that have an expert on a
    node; nodes have equally many ranks, one node's after another's.
    """
    ranks, nodes = by_node.shape
    place = ranks // nodes
    rows = np.zeros((ranks, ranks), dtype=np.int64)
    for source in range(ranks):
        # The rank of its own place on every node; on its own node that is itself.
        passing_on = np.arange(nodes) * place + source % place
        rows[source, passing_on] += by_node[source]
        rows[source, source] += per_rank[source, source] - by_node[source, source // place]
        onward = per_rank[source].reshape(nodes, place).copy()
        # What is for the passing rank itself has arrived, and is no further row.
        onward[:, source % place] = 0
        for node, passing in enumerate(passing_on):
            rows[passing, node * place : (node + 1) * place] += onward[node]
    return rows


def row_traffic(
    cell: Cell, moved: str | None, facts: dict[str, Any], topology: Topology
) -> dict[str, Any] | None:
    """Fields of ``figures.Traffic``; None for a system that moves nothing.

    ``moved`` is the system's ``traffic``, ``facts`` are those of the workload
    (``GroupRun.workload_facts``).
    """
    if moved is None:
        return None
    if moved == "per_node" and "per_node" not in facts["pairs"]:
        moved = "per_rank"
    protocol = moved if moved == "per_route" else "per_rank"
    if cell.dispatch_dtype != cell.workload.dtype:
        protocol += f".{cell.dispatch_dtype}"
    found = metrics.Traffic(**facts["traffic"][protocol])
    dispatch_row, combine_row = _row_bytes(cell)
    wire_rows = _wire_rows(moved, facts["pairs"])
    if moved == "all":
        found = metrics.traffic_to_all(found, cell.workload, facts["num_tokens"])
    elif moved == "per_node":
        crossing = int(wire_rows.sum() - np.trace(wire_rows))
        found = replace(
            found, dispatch_wire=crossing * dispatch_row, combine_wire=crossing * combine_row
        )
    by_phase = {f"{phase}_bytes": count for phase, count in asdict(found).items()}
    # What goes out by one pair comes back by the same.
    both = dispatch_row + combine_row
    split: dict[str, TrafficSplit] = {
        "useful": split_bytes(facts["pairs"]["per_rank"] * both, topology),
        "wire": split_bytes(wire_rows * both, topology),
    }
    return {**by_phase, **split, "domains": topology.domains}


def _wire_rows(moved: str, pairs: dict[str, Any]) -> NDArray[np.int64]:
    """Rows that go from the row's rank to the column's in dispatch, and back in combine."""
    if moved != "all":
        rows: NDArray[np.int64] = pairs[moved]
        return rows
    tokens = np.asarray(pairs["tokens"], dtype=np.int64)
    return np.repeat(tokens[:, None], len(tokens), axis=1)


def _row_bytes(cell: Cell) -> tuple[int, int]:
    """Bytes of a row in dispatch and in combine."""
    hidden = cell.workload.model.hidden
    plain = metrics.WireFormat(cell.workload.dtype.num_bytes).row_bytes(hidden)
    scaled = cell.dispatch_dtype == "fp8"
    return metrics.FP8.row_bytes(hidden) if scaled else plain, plain
