"""min_step_us: the same small layer for every system, so that coordinating a step shows alone."""

from typing import Any

from mokbench.routing_spec import RoutingSpec
from mokbench.workload import Cell, Model, Regime, Workload

# One token a rank at one fixed shape: what coordinating a step costs with almost nothing to move.
MODEL = Model("min-step", hidden=2048, intermediate=256, experts=16, top_k=2)


def key(cell: Cell) -> tuple[Any, ...]:
    """What decides a system's minimal step; cells that share it share the figure."""
    return (cell.system, cell.options, cell.workload.ranks, cell.workload.dtype)


def probe(cell: Cell) -> Cell:
    """The cell that measures the minimal step of another cell's system."""
    work = Workload(
        model=MODEL,
        ranks=cell.workload.ranks,
        tokens_per_rank=1,
        dtype=cell.workload.dtype,
        routing=RoutingSpec(),
        seed=cell.workload.seed,
        nodes=cell.workload.nodes,
        mnnvl=cell.workload.mnnvl,
    )
    name = f"min-step.{cell.system}" + (f"~{cell.variant}" if cell.options else "")
    return Cell(name, cell.fabric, cell.system, cell.options, work, Regime.ISOLATED)
