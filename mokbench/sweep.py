"""The main path: group the cells, have the ranks measure each group, store every row as it ends."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from mokbench import routing
from mokbench.blame import collective_bound_s
from mokbench.config import MeasureOptions, Suite
from mokbench.errors import MokbenchError
from mokbench.figures import Failure, Quantity, SignalPoint
from mokbench.launch import GroupError, StartError, WorkerPool
from mokbench.machine import usable_cores
from mokbench.progress import Progress
from mokbench.record import Record
from mokbench.results import RunFolder
from mokbench.rows import Surroundings, checked_fields, measured_record, signal_points
from mokbench.stats import quantity
from mokbench.systems import system_class
from mokbench.workload import Cell, Model, Regime, Workload

# One token a rank at one fixed shape: what coordinating a step costs with almost nothing to move.
MIN_STEP_MODEL = Model("min-step", hidden=2048, intermediate=256, experts=16, top_k=2)
_MIN_STEP_TIME_S = 0.5
_SIGNAL_DEADLINE_S = 120.0

PoolFactory = Callable[[int], WorkerPool]


@dataclass
class Sweep:
    """One run of a suite's cells into a folder.

    ``max_ranks`` is the number of ranks a launcher gave, or None when this command starts them.
    """

    suite: Suite
    folder: RunFolder
    make_pool: PoolFactory
    progress: Progress
    max_ranks: int | None = None
    link: str = "shm"
    _signals: dict[int, SignalPoint] = field(default_factory=dict)
    _min_steps: dict[tuple[Any, ...], Quantity | str] = field(default_factory=dict)
    _digests: dict[tuple[Any, ...], str] = field(default_factory=dict)
    _turns: int = 0

    def run(self, cells: list[Cell]) -> None:
        """Measure ``cells`` and store a row for each; raises what ends the whole run."""
        self._signals = {point.ranks: point for point in self.folder.signals()}
        for record in self.folder.records():
            if record.routing_digest:
                self._digests[_routing_key(record)] = record.routing_digest
        by_ranks = sorted(cells, key=lambda cell: cell.workload.ranks)
        for ranks, members in itertools.groupby(by_ranks, key=lambda cell: cell.workload.ranks):
            able = list(self._store_refused(members))
            if not able:
                continue
            pool = self.make_pool(ranks)
            try:
                self._run_ranks(pool, able)
            finally:
                pool.stop()

    def _store_refused(self, cells: Iterable[Cell]) -> Iterator[Cell]:
        """Store unsupported rows with their reasons; yield the cells that can run."""
        for cell in cells:
            reason = refusal(cell, self.max_ranks)
            if reason is None:
                yield cell
            else:
                self._store(Record.from_cell(cell, status="unsupported", reason=reason))

    def _run_ranks(self, pool: WorkerPool, cells: list[Cell]) -> None:
        self.progress.say(f"starting {pool.ranks} ranks")
        pool.start()
        if self.suite.measure.signals and pool.ranks not in self._signals:
            self._measure_signals(pool)
        for _, group in itertools.groupby(cells, key=lambda cell: cell.workload):
            members = list(group)
            self._measure_min_steps(pool, members)
            self._run_group(pool, members)

    def _measure_signals(self, pool: WorkerPool) -> None:
        self.progress.say(f"signaling among {pool.ranks} ranks")
        try:
            reply = pool.call({"kind": "signals"}, _SIGNAL_DEADLINE_S, _SIGNAL_DEADLINE_S)
        except GroupError as error:
            self.progress.say(f"signaling failed, its fields stay empty: {error}")
            return
        points = signal_points(reply["points"], self.suite_fabric, self.link, usable_cores())
        self._signals |= {point.ranks: point for point in points}
        self.folder.write_signals([self._signals[ranks] for ranks in sorted(self._signals)])

    @property
    def suite_fabric(self) -> str:
        """The only fabric this version measures on."""
        return "host"

    def _measure_min_steps(self, pool: WorkerPool, cells: list[Cell]) -> None:
        """The minimal step of every system of the group that has none yet."""
        if not self.suite.measure.min_step:
            return
        wanted = {_min_step_key(cell): cell for cell in cells}
        new = {key: cell for key, cell in wanted.items() if key not in self._min_steps}
        if not new:
            return
        if MIN_STEP_MODEL.experts % pool.ranks:
            why = f"min_step_us: its {MIN_STEP_MODEL.experts} experts do not divide among the ranks"
            self._min_steps |= dict.fromkeys(new, why)
            return
        probes = {_min_step_cell(cell): key for key, cell in new.items()}
        short = min(_MIN_STEP_TIME_S, self.suite.measure.max_time_s)
        options = self.suite.measure.model_copy(update={"max_time_s": short})
        for probe, _, outcome in self._attempts(pool, list(probes), options):
            if isinstance(outcome, Failure) or outcome["problem"]:
                text = outcome.text if isinstance(outcome, Failure) else outcome["problem"]
                self._min_steps[probes[probe]] = f"min_step_us failed: {text}"
            else:
                slowest = [us for b in outcome["blocks"] for us in b[:, :, 1].max(axis=0)]
                self._min_steps[probes[probe]] = quantity(slowest)

    def _run_group(self, pool: WorkerPool, cells: list[Cell]) -> None:
        started = datetime.now(UTC).isoformat(timespec="seconds")
        before = time.monotonic()
        for cell, facts, outcome in self._attempts(pool, cells, self.suite.measure):
            spent_s = time.monotonic() - before
            context: dict[str, Any] = {
                "started": started,
                "elapsed_s": spent_s / len(cells),
            }
            if isinstance(outcome, Failure):
                who = "" if outcome.rank is None else f"rank {outcome.rank} "
                reason = f"{who}{outcome.text}{self._hint(outcome)}"
                self._store(
                    Record.from_cell(cell, status="failed", reason=reason, error=outcome, **context)
                )
            elif outcome["problem"]:
                context |= checked_fields(facts, outcome)
                text = outcome["problem"]
                error = Failure(kind="check", text=text)
                self._store(
                    Record.from_cell(cell, status="failed", reason=text, error=error, **context)
                )
            else:
                turn = f"{started}-{self._turns}-{cell.regime}"
                record, samples = measured_record(
                    cell,
                    system_class(cell.system),
                    facts,
                    outcome,
                    self._around(cell),
                    turn=turn,
                    **context,
                )
                self._store(record, samples)

    def _attempts(
        self, pool: WorkerPool, cells: list[Cell], options: MeasureOptions
    ) -> Iterator[tuple[Cell, dict[str, Any], Any]]:
        """(cell, facts, result or Failure) for every cell; a failed row does not take others along.

        After a hard failure the rest of the group runs again without the row at fault, on new
        workers: what was measured before it was not measured in turn with what follows.
        """
        left = list(cells)
        while left:
            self._turns += 1
            job = {
                "kind": "cells",
                "cells": [cell.to_dict() for cell in left],
                "measure": options.model_dump(mode="json", by_alias=True),
            }
            try:
                reply = pool.call(
                    job, options.deadline_s, options.deadline_s * len(left), self.progress.phase
                )
            except StartError as error:
                raise MokbenchError(f"the ranks do not start: {error}") from error
            except GroupError as error:
                # A rank that died before the job's first row still has to show in some row.
                at_fault = next((c for c in left if c.id == error.cell_id), left[0])
                left.remove(at_fault)
                yield at_fault, {}, _stored(error)
                continue
            for cell in left:
                yield cell, reply["facts"], reply["results"][cell.id]
            return

    def _hint(self, failure: Failure) -> str:
        """What the user can do about a failure that may not be a rank's own."""
        bound_s = self.suite.measure.wait_bound_s
        if failure.kind == "hung" and failure.rank is None:
            known_s = collective_bound_s(bound_s)
            return f" (a measure: deadline well above {known_s:g} s lets those that wait tell)"
        if failure.kind not in ("fault", "late"):
            return ""
        return f" (if one pass takes longer than {bound_s:g} s, raise measure: wait_bound)"

    def _around(self, cell: Cell) -> Surroundings:
        ranks, system = cell.workload.ranks, system_class(cell.system)
        min_step = self._min_steps.get(_min_step_key(cell))
        return Surroundings(
            link="none" if ranks == 1 else system.host_link,
            oversubscribed=ranks * system.num_threads(cell) > usable_cores(),
            timer_step_us=time.get_clock_info("perf_counter").resolution * 1e6,
            signals=self._signals,
            min_step=min_step if isinstance(min_step, Quantity) else None,
            min_step_note=min_step if isinstance(min_step, str) else None,
        )

    def _store(self, record: Record, samples: Any = None) -> None:
        """Store a row; raises MokbenchError where a resumed run would mix two routings."""
        known = record.routing_digest
        if known is not None:
            known = self._digests.setdefault(_routing_key(record), known)
        if record.routing_digest and known != record.routing_digest:
            raise MokbenchError(
                f"{record.id}: its routing differs from what this run measured before "
                f"({record.routing_digest[:8]}, not {str(known)[:8]}); has the trace file changed, "
                "or is it another one, seen from another folder? Start a new run"
            )
        self.progress.row(self.folder.append(record, samples))


