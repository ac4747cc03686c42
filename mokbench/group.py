"""One rank's work on a group of rows: all systems on one workload, checked, then timed in turn."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from mokbench import metrics, reference
from mokbench.config import MeasureOptions
from mokbench.errors import MokbenchError
from mokbench.fabric.group import PeerLostError
from mokbench.fabric.host import HostFabric
from mokbench.layer import Layer
from mokbench.measure.in_turn import Lane, measure_in_turn, rank_spread_us
from mokbench.measure.memory import PeakMemory
from mokbench.measure.timing import phase_samples
from mokbench.stats import StopRule
from mokbench.systems import Phased, Setup, System, options_of, system_class
from mokbench.workload import Cell

# Phases are a by-product of a row, so they get a fraction of its time.
_PHASE_SHARE = 0.25
_MAX_PHASE_ITERATIONS = 100
_TRIAL_ITERATIONS = 5

Report = Callable[[str, str], None]


@dataclass
class Entry:
    """One system with its options, prepared once for all its rows of the group."""

    cells: list[Cell]
    system: System
    facts: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None

    @property
    def usable(self) -> bool:
        """Whether it passed the oracle."""
        return self.problem is None


class GroupRun:
    """Runs the rows of one workload on this rank. Every method is collective over the ranks.

    ``report`` is told (cell id, phase) whenever work on a row starts, so that the launcher knows
    what a dead or hung rank was doing.
    """

    def __init__(
        self, fabric: HostFabric, layer: Layer, options: MeasureOptions, report: Report
    ) -> None:
        self._fabric, self._layer = fabric, layer
        self._options, self._report = options, report

    def run(self, cells: list[Cell]) -> dict[str, dict[str, Any]]:
        """Result per cell id: {"problem"} or facts, samples and stop reason. Same on all ranks."""
        entries: list[Entry] = []
        try:
            for members in _by_system(cells):
                entries.append(self._admit(members))
            usable = [entry for entry in entries if entry.usable]
            lanes = self._measure(usable)
            for entry in usable:
                entry.facts |= self._phases(entry)
        finally:
            for entry in entries:
                entry.system.close()
        results = {c.id: {"problem": e.problem, **e.facts} for e in entries for c in e.cells}
        for lane in lanes:
            results[lane.cell.id] |= {
                "blocks": lane.blocks,
                "block_us": lane.block_us,
                "rank_spread_us": rank_spread_us(lane.blocks),
                "measured_s": lane.warmup_s + lane.measured_s,
                "stop_reason": lane.stop_reason,
            }
        return results

    def workload_facts(self) -> dict[str, Any]:
        """What the routing alone decides, for every row of the group."""
        layer = self._layer
        work, routing = layer.workload, layer.routing
        return {
            "routing_digest": routing.digest(),
            "imbalance": asdict(metrics.imbalance(routing, work.model.experts, work.ranks)),
            "expert_counts": metrics.expert_counts(routing, work.model.experts).tolist(),
            "traffic": {
                protocol: asdict(metrics.traffic(routing, work, protocol))
                for protocol in ("per_route", "per_rank")
            },
            "num_tokens": sum(routing.num_tokens),
        }

    def _admit(self, cells: list[Cell]) -> Entry:
        """Prepare a system and let it pass the oracle; its problem says why it did not."""
        self._report(cells[0].id, "prepare")
        entry = Entry(cells, system_class(cells[0].system)())
        peak = PeakMemory()
        try:
            entry.system.prepare(self._setup(cells[0]))
        except PeerLostError:
            raise
        except MokbenchError as error:
            entry.problem = str(error)
            return entry
        self._report(cells[0].id, "check")
        start = perf_counter()
        output = self._run(entry)
        t_first_us = (perf_counter() - start) * 1e6
        first = output.clone()
        # What the second run does not write stays NaN, and shows as a difference.
        output.fill_(float("nan"))
        again = self._run(entry)
        mine = {
            "sums": reference.error_sums(first, self._layer.truth),
            "repeat": torch.equal(first, again),
            "dtype": str(first.dtype),
            "t_first_us": t_first_us,
            "peak_memory_bytes": peak.rise_bytes(),
        }
        self._judge(entry, self._fabric.gather(mine))
        return entry

    def _judge(self, entry: Entry, by_rank: list[dict[str, Any]]) -> None:
        """Same verdict on all ranks, from all ranks' errors."""
        sums = [rank["sums"] for rank in by_rank]
        accuracy = reference.judge(sums, self._layer.workload.dtype)
        repeat = all(rank["repeat"] for rank in by_rank)
        peaks = [rank["peak_memory_bytes"] for rank in by_rank]
        entry.facts = {
            "rel_error": accuracy.rel_error,
            "nan_count": accuracy.nan_count,
            "bitwise_repeat": repeat,
            "t_first_us": max(rank["t_first_us"] for rank in by_rank),
            "peak_memory_bytes": None if None in peaks else max(peaks),
        }
        wrong_dtypes = {rank["dtype"] for rank in by_rank} - {str(self._layer.x.dtype)}
        if wrong_dtypes:
            found = ", ".join(sorted(wrong_dtypes))
            entry.problem = f"output is {found}, not the input's {self._layer.x.dtype}"
        elif not accuracy.ok:
            entry.problem = (
                f"output differs from the FP32 reference: relative error {accuracy.rel_error:.3g} "
                f"(worst token {accuracy.max_token_error:.3g}), allowed {accuracy.tolerance:.3g}; "
                f"NaN count {accuracy.nan_count}"
            )
        elif entry.system.deterministic and not repeat:
            entry.problem = "two runs on the same inputs gave different bits"

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
        layer = self._layer
        return entry.system.run(layer.x, layer.topk_idx, layer.topk_weights)

    def _measure(self, entries: list[Entry]) -> list[Lane]:
        """All rows of one regime in turn, then those of the next: regimes are never mixed."""
        lanes: list[Lane] = []
        rule = StopRule(self._options.noise, self._options.blocks, self._options.max_time_s)
        for key in dict.fromkeys((c.regime, c.graph) for e in entries for c in e.cells):
            turn = [
                Lane(cell, lambda entry=entry: self._run(entry))  # type: ignore[misc]
                for entry in entries
                for cell in entry.cells
                if (cell.regime, cell.graph) == key
            ]
            measure_in_turn(
                self._fabric,
                turn,
                rule,
                self._options.warmup,
                lambda cell: self._report(cell.id, "measure"),
            )
            lanes += turn
        return lanes

    def _phases(self, entry: Entry) -> dict[str, Any]:
        """Dispatch and combine alone, where the system has them apart; us, slowest rank."""
        system, layer = entry.system, self._layer
        if not isinstance(system, Phased):
            return {}
        self._report(entry.cells[0].id, "phases")
        start = perf_counter()

        def measure(iterations: int) -> Tensor:
            return phase_samples(
                self._fabric,
                lambda: system.dispatch(layer.x, layer.topk_idx, layer.topk_weights),
                system.compute,
                system.combine,
                iterations,
            )

        measure(_TRIAL_ITERATIONS)  # also the warm-up of the phases
        spent_s = max(self._fabric.gather(perf_counter() - start))
        fitting = _PHASE_SHARE * self._options.max_time_s / spent_s * _TRIAL_ITERATIONS
        iterations = int(min(_MAX_PHASE_ITERATIONS, max(_TRIAL_ITERATIONS, fitting)))
        slowest = self._fabric.gather_samples(measure(iterations)).amax(dim=0).numpy()
        spent_s = max(self._fabric.gather(perf_counter() - start))
        return {
            "dispatch_samples_us": slowest[:, 0],
            "combine_samples_us": slowest[:, 1],
            "phases_s": spent_s,
        }


def _by_system(cells: list[Cell]) -> list[list[Cell]]:
    """Cells that share a prepared system, in order of first appearance."""
    members: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        members.setdefault((cell.system, cell.options), []).append(cell)
    return list(members.values())
