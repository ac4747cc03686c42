"""One launch of a run as a history keeps it: one value per cell and metric, in columns."""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
from pydantic import ConfigDict, Field, model_validator

from mokbench.cell_digest import lacks_defaults
from mokbench.errors import ResultsError
from mokbench.figures import SHARED_GPU, Figures, Status, was_not_finite
from mokbench.moment import Moment
from mokbench.record import Record
from mokbench.regression.shift import Floats
from mokbench.results import RunFolder
from mokbench.row_checks import not_positive
from mokbench.run_checks import refuse_repeated

HISTORY_VERSION = 2
# All are "less is better". Bytes and FLOPs follow from the config and have no noise to test.
METRICS = (
    "step_time_us",
    "min_step_us",
    "signal_ready_us",
    "dispatch_us",
    "combine_us",
    "peak_memory_bytes",
)
# The row's SM clock is that of the samples of this metric only.
CLOCKED = "step_time_us"

Mark = Literal["", "shared", "oversubscribed", "host"]
# What makes two values comparable: the digest of a cell, and the mark of its row.
Measured = tuple[str, Mark]
MARKS: dict[str, str] = {
    "shared": SHARED_GPU,
    "oversubscribed": "oversubscribed host: more busy threads than cores",
    "host": "host fabric: the twin's time, which says nothing about a GPU",
}
# Their times are the scheduler's, or of a link that nobody deploys: they are shown and never gate.
NO_GATE = ("shared", "oversubscribed")


