"""The plan of a sweep as a table: what --dry-run prints."""

from collections.abc import Callable, Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mokbench.plan import Plan
from mokbench.workload import Cell

# A person reads the first screens; the totals below count every cell.
_MAX_ROWS = 200
_GIB, _MIB = 1 << 30, 1 << 20


def plan_table(
    plan: Plan,
    refusal: Callable[[Cell], str | None],
    memory_bytes: int | None = None,
    not_here: str | None = None,
) -> RenderableType:
    """Cells with estimated time and memory a rank, unsupported ones with their reason.

    ``memory_bytes`` is what the ranks have together here; a plan that needs more is warned of.
    ``not_here`` is why none of the cells can run on this machine.
    """
    table = Table("cell", "time s", "memory/rank", "", box=None, pad_edge=False)
    for planned in plan.cells[:_MAX_ROWS]:
        reason = refusal(planned.cell)
        table.add_row(
            Text(planned.cell.id, overflow="fold"),
            "-" if reason else f"{planned.likely_s:.1f}",
            "-" if reason else _size(planned.rank_bytes),
            Text(f"unsupported: {reason}" if reason else ""),
        )
    return Group(table, *_totals(plan), *_warning(plan, memory_bytes), *_not_here(not_here))


def _totals(plan: Plan) -> Iterator[Text]:
    if len(plan.cells) > _MAX_ROWS:
        yield Text(f"... and {len(plan.cells) - _MAX_ROWS} more cells")
    yield Text(
        f"{len(plan.cells)} cell{'s' * (len(plan.cells) != 1)}, "
        f"about {plan.likely_s:.0f} s, at most {plan.bound_s:.0f} s; "
        f"memory up to {_size(plan.peak_rank_bytes)} a rank, {_size(plan.peak_bytes)} together"
    )


def _warning(plan: Plan, memory_bytes: int | None) -> Iterator[Text]:
    if memory_bytes is not None and plan.peak_bytes > memory_bytes:
        worst = max(plan.cells, key=lambda planned: planned.memory_bytes)
        yield Text(
            f"warning: this machine has {_size(memory_bytes)}; {worst.cell.id} needs more",
            style="bold",
        )


def _not_here(why: str | None) -> Iterator[Text]:
    if why is not None:
        yield Text(f"none of these cells can run here: {why}", style="bold")


def _size(num_bytes: int) -> str:
    if num_bytes >= _GIB:
        return f"{num_bytes / _GIB:.1f} GiB"
    return f"{num_bytes / _MIB:.1f} MiB"
