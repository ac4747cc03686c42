"""What ``mokbench run --dry-run`` prints: the plan of a sweep, against this machine's memory."""

from mokbench import machine
from mokbench.config import Suite
from mokbench.elsewhere import refusal_elsewhere
from mokbench.gpus import Gpus
from mokbench.output_console import OutputConsole
from mokbench.plan import plan
from mokbench.plan_table import plan_table
from mokbench.sweep import refusal
from mokbench.systems import system_class
from mokbench.systems.kernel_arch import planned_reason
from mokbench.workload import Cell


def print_plan(suite: Suite, cells: list[Cell], fabric: str, gpus: Gpus) -> None:
    """Cells, times and memory on standard output."""
    reasons = {cell: _reason(suite, cell, gpus) for cell in cells}
    made = plan(suite, cells, lambda cell: None if reasons[cell] else _workspace_bytes(cell))
    table = plan_table(made, reasons.get, _memory_bytes(fabric, gpus), _not_here(fabric, gpus))
    OutputConsole().print(table)


def _reason(suite: Suite, cell: Cell, gpus: Gpus) -> str | None:
    """Why a cell cannot run, on the GPUs here or, where there are none, on the cluster's."""
    if cell.fabric == "cuda" and suite.cluster and not gpus.visible():
        return refusal_elsewhere(cell, suite.cluster)
    return planned_reason(cell, gpus.compute_capability) or refusal(cell)


def _not_here(fabric: str, gpus: Gpus) -> str | None:
    """Why this machine can make the plan and not run it, or None."""
    if fabric != "cuda" or gpus.visible() > 0:
        return None
    why = gpus.note or "CUDA_VISIBLE_DEVICES hides them all"
    return f"fabric: cuda needs a GPU, and none is here ({why})"


def _memory_bytes(fabric: str, gpus: Gpus) -> int | None:
    """What all ranks have together: the host's memory, or that of the GPUs they may use."""
    if fabric == "host":
        return machine.describe().memory_bytes
    return gpus.memory_bytes * gpus.visible() if gpus.memory_bytes else None


def _workspace_bytes(cell: Cell) -> int:
    """All ranks' workspace of a cell that can run."""
    return cell.workload.ranks * system_class(cell.system, cell.fabric).workspace_bytes(cell)
