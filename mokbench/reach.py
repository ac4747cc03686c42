"""What a system can reach: the ways that lead from one rank to the others, and who takes which.

| ranks are on | memory (mok, push) | collectives (alltoall) | elastic | legacy (deepep) |
|---|---|---|---|---|
| host fabric, one node | shared memory | gloo | | |
| host fabric, several nodes | no | gloo | | |
| cuda fabric, one node | symmetric memory, by file descriptor | NCCL | NVLink | NVLink |
| cuda fabric, nodes of one MNNVL domain | the same, by fabric handle | NCCL | NVLink | no |
| cuda fabric, several nodes otherwise | no | NCCL | RDMA, then NVLink | no |

Handles are torch's choice: its symmetric memory exports fabric handles where the driver gives them.
Over several nodes of the cuda fabric nothing was run yet, see docs/multi-node.md.
"""

from typing import Literal

from mokbench.gpus import ranks_a_gpu, visible_gpus
from mokbench.workload import Cell, Workload

Means = Literal["memory", "collectives", "elastic", "legacy"]


def maps_peers(work: Workload) -> bool:
    """Whether every rank reaches every other's memory with loads and stores."""
    return work.nodes == 1 or work.mnnvl


def reach_reason(cell: Cell, means: Means, what: str) -> str | None:
    """Why ``what`` cannot get from each rank to every other by its means, or None; and what can."""
    work = cell.workload
    if work.nodes == 1:
        return None
    if means == "memory" and not maps_peers(work):
        return _no_memory(cell, what)
    if cell.fabric == "host":
        return None
    ranks, gpus = -(-work.ranks // work.nodes), visible_gpus()
    # Without a GPU this is a plan, and the machine it is for is another.
    if gpus and ranks_a_gpu(ranks, gpus) > 1:
        return (
            f"over several nodes every rank needs a GPU of its own, and {ranks} ranks a node are "
            f"more than the {gpus} GPUs here; use fewer ranks, or more nodes"
        )
    if means == "legacy":
        return (
            "DeepEP's legacy Buffer is driven within one node only; use one node, or api: elastic "
            "over several"
        )
    if means == "elastic" and work.ranks % work.nodes:
        return (
            f"DeepEP needs as many ranks on every node, and {work.ranks} ranks on {work.nodes} "
            "nodes are not; start as many on each"
        )
    return None


def _no_memory(cell: Cell, what: str) -> str:
    nodes = cell.workload.nodes
    if cell.fabric == "host":
        return (
            f"{what} works in its peers' memory, which processes share within one node only, and "
            f"the ranks are on {nodes} nodes; use one node, or alltoall over several"
        )
    return (
        f"{what} works in its peers' memory over NVLink, no NVLink domain joins the {nodes} nodes "
        "of these ranks, and it has no RDMA path yet; use one node or one MNNVL domain, or "
        "alltoall and deepep over several"
    )