class Launch(Figures):
    """One run: columns over its cells, in the order of ``ids``.

    ``values[metric][i]`` is the run-level value of cell i (for step_time_us the median over
    iterations of the maximum over ranks), null where it has none. ``digests`` tell cells apart
    whose options or routing changed under one id. ``flags[metric][id]`` is the verdict of a
    value that was called SLOWER, FASTER or CLOCK, or that is slower at 1 % by itself and was not
    cleared (AMBIGUOUS, FAILED to be measured again): it never becomes part of a base.
    """

    model_config = ConfigDict(strict=True)

    history_version: int = HISTORY_VERSION
    launch: str
    run: str
    config: str = ""
    created: Moment
    commit: str | None = None
    machine: str
    method_version: int
    ids: list[str] = Field(min_length=1)
    digests: list[str]
    status: list[Status]
    marks: list[Mark]
    clock_mhz: list[float | None]
    values: dict[str, list[float | None]]
    flags: dict[str, dict[str, str]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _columns_agree(self) -> Self:
        columns: list[Sequence[object]] = [self.digests, self.status, self.marks, self.clock_mhz]
        if {len(self.ids)} != {len(column) for column in [*columns, *self.values.values()]}:
            raise ValueError("columns of different lengths")
        if len(set(self.ids)) != len(self.ids):
            raise ValueError("an id stands in it twice")
        if set().union(*self.flags.values()).difference(self.ids):
            raise ValueError("flags a cell that is not in it")
        for name, column in {**self.values, "clock_mhz": self.clock_mhz}.items():
            for cell, status, value in zip(self.ids, self.status, column, strict=True):
                if value is not None and status != "ok" and name in self.values:
                    raise ValueError(f"{cell}: is {status} and has {name} {value}")
                if value is not None and (problem := not_positive(value)):
                    raise ValueError(f"{cell}: {name} is {problem}")
        steps = self.values.get(CLOCKED, [None] * len(self.ids))
        for cell, status, value in zip(self.ids, self.status, steps, strict=True):
            if status == "ok" and value is None:
                raise ValueError(f"{cell}: is ok and has no {CLOCKED}")
        return self

    @classmethod
    def of(cls, run: RunFolder, commit: str | None = None) -> Self:
        """Read a run's rows. Raises ResultsError for none, or for rows that are broken."""
        refuse_repeated(run)
        records = run.records()
        if not records:
            raise ResultsError(f"{run.path}: has no rows; nothing can be judged")
        for record in records:
            if problem := _unmeasured(record):
                raise ResultsError(
                    f"{run.path}: {record.id}: {problem}; nothing is judged from a broken run: "
                    "measure it again or leave it out"
                )
        columns: dict[str, Any] = {
            "ids": [r.id for r in records],
            "digests": [_digest(r) for r in records],
            "status": [r.status for r in records],
            "marks": [_mark(r) for r in records],
            "clock_mhz": [_short(r.sm_clock_mhz) for r in records],
            "values": {name: [_short(_value(r, name)) for r in records] for name in METRICS},
        }
        columns["values"] = {
            name: column
            for name, column in columns["values"].items()
            if any(value is not None for value in column)
        }
        text = json.dumps([run.meta.created, run.meta.machine.gpu_uuids, columns], sort_keys=True)
        return cls(
            launch=hashlib.sha256(text.encode()).hexdigest()[:16],
            run=run.path.name,
            config=run.meta.name,
            created=run.meta.created,
            commit=commit,
            machine=run.meta.machine.key,
            method_version=run.meta.method_version,
            **columns,
        )

    def reading(
        self, cell: str, metric: str, digest: str, mark: Mark = ""
    ) -> tuple[float, float] | None:
        """Value and SM clock (MHz; NaN where it is not the value's own) of what a cell measured.

        Null where the launch has none, or measured something else under that id, or may have, or
        in a way whose values are marked otherwise.
        """
        at = self._place.get(cell)
        if at is None or self.digests[at] != digest or metric not in self.values:
            return None
        if self.marks[at] != mark:
            return None
        if lacks_defaults(digest):
            return None
        value, clock = self.values[metric][at], self.clock_mhz[at]
        if value is None:
            return None
        return value, math.nan if clock is None or metric != CLOCKED else clock

    def has(self, cell: str, metric: str, mark: str | None = None) -> bool:
        """Whether the launch has a value of a cell, whatever its options were.

        ``mark``: whether it has one of that mark; null for any.
        """
        at = self._place.get(cell)
        if at is None or metric not in self.values or self.values[metric][at] is None:
            return False
        return mark in (None, self.marks[at])

    def mark_of(self, cell: str) -> Mark:
        """Mark of a cell that the launch has. Raises KeyError for one that it has not."""
        return self.marks[self._place[cell]]

    def measured(self) -> dict[str, Measured]:
        """What each ok cell measured, and its mark."""
        return {
            cell: (digest, mark)
            for cell, digest, mark, status in zip(
                self.ids, self.digests, self.marks, self.status, strict=True
            )
            if status == "ok"
        }

    @cached_property
    def _place(self) -> dict[str, int]:
        """Position of each id in the columns."""
        return {name: i for i, name in enumerate(self.ids)}


@dataclass(frozen=True)
class Readings:
    """Values and their SM clocks in MHz, both [series, launches]; NaN where there is none."""

    values: Floats
    clock_mhz: Floats

    @classmethod
    def empty(cls, num_series: int, num_launches: int) -> Self:
        """No value yet; the arrays are there to be filled in."""
        shape = (num_series, num_launches)
        return cls(np.full(shape, np.nan), np.full(shape, np.nan))

    def put(self, series: int, launch: int, reading: tuple[float, float]) -> None:
        """Fill in one launch's value and clock."""
        self.values[series, launch], self.clock_mhz[series, launch] = reading


def _unmeasured(record: Record) -> str | None:
    """Say which judged figure of an ok row is a hole that the measurement left, and why."""
    if record.status != "ok":
        return None
    for name in METRICS:
        if note := was_not_finite(record.notes, name):
            return note
    return f"is ok and has no {CLOCKED}" if record.step_time_us is None else None


def _value(record: Record, name: str) -> float | None:
    if record.status != "ok":
        return None
    if name == "step_time_us":
        return None if record.step_time_us is None else record.step_time_us.median
    found = getattr(record, name)
    return None if found is None else float(found)


def _mark(record: Record) -> Mark:
    if record.ranks_per_gpu is not None and record.ranks_per_gpu > 1:
        return "shared"
    if record.oversubscribed:
        return "oversubscribed"
    return "host" if record.fabric == "host" else ""


def _digest(record: Record) -> str:
    """What was measured: the cell's content, and its routes where they are known."""
    return f"{record.cell_digest or '-'}.{(record.routing_digest or '-')[:12]}"


def _short(value: float | None) -> float | None:
    """Nine digits: far below any noise, and a third of the file."""
    return None if value is None else float(f"{value:.9g}")


def one_kind(launches: Iterable[Launch]) -> tuple[str, int]:
    """Machine key and method version that all launches share; ResultsError where they do not."""
    found = list(launches)
    if not found:
        raise ResultsError("no run given")
    for other in found[1:]:
        if other.machine != found[0].machine:
            raise ResultsError(
                f"{found[0].run} and {other.run} are of two machines (keys {found[0].machine} and "
                f"{other.machine}): their times do not compare"
            )
        if other.method_version != found[0].method_version:
            raise ResultsError(
                f"{found[0].run} has method version {found[0].method_version} and {other.run} "
                f"{other.method_version}: their figures mean different things"
            )
    return found[0].machine, found[0].method_version


def refuse_copies(launches: Iterable[Launch]) -> None:
    """Raise ResultsError for two launches that are one: a copy says nothing of the next launch."""
    seen: dict[str, str] = {}
    for launch in launches:
        if launch.launch in seen:
            raise ResultsError(
                f"{launch.run} and {seen[launch.launch]} are copies of one launch; give each once"
            )
        seen[launch.launch] = launch.run
