"""One rank's work on a group of rows: all systems on one workload, checked, then timed in turn."""

from collections.abc import Callable
from dataclasses import asdict
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mokbench import metrics, reference
from mokbench.bench import Bench
from mokbench.config import MeasureOptions
from mokbench.entry import Entry, by_system
from mokbench.errors import MokbenchError, UnsupportedError
from mokbench.fabric.group import PeerLostError
from mokbench.layer import Layer
from mokbench.measure.graph import captured
from mokbench.measure.in_turn import Lane, measure_in_turn, rank_spread_us
from mokbench.measure.phase_stamps import read_phases
from mokbench.measure.sm_sweep import sweep_sms
from mokbench.measure.timing import Step
from mokbench.row_traffic import pair_facts
from mokbench.stats import StopRule
from mokbench.systems import Checked, Phased, Setup, Tuned, options_of, system_class
from mokbench.workload import Cell, Regime

# Phases are a by-product of a row, so they get a fraction of its time.
_PHASE_SHARE = 0.25
_MAX_PHASE_ITERATIONS = 100
_TRIAL_ITERATIONS = 5

Report = Callable[[str, str], None]


class GroupRun:
    """Runs the rows of one workload on this rank. Every method is collective over the ranks.

    ``report`` is told (cell id, phase) whenever work on a row starts, so that the launcher knows
    what a dead or hung rank was doing. ``rates`` are the denominators measured before, if any;
    without them no row gets a roofline, and no reference is measured in turn.
    """

    def __init__(
        self,
        bench: Bench,
        layer: Layer,
        options: MeasureOptions,
        report: Report,
        rates: dict[str, Any] | None = None,
    ) -> None:
        self._bench, self._fabric, self._layer = bench, bench.fabric, layer
        self._options, self._report, self._rates = options, report, rates

    def run(self, cells: list[Cell]) -> dict[str, dict[str, Any]]:
        """Result per cell id: {"problem"} or facts, samples and stop reason. Same on all ranks."""
        entries: list[Entry] = []
        results: dict[str, dict[str, Any]] = {}
        try:
            for members in by_system(cells):
                entries.append(self._admit(members))
            for entry in entries:
                told = {"problem": entry.problem, "unsupported": entry.unsupported}
                results |= {cell.id: {**told, **entry.facts} for cell in entry.cells}
            usable = [entry for entry in entries if entry.usable]
            self._measure(usable, results)
            for entry in usable:
                phases = self._phases(entry)
                for cell in entry.cells:
                    results[cell.id] |= phases
        finally:
            for entry in entries:
                entry.system.close()
        return results

    def workload_facts(self) -> dict[str, Any]:
        """What the routing alone decides, for every row of the group."""
        layer = self._layer
        work, routing = layer.workload, layer.routing
        return {
            "routing_digest": routing.digest(),
            "imbalance": asdict(metrics.imbalance(routing, work.model.experts, work.ranks)),
            "expert_counts": metrics.expert_counts(routing, work.model.experts).tolist(),
            "traffic": metrics.traffic_by_protocol(routing, work),
            "pairs": pair_facts(routing, work),
            "num_tokens": sum(routing.num_tokens),
            "num_ranks": work.ranks,
            "flops": metrics.layer_flops(routing, work),
            "ranks_per_gpu": self._bench.sharing.ranks_per_gpu,
            "num_sms": self._bench.sharing.num_sms,
            "mma_flops_per_cycle": self._bench.sharing.mma_flops_per_cycle.get(str(work.dtype)),
        }

    def _admit(self, cells: list[Cell]) -> Entry:
        """Prepare a system and let it pass the oracle; its problem says why it did not."""
        self._report(cells[0].id, "prepare")
        entry = Entry(cells, system_class(cells[0].system, cells[0].fabric)())
        entry.take(self._layer)
        peak = self._bench.peak_memory()
        start = perf_counter()
        self._prepare(entry)
        if not entry.usable:
            return entry
        self._report(cells[0].id, "check")
        output = self._run(entry)
        self._settle(entry)
        t_first_us = (perf_counter() - start) * 1e6
        if self._sweep_sms(entry):
            output = self._run(entry)
            self._settle(entry)
        # Before the oracle's own arrays, which are no system's.
        peak_memory_bytes = peak.rise_bytes()
        first = output.clone()
        # What the second run does not write stays NaN, and shows as a difference.
        output.fill_(float("nan"))
        again = self._run(entry)
        self._settle(entry)
        mine = {
            "sums": reference.error_sums(first, self._layer.truth),
            "repeat": torch.equal(first, again),
            "dtype": str(first.dtype),
            "t_first_us": t_first_us,
            "peak_memory_bytes": peak_memory_bytes,
        }
        entry.judge(self._fabric.gather(mine), self._layer.x.dtype)
        entry.note()
        return entry

    def _sweep_sms(self, entry: Entry) -> bool:
        """Let a system that leaves it open run on the number of SMs that is fastest here."""
        system = entry.system
        if not isinstance(system, Tuned) or not system.candidates:
            return False
        self._report(entry.cells[0].id, "SM sweep")
        found = sweep_sms(
            self._fabric,
            self._bench.timer,
            list(system.candidates),
            system.set_num_sms,
            lambda: self._run(entry),
            lambda: self._settle(entry),
        )
        entry.found.append(found.note)
        return True

    def _prepare(self, entry: Entry) -> None:
        """Prepare on every rank; what one rank could not do is the entry's problem on all."""
        problem, unsupported = None, None
        try:
            entry.system.prepare(self._setup(entry.cells[0]))
        except PeerLostError:
            raise
        except UnsupportedError as error:
            unsupported = str(error)
        except MokbenchError as error:
            problem = str(error)
        told = self._fabric.gather((problem, unsupported))
        entry.problem = next((found for found, _ in told if found), None)
        entry.unsupported = next((found for _, found in told if found), None)

    def _settle(self, entry: Entry) -> None:
        """Wait for the pass; raises what its kernels recorded."""
        self._bench.synchronize()
        if isinstance(entry.system, Checked):
            entry.system.check()

    def _setup(self, cell: Cell) -> Setup:
        layer = self._layer
        return Setup(
            workload=layer.workload,
            options=options_of(cell),
            rank=self._fabric.rank,
            max_tokens=layer.max_tokens,
            w13=layer.w13,
            w2=layer.w2,
            fabric=self._fabric,
        )

    def _run(self, entry: Entry) -> Tensor:
        return entry.system.run(*entry.inputs)

    def _measure(self, entries: list[Entry], results: dict[str, dict[str, Any]]) -> None:
        """All rows of one regime in turn, then those of the next: regimes are never mixed."""
        rule = StopRule(self._options.noise, self._options.blocks, self._options.max_time_s)
        systems = {cell.id: entry.system for entry in entries for cell in entry.cells}
        for key in dict.fromkeys((c.regime, c.graph) for e in entries for c in e.cells):
            turn: list[Lane] = []
            for entry in entries:
                for cell in entry.cells:
                    if (cell.regime, cell.graph) == key:
                        turn += self._lane(entry, cell, results)
            reference = self._reference_lane(key[0]) if turn else []
            measure_in_turn(
                self._fabric,
                self._bench.timer,
                turn + reference,
                rule,
                self._options.warmup,
                lambda name: self._report(name, "measure"),
            )
            for lane in turn:
                results[lane.name] |= self._measured(lane) | self._held_against(reference)
                # Before more passes of it are run.
                results[lane.name] |= read_phases(systems[lane.name], self._fabric)
                results[lane.name] |= self._physical(lane)

    def _lane(self, entry: Entry, cell: Cell, results: dict[str, dict[str, Any]]) -> list[Lane]:
        """The cell's lane; none where its graph cannot be captured or computes something else."""
        step: Step = lambda: self._run(entry)  # noqa: E731 (a def would need the same name twice)
        if cell.graph:
            self._report(entry.cells[0].id, "capture")
            graphed, problem = captured(
                self._fabric,
                self._bench.timer,
                lambda: self._run(entry),
                lambda: self._settle(entry),
            )
            if graphed is None:
                results[cell.id]["problem"] = problem
                return []
            step = graphed
        check = entry.system.check if isinstance(entry.system, Checked) else lambda: None
        return [Lane(cell.id, cell.regime, step, check)]

    def _reference_lane(self, regime: Regime) -> list[Lane]:
        """The matmul peak, in turn with the rows; none where nothing is held against it."""
        reference = self._bench.reference(self._layer.x.dtype) if self._rates else None
        if reference is None:
            return []
        # Work for the launcher's eyes only: it belongs to no row.
        return [Lane("matmul peak", regime, reference.run, reference=True)]

    def _measured(self, lane: Lane) -> dict[str, Any]:
        return {
            "blocks": lane.blocks,
            "rejected": lane.rejected,
            "block_us": lane.block_us,
            "rank_spread_us": rank_spread_us(lane.blocks),
            "measured_s": lane.warmup_s + lane.measured_s,
            "stop_reason": lane.stop_reason,
            "sm_clock_mhz": lane.sm_clock_mhz,
            "hold_expired_share": lane.hold_expired_share,
            "l2_state": self._bench.timer.l2_state(lane.regime),
        }

    def _physical(self, lane: Lane) -> dict[str, Any]:
        """What the links themselves counted, apart from the timing: reading takes time."""
        if self._rates is None:
            return {}
        found = self._bench.physical(lane.step, float(np.median(lane.block_us)))
        return {"physical": None if found is None else asdict(found)}

    def _held_against(self, reference: list[Lane]) -> dict[str, Any]:
        """Peak TFLOP/s of one GPU in this turn, and the roofline by it and the rates."""
        measured = self._bench.reference(self._layer.x.dtype) if reference else None
        if measured is None or self._rates is None:
            return {}
        per_rank = measured.flops / (float(np.median(reference[0].block_us)) / 1e6)
        peer = self._rates["peer_bytes_per_s"] if self._bench.sharing.ranks_per_gpu == 1 else None
        rates = metrics.Rates(per_rank, self._rates["read_bytes_per_s"], peer)
        ranks_per_gpu = self._bench.sharing.ranks_per_gpu or 1
        bound = metrics.roofline(self._layer.routing, self._layer.workload, rates, ranks_per_gpu)
        return {
            "peak_tflops": per_rank * ranks_per_gpu / 1e12,
            "peak_sm_clock_mhz": reference[0].sm_clock_mhz,
            "roofline_us": None if bound.seconds is None else bound.seconds * 1e6,
            "roofline_bound": bound.bound,
        }

    def _phases(self, entry: Entry) -> dict[str, Any]:
        """Dispatch and combine alone, where the system has them apart; us, slowest rank."""
        system = entry.system
        if not isinstance(system, Phased):
            return {}
        self._report(entry.cells[0].id, "phases")
        start = perf_counter()

        def measure(iterations: int) -> Tensor:
            return self._bench.timer.phases(
                lambda: system.dispatch(*entry.inputs),
                system.compute,
                system.combine,
                iterations,
            )

        measure(_TRIAL_ITERATIONS)  # also the warm-up of the phases
        spent_s = max(self._fabric.gather(perf_counter() - start))
        fitting = _PHASE_SHARE * self._options.max_time_s / spent_s * _TRIAL_ITERATIONS
        iterations = int(min(_MAX_PHASE_ITERATIONS, max(_TRIAL_ITERATIONS, fitting)))
        slowest = self._fabric.gather_samples(measure(iterations)).amax(dim=0).numpy()
        self._settle(entry)
        spent_s = max(self._fabric.gather(perf_counter() - start))
        return {
            "dispatch_samples_us": slowest[:, 0],
            "combine_samples_us": slowest[:, 1],
            "phases_s": spent_s,
        }
