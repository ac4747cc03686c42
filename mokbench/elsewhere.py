"""Why a cell cannot run on a machine that is not this one: the nodes of a config's cluster."""

from dataclasses import replace

from mokbench.cluster import Cluster
from mokbench.gpus import elsewhere
from mokbench.sweep import refusal
from mokbench.systems.kernel_arch import planned_reason
from mokbench.workload import Cell


def refusal_elsewhere(cell: Cell, cluster: Cluster) -> str | None:
    """Why a cell cannot run on nodes of ``cluster``, or None; as many of them as it has ranks for.

    What is installed there is not known, and no reason.
    """
    ranks = cell.workload.ranks
    nodes = -(-ranks // cluster.ranks_per_node)
    mnnvl = nodes > 1 and cluster.is_one_domain(ranks)
    there = replace(cell, workload=replace(cell.workload, nodes=nodes, mnnvl=mnnvl))
    with elsewhere():
        return planned_reason(there, cluster.capability) or refusal(there)
