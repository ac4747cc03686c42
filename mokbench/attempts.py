"""Cells of one workload on a pool of ranks until each has a result or a failure of its own."""

from collections.abc import Callable, Iterator
from typing import Any

from mokbench.config import MeasureOptions
from mokbench.errors import MokbenchError
from mokbench.figures import Failure
from mokbench.launch import GroupError, StartError, WorkerPool
from mokbench.progress import Progress
from mokbench.workload import Cell

# Failures of work that belongs to no row, after which all rows of a group are given up.
_MAX_STRAY = 2


def attempts(
    pool: WorkerPool,
    cells: list[Cell],
    options: MeasureOptions,
    known_rates: dict[str, Any] | None,
    progress: Progress,
    on_turn: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Cell, dict[str, Any], Any]]:
    """(cell, facts, result or Failure) for every cell; a failed row does not take others along.

    After a hard failure the rest of the group runs again without the row at fault, on new
    workers: what was measured before it was not measured in turn with what follows. ``on_turn`` is
    called before each try.
    """
    left = list(cells)
    stray = 0
    while left:
        on_turn()
        job = {
            "kind": "cells",
            "cells": [cell.to_dict() for cell in left],
            "measure": options.model_dump(mode="json", by_alias=True),
            "rates": known_rates,
        }
        try:
            total_s = options.deadline_s * len(left)
            reply = pool.call(job, options.deadline_s, total_s, progress.phase)
        except StartError as error:
            raise MokbenchError(f"the ranks do not start: {error}") from error
        except GroupError as error:
            at_fault = next((cell for cell in left if cell.id == error.cell_id), None)
            if at_fault is None and error.cell_id is not None:
                # Work that serves all rows failed: the matmul that they are held against.
                stray += 1
                if stray == _MAX_STRAY:
                    yield from [(cell, {}, _stored(error, error.cell_id)) for cell in left]
                    return
                progress.say(f"in {error.cell_id}, no row's own work: {error}; once more")
                continue
            # A rank that died before the job's first row still has to show in some row.
            at_fault = at_fault or left[0]
            left.remove(at_fault)
            yield at_fault, {}, _stored(error)
            continue
        for cell in left:
            yield cell, reply["facts"], reply["results"][cell.id]
        return


def _stored(error: GroupError, where: str | None = None) -> Failure:
    """The record's form of a failed job; ``where`` names work that was no row's own."""
    failure = error.failure
    rank = failure.rank if failure.certain else None
    text = failure.text + (f" (in {where}, which is no row's own work)" if where else "")
    return Failure(rank=rank, kind=failure.kind, text=text, fault=failure.fault)
