"""Bytes of a row: by phase, and by how far they go on the ranks' nodes and domains."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mokbench import metrics
from mokbench.figures import TrafficSplit
from mokbench.topology import Topology, split_bytes
from mokbench.workload import Cell, Workload

if TYPE_CHECKING:
    from mokbench.routing import Routing


def pair_facts(routing: "Routing", workload: Workload) -> dict[str, Any]:
    """What the split of a row is made of: rows between ranks, int64 [ranks, ranks], and tokens.

    ``per_route`` counts routes, ``per_rank`` tokens, from the row's rank to the column's, own
    ranks included; ``tokens`` are those of each rank.
    """
    experts, ranks = workload.model.experts, workload.ranks
    return {
        "per_route": metrics.route_matrix(routing, experts, ranks),
        "per_rank": metrics.token_matrix(routing, experts, ranks),
        "tokens": list(routing.num_tokens),
    }


def row_traffic(
    cell: Cell, moved: str | None, facts: dict[str, Any], topology: Topology
) -> dict[str, Any] | None:
    """Fields of ``figures.Traffic``; None for a system that moves nothing.

    ``moved`` is the system's ``traffic``, ``facts`` are those of the workload
    (``GroupRun.workload_facts``).
    """
    if moved is None:
        return None
    protocol = "per_rank" if moved == "all" else moved
    if cell.dispatch_dtype != cell.workload.dtype:
        protocol += f".{cell.dispatch_dtype}"
    found = metrics.Traffic(**facts["traffic"][protocol])
    if moved == "all":
        found = metrics.traffic_to_all(found, cell.workload, facts["num_tokens"])
    by_phase = {f"{phase}_bytes": count for phase, count in asdict(found).items()}
    return by_phase | {
        "useful": _split(cell, facts["pairs"]["per_rank"], topology),
        "wire": _split(cell, _wire_rows(moved, facts["pairs"]), topology),
        "domains": topology.domains,
    }


def _wire_rows(moved: str, pairs: dict[str, Any]) -> NDArray[np.int64]:
    """Rows that go from the row's rank to the column's in dispatch, and back in combine."""
    if moved != "all":
        rows: NDArray[np.int64] = pairs[moved]
        return rows
    tokens = np.asarray(pairs["tokens"], dtype=np.int64)
    return np.repeat(tokens[:, None], len(tokens), axis=1)


def _split(cell: Cell, rows: NDArray[np.int64], topology: Topology) -> TrafficSplit:
    """Dispatch and combine together: what goes out by one pair comes back by the same."""
    work = cell.workload
    plain = metrics.WireFormat(work.dtype.num_bytes)
    scaled = cell.dispatch_dtype == "fp8"
    row_bytes = (metrics.FP8 if scaled else plain).row_bytes(work.model.hidden)
    return split_bytes(rows * (row_bytes + plain.row_bytes(work.model.hidden)), topology)
