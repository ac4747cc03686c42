"""The rows of one or several runs, checked to belong together and grouped by workload."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mokbench.cells import expand
from mokbench.config import parse
from mokbench.errors import ConfigError, ResultsError
from mokbench.figures import SignalPoint
from mokbench.machine import Machine
from mokbench.record import Record
from mokbench.results import RunFolder
from mokbench.run_checks import (
    refuse_repeated,
    refuse_stale_key,
    refuse_torn,
    refuse_unknown_method,
)
from mokbench.run_meta import RunMeta


class Workload(NamedTuple):
    """What two rows must share to be compared, besides regime and graph."""

    fabric: str
    model: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    ranks: int
    nodes: int
    dtype: str
    pass_: str
    placement: str
    seed: int
    tokens_per_rank: int
    routing: str

    @classmethod
    def of(cls, record: Record) -> "Workload":
        """Read a row's workload."""
        return cls(*(getattr(record, name) for name in cls._fields))


@dataclass(frozen=True)
class Row:
    """A record and the run it is from; ``run`` is the run folder's name."""

    run: str
    record: Record

    @property
    def turn(self) -> tuple[str, str] | None:
        """What rows measured in turn with one another share; null for a row measured alone."""
        return None if self.record.turn is None else (self.run, self.record.turn)


@dataclass(frozen=True)
class Rows:
    """All rows of a report, of one machine and one method version."""

    machine: Machine
    method_version: int
    runs: tuple[tuple[str, RunMeta], ...]
    rows: tuple[Row, ...]
    signals: tuple[tuple[str, SignalPoint], ...]

    def by_workload(self) -> dict[Workload, list[Row]]:
        """Rows of each workload, in the order of the runs."""
        groups: dict[Workload, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(Workload.of(row.record), []).append(row)
        return groups

    def with_status(self, status: str) -> list[Row]:
        """Rows that ended so."""
        return [row for row in self.rows if row.record.status == status]


def gather(runs: Sequence[RunFolder]) -> Rows:
    """Read runs that may stand in one report.

    Raises ResultsError when they are of different machines or method versions (their figures
    must never be mixed, so each needs a report of its own), of a method version that this
    mokbench does not know, or broken.
    """
    if not runs:
        raise ResultsError("no run to report")
    for run in runs:
        refuse_torn(run)
        refuse_repeated(run)
        if len(runs) > 1:
            refuse_stale_key(run.path / "run.json", run.meta.machine)
    first = runs[0].meta
    for run in runs[1:]:
        if run.meta.method_version != first.method_version:
            raise ResultsError(
                f"{runs[0].path} has method version {first.method_version} and {run.path} "
                f"{run.meta.method_version}: their figures mean different things; report them apart"
            )
        if run.meta.machine.key != first.machine.key:
            raise ResultsError(
                f"{runs[0].path} and {run.path} are of two machines "
                f"({first.machine.differences(run.meta.machine)}); report them apart"
            )
    refuse_unknown_method(runs[0])
    names = _names(runs)
    return Rows(
        machine=first.machine,
        method_version=first.method_version,
        runs=tuple((name, run.meta) for name, run in zip(names, runs, strict=True)),
        rows=tuple(
            Row(name, record)
            for name, run in zip(names, runs, strict=True)
            for record in _in_plan_order(run)
        ),
        signals=tuple(
            (name, point) for name, run in zip(names, runs, strict=True) for point in run.signals()
        ),
    )


def _in_plan_order(run: RunFolder) -> list[Record]:
    """Rows as the config lists their cells, whichever ended first or was measured again.

    As stored where the config no longer reads, say because a model file it names is gone; rows
    that are not in the config come last.
    """
    stored = run.records()
    try:
        suite = parse(run.meta.config_text, Path(str(run.meta.config.get("file", "config.yaml"))))
    except (ConfigError, OSError):
        return stored
    place = {cell.id: i for i, cell in enumerate(expand(suite))}
    return sorted(stored, key=lambda record: place.get(record.id, len(place)))


def _names(runs: Sequence[RunFolder]) -> list[str]:
    """Folder names, with as many of the folders above as it takes to tell them apart."""
    paths = [run.path.resolve().parts for run in runs]
    for depth in range(1, max(map(len, paths))):
        names = ["/".join(parts[-depth:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [str(run.path) for run in runs]