def refusal(cell: Cell, max_ranks: int | None = None) -> str | None:
    """Why a cell cannot run here, or None; ``max_ranks`` is what a launcher started."""
    work = cell.workload
    if max_ranks is not None and work.ranks > max_ranks:
        return f"needs {work.ranks} ranks; the launcher started {max_ranks}"
    impossible = routing.check(
        work.routing,
        ranks=work.ranks,
        experts=work.model.experts,
        top_k=work.model.top_k,
        tokens_per_rank=work.tokens_per_rank,
    )
    return impossible or system_class(cell.system).supports(cell)


def _stored(error: GroupError) -> Failure:
    """The record's form of a failed job."""
    failure = error.failure
    rank = failure.rank if failure.certain else None
    return Failure(rank=rank, kind=failure.kind, text=failure.text, fault=failure.fault)


def _routing_key(record: Record) -> tuple[Any, ...]:
    """What decides a row's routes; rows that share it must share the routing's digest."""
    sizes = (record.model, record.experts, record.top_k, record.ranks, record.tokens_per_rank)
    return (*sizes, record.routing, record.placement, record.seed)


def _min_step_key(cell: Cell) -> tuple[Any, ...]:
    return (cell.system, cell.options, cell.workload.ranks, cell.workload.dtype)


def _min_step_cell(cell: Cell) -> Cell:
    work = Workload(
        model=MIN_STEP_MODEL,
        ranks=cell.workload.ranks,
        tokens_per_rank=1,
        dtype=cell.workload.dtype,
        routing=routing.RoutingSpec(),
        seed=cell.workload.seed,
    )
    name = f"min-step.{cell.system}" + (f"~{cell.variant}" if cell.options else "")
    return Cell(name, cell.fabric, cell.system, cell.options, work, Regime.ISOLATED)
