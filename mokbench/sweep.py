"""The main path: group the cells, have the ranks measure each group, store every row as it ends."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from mokbench import min_step, moment, rates, routing
from mokbench.attempts import attempts
from mokbench.blame import collective_bound_s
from mokbench.config import Suite
from mokbench.errors import MokbenchError, UnsupportedError
from mokbench.figures import Failure, Quantity, SignalPoint
from mokbench.gpus import Gpus
from mokbench.launch import GroupError, WorkerPool
from mokbench.machine import usable_cores
from mokbench.measure.columns import DURATION
from mokbench.progress import Progress
from mokbench.rates import RatePoint
from mokbench.reach import maps_peers
from mokbench.record import Record
from mokbench.results import RunFolder
from mokbench.rows import Surroundings, checked_fields, measured_record, signal_points
from mokbench.stats import quantity
from mokbench.systems import system_class
from mokbench.topology import Topology, one_machine
from mokbench.workload import Cell

_MIN_STEP_TIME_S = 0.5
_SIGNAL_DEADLINE_S = 120.0
_RATES_DEADLINE_S = 120.0
_PLENTY = 1 << 20

PoolFactory = Callable[[int], WorkerPool]


@dataclass
class Sweep:
    """One run of a suite's cells into a folder.

    ``max_ranks`` is the number of ranks a launcher gave, or None when this command starts them.
    ``link`` says what lies between a number of ranks, ``topology`` where they are.
    """

    suite: Suite
    folder: RunFolder
    make_pool: PoolFactory
    progress: Progress
    max_ranks: int | None = None
    fabric: str = "host"
    link: Callable[[int], str] = lambda ranks: "shm"
    topology: Callable[[int], Topology] = field(default_factory=lambda: one_machine("host", Gpus()))
    _rates: dict[int, RatePoint] = field(default_factory=dict)
    _signals: dict[int, SignalPoint] = field(default_factory=dict)
    _min_steps: dict[tuple[Any, ...], Quantity | str] = field(default_factory=dict)
    _digests: dict[tuple[Any, ...], str] = field(default_factory=dict)
    _stored: set[str] = field(default_factory=set)
    _turns: int = 0

    def run(self, cells: list[Cell]) -> None:
        """Measure ``cells`` and store a row for each; raises what ends the whole run."""
        self._signals = {point.ranks: point for point in self.folder.signals()}
        self._rates = {point.ranks: point for point in rates.read(self.folder.path)}
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
        try:
            pool.start()
        except UnsupportedError as error:
            # What this number of ranks needs is missing; fewer may do without.
            for cell in cells:
                self._store(Record.from_cell(cell, status="unsupported", reason=str(error)))
            return
        try:
            self._measure_ranks(pool, cells)
        except UnsupportedError as error:
            # They ran before: what fails now is a new start after a failure.
            text = f"the ranks do not start again: {error}"
            failure = Failure(kind="start", text=text)
            for cell in cells:
                if cell.id not in self._stored:
                    self._store(Record.from_cell(cell, status="failed", reason=text, error=failure))

    def _measure_ranks(self, pool: WorkerPool, cells: list[Cell]) -> None:
        """Rates, signaling, then the rows, on ranks that run."""
        if self.fabric == "cuda" and pool.ranks not in self._rates:
            self._measure_rates(pool)
        if self.suite.measure.signals and pool.ranks not in self._signals:
            if maps_peers(cells[0].workload):
                self._measure_signals(pool)
            else:
                self.progress.say("no signaling: these ranks do not reach one another's memory")
        for _, group in itertools.groupby(cells, key=lambda cell: cell.workload):
            members = list(group)
            self._measure_min_steps(pool, members)
            self._run_group(pool, members)

    def _measure_rates(self, pool: WorkerPool) -> None:
        """Denominators and self-tests; without them nothing may be measured."""
        self.progress.say(f"rates and self-tests with {pool.ranks} ranks")
        try:
            told = pool.call({"kind": "rates"}, _RATES_DEADLINE_S, _RATES_DEADLINE_S)
        except GroupError as error:
            raise MokbenchError(f"the GPUs cannot be measured on: {error}") from error
        self._rates[pool.ranks] = RatePoint.of(
            told,
            ranks=pool.ranks,
            ranks_per_gpu=told.pop("ranks_per_gpu"),
            fabric=self.fabric,
            link=self.link(pool.ranks),
        )
        rates.write(self.folder.path, list(self._rates.values()))

    def _measure_signals(self, pool: WorkerPool) -> None:
        self.progress.say(f"signaling among {pool.ranks} ranks")
        try:
            reply = pool.call({"kind": "signals"}, _SIGNAL_DEADLINE_S, _SIGNAL_DEADLINE_S)
        except GroupError as error:
            self.progress.say(f"signaling failed, its fields stay empty: {error}")
            return
        # Kernels wait on SMs of their own, whatever the host's cores are doing.
        cores = usable_cores() if self.fabric == "host" else _PLENTY
        points = signal_points(reply["points"], self.fabric, self.link, cores)
        self._signals |= {point.ranks: point for point in points}
        self.folder.write_signals([self._signals[ranks] for ranks in sorted(self._signals)])

    def _measure_min_steps(self, pool: WorkerPool, cells: list[Cell]) -> None:
        """The minimal step of every system of the group that has none yet."""
        if not self.suite.measure.min_step:
            return
        wanted = {min_step.key(cell): cell for cell in cells}
        new = {key: cell for key, cell in wanted.items() if key not in self._min_steps}
        if not new:
            return
        if min_step.MODEL.experts % pool.ranks:
            why = f"min_step_us: its {min_step.MODEL.experts} experts do not divide among the ranks"
            self._min_steps |= dict.fromkeys(new, why)
            return
        probes = {min_step.probe(cell): key for key, cell in new.items()}
        short = min(_MIN_STEP_TIME_S, self.suite.measure.max_time_s)
        options = self.suite.measure.model_copy(update={"max_time_s": short})
        for probe, _, outcome in attempts(pool, list(probes), options, None, self.progress):
            text = outcome.text if isinstance(outcome, Failure) else _why_not(outcome)
            if text is not None:
                self._min_steps[probes[probe]] = f"min_step_us failed: {text}"
            else:
                slowest = [us for b in outcome["blocks"] for us in b[:, :, DURATION].max(axis=0)]
                self._min_steps[probes[probe]] = quantity(slowest)

    def _run_group(self, pool: WorkerPool, cells: list[Cell]) -> None:
        started = moment.now()
        before = time.monotonic()
        known = self._rates.get(pool.ranks)
        told = known.model_dump(mode="json") if known else None
        for cell, facts, outcome in attempts(
            pool, cells, self.suite.measure, told, self.progress, self._next_turn
        ):
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
            elif outcome["unsupported"]:
                reason = outcome["unsupported"]
                self._store(Record.from_cell(cell, status="unsupported", reason=reason))
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
                    system_class(cell.system, cell.fabric),
                    facts,
                    outcome,
                    self._around(cell),
                    turn=turn,
                    **context,
                )
                self._store(record, samples)

    def _next_turn(self) -> None:
        self._turns += 1

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
        ranks, system = cell.workload.ranks, system_class(cell.system, cell.fabric)
        found = self._min_steps.get(min_step.key(cell))
        on_host = self.fabric == "host"
        link = system.host_link if on_host else self.link(ranks)
        return Surroundings(
            link="none" if ranks == 1 else link,
            topology=self.topology(ranks),
            oversubscribed=on_host and ranks * system.num_threads(cell) > usable_cores(),
            timer_step_us=self._timer_step_us(ranks),
            signals=self._signals,
            rates=self._rates.get(cell.workload.ranks),
            min_step=found if isinstance(found, Quantity) else None,
            min_step_note=found if isinstance(found, str) else None,
        )

    def _timer_step_us(self, ranks: int) -> float | None:
        """Step of what times the rows: the host's clock, or CUDA events as this run saw them."""
        if self.fabric == "host":
            return time.get_clock_info("perf_counter").resolution * 1e6
        return self._rates[ranks].timer_step_us if ranks in self._rates else None

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
        self._stored.add(record.id)
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
    return impossible or system_class(cell.system, cell.fabric).supports(cell)


def _why_not(outcome: dict[str, Any]) -> str | None:
    """Why a system has no figures although no rank failed, or None."""
    text: str | None = outcome["problem"] or outcome["unsupported"]
    return text


def _routing_key(record: Record) -> tuple[Any, ...]:
    """What decides a row's routes; rows that share it must share the routing's digest."""
    sizes = (record.model, record.experts, record.top_k, record.ranks, record.tokens_per_rank)
    return (*sizes, record.routing, record.placement, record.seed)
