"""From what the ranks measured to the stored row: statistics, derived figures, notes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from mokbench import clocks, metrics, stats
from mokbench.figures import SHARED_GPU, SHARED_GPUS, Quantity, SignalPoint, StepTime
from mokbench.measure.columns import CLOCK, DURATION, START
from mokbench.rates import RatePoint
from mokbench.record import Record
from mokbench.results import SAMPLE_TYPES
from mokbench.row_traffic import row_traffic
from mokbench.systems import System
from mokbench.topology import Topology
from mokbench.workload import Cell, Regime

TWIN_NOTE = "host twin: a protocol check, no performance verdict"
_RESULT_FIELDS = (
    "peak_tflops",
    "peak_sm_clock_mhz",
    "roofline_us",
    "sm_clock_mhz",
    "hold_expired_share",
    "l2_state",
    "peak_memory_bytes",
)
MEMORY_NOTE = "peak_memory_bytes: not known on the host fabric, see docs/metrics.md"


@dataclass(frozen=True)
class Surroundings:
    """What a row carries beyond its own measurement."""

    link: str
    topology: Topology
    oversubscribed: bool
    timer_step_us: float | None
    signals: Mapping[int, SignalPoint]  # by number of ranks
    min_step: Quantity | None
    rates: RatePoint | None = None
    min_step_note: str | None = None


def measured_record(
    cell: Cell,
    system: type[System],
    facts: dict[str, Any],
    result: dict[str, Any],
    around: Surroundings,
    **context: Any,
) -> tuple[Record, pd.DataFrame]:
    """The ok row of ``cell`` and its raw samples; ``context`` goes into the row as it is."""
    blocks: list[np.ndarray] = result["blocks"]
    step = _step_time(blocks)
    notes = _fabric_notes(cell, around.link, facts)
    traffic = row_traffic(cell, system.traffic, facts, around.topology)
    notes += result.get("notes", []) + result.get("kernel_phases_notes", [])
    if around.min_step_note:
        notes.append(around.min_step_note)
    detail, scalars = _signal_fields(system, cell.workload.ranks, around.signals)
    detail |= _phase_fields(cell, result, scalars)
    if around.min_step is not None:
        detail["min_step_us"] = around.min_step
        scalars["min_step_us"] = around.min_step.median
    if cell.fabric == "cuda":
        scalars |= _gpu_fields(facts, result, step.median, scalars, traffic, around, notes)
    record = Record.from_cell(
        cell,
        status="ok",
        link=around.link,
        step_time_us=step,
        rank_spread_us=result["rank_spread_us"] if cell.regime is Regime.ISOLATED else None,
        tokens_per_s=facts["num_tokens"] / (step.median / 1e6),
        useful_bytes=_bytes(traffic, "useful") if traffic else 0,
        wire_bytes=_bytes(traffic, "wire") if traffic else 0,
        traffic=traffic,
        stop_reason=result["stop_reason"],
        rejected_samples=sum(part.shape[1] for part in result["rejected"]),
        block_us=result["block_us"],
        noise=stats.noise(result["block_us"]),
        measured_s=result["measured_s"] + _phases_s(cell, result),
        oversubscribed=around.oversubscribed,
        timer_step_us=around.timer_step_us,
        signal_detail=detail,
        kernel_phases=result.get("kernel_phases", []),
        notes=notes,
        **scalars,
        **checked_fields(facts, result),
        **context,
    )
    return record, _samples_frame(blocks, result["rejected"])


def _step_time(blocks: Sequence[np.ndarray]) -> StepTime:
    """Over iterations, each the maximum over ranks."""
    slowest = [block[:, :, DURATION].max(axis=0) for block in blocks]
    index = np.repeat(np.arange(len(blocks)), [len(part) for part in slowest])
    return stats.summarize(np.concatenate(slowest), index)


def _fabric_notes(cell: Cell, link: str, facts: dict[str, Any]) -> list[str]:
    if cell.fabric == "host":
        return [TWIN_NOTE, MEMORY_NOTE]
    if facts["ranks_per_gpu"] > 1:
        return [SHARED_GPU if link == "hbm" else SHARED_GPUS]
    return []


def _gpu_fields(
    facts: dict[str, Any],
    result: dict[str, Any],
    step_us: float,
    phases: dict[str, Any],
    traffic: dict[str, Any] | None,
    around: Surroundings,
    notes: list[str],
) -> dict[str, Any]:
    """What only rows of the cuda fabric carry: rates over the measured peaks, clock, sharing."""
    ranks_per_gpu = facts["ranks_per_gpu"]
    fields: dict[str, Any] = {name: facts[name] for name in ("ranks_per_gpu", "num_sms")} | {
        name: result.get(name) for name in _RESULT_FIELDS
    }
    gpus = -(-facts["num_ranks"] // ranks_per_gpu)
    fields["tflops_per_gpu"] = metrics.tflops_per_gpu(facts["flops"], step_us / 1e6, gpus)
    clock_mhz, flops = fields["sm_clock_mhz"], facts.get("mma_flops_per_cycle")
    if clock_mhz and flops:
        fields["mma_utilization"] = metrics.mma_utilization(
            fields["tflops_per_gpu"], flops, clock_mhz
        )
    notes += clocks.row_notes(clock_mhz, fields["hold_expired_share"], fields["peak_sm_clock_mhz"])
    if fields["roofline_us"]:
        fields["roofline_ratio"] = step_us / fields["roofline_us"]
        notes.append(f"roofline: bound by {result['roofline_bound']}")
    if physical := result.get("physical"):
        fields["physical_bytes"] = physical["payload_bytes"]
        notes += [physical["note"]] if physical["note"] else []
    elif facts["num_ranks"] > 1:
        notes.append(f"physical_bytes: unavailable: {_why_not_counted(around.topology)}")
    peer = around.rates.peer_bytes_per_s if around.rates else None
    if ranks_per_gpu > 1 and around.link != "hbm":
        # The next rank is on the same GPU for some and behind a link for others: no rate of either.
        peer = None
    if peer is not None:
        fields["link_peak_gbs"] = peer / 1e9
        for name, kind, spent_us in (
            ("link_utilization", "useful", step_us),
            ("wire_utilization", "wire", step_us),
            ("dispatch_link_utilization", "dispatch_useful", phases.get("dispatch_us")),
            ("combine_link_utilization", "combine_useful", phases.get("combine_us")),
        ):
            if traffic is None or spent_us is None:
                continue
            moved = traffic[f"{kind}_bytes"] if "_" in kind else _bytes(traffic, kind)
            fields[name] = metrics.utilization(
                moved, spent_us / 1e6, peer, facts["num_ranks"], around.link
            )
    return fields


def _why_not_counted(topology: Topology) -> str:
    if topology.nodes > 1 and not topology.is_mnnvl:
        return "NVLink's counters see nothing of the network between nodes"
    return "ranks that share a GPU have no link to count"


def checked_fields(facts: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """What the oracle and the routing tell, also of a row that failed the oracle."""
    names = ("rel_error", "nan_count", "bitwise_repeat", "t_first_us")
    fields = {name: result[name] for name in names if name in result}
    if result.get("problem"):
        fields.pop("t_first_us", None)
    return fields | {
        "imbalance": facts["imbalance"],
        "expert_counts": facts["expert_counts"],
        "routing_digest": facts["routing_digest"],
    }


def signal_points(
    points: list[dict[str, Any]], fabric: str, link: Callable[[int], str], usable_cores: int
) -> list[SignalPoint]:
    """Stored form of the workers' signaling rounds; ``link`` by number of ranks."""
    return [
        SignalPoint.model_validate(
            {
                "ranks": point["ranks"],
                "fabric": fabric,
                "link": link(point["ranks"]),
                "oversubscribed": point["ranks"] > usable_cores,
                "crowded": [
                    name
                    for name in point["samples"]
                    if _num_threads(name, point["ranks"]) > usable_cores
                ],
                "quantities": {
                    name: stats.quantity(rounds) for name, rounds in point["samples"].items()
                },
            }
        )
        for point in points
    ]


def _num_threads(quantity: str, ranks: int) -> int:
    """Threads that must run at once for a quantity: "ready" has an observer in every rank."""
    if quantity in ("signal_hop_us", "local_hop_us"):
        return 2
    return ranks if quantity == "signal_entry_us" else 2 * ranks


def _bytes(traffic: dict[str, Any], kind: str) -> int:
    return int(traffic[f"dispatch_{kind}_bytes"] + traffic[f"combine_{kind}_bytes"])


def _signal_fields(
    system: type[System], ranks: int, signals: Mapping[int, SignalPoint]
) -> tuple[dict[str, Quantity], dict[str, Any]]:
    """The row's own protocol's figures; a system without one carries none."""
    if system.signal is None:
        return {}, {}
    own = signals[ranks].quantities if ranks in signals else {}
    pair = signals[2].quantities if 2 in signals else {}
    found = {
        "signal_hop_us": pair.get("signal_hop_us"),
        "local_hop_us": (pair or own).get("local_hop_us"),
        "signal_entry_us": own.get("signal_entry_us"),
        "signal_ready_us": own.get(f"signal_ready_us.{system.signal}"),
        "signal_after_arrival_us": own.get(f"signal_after_arrival_us.{system.signal}"),
        "clock_offset_bound_us": own.get(f"clock_offset_bound_us.{system.signal}"),
    }
    detail = {name: value for name, value in found.items() if value is not None}
    detail_only = ("signal_after_arrival_us", "clock_offset_bound_us")
    scalars = {n: q.median for n, q in detail.items() if n not in detail_only}
    return detail, scalars


def _phase_fields(
    cell: Cell, result: dict[str, Any], scalars: dict[str, Any]
) -> dict[str, Quantity]:
    """Dispatch and combine alone, on isolated rows only: a chain has no phases apart."""
    if cell.regime is not Regime.ISOLATED:
        return {}
    detail = {}
    for phase in ("dispatch", "combine"):
        if f"{phase}_samples_us" in result:
            detail[f"{phase}_us"] = stats.quantity(result[f"{phase}_samples_us"])
            scalars[f"{phase}_us"] = detail[f"{phase}_us"].median
    return detail


def _phases_s(cell: Cell, result: dict[str, Any]) -> float:
    """Time spent on the phases; the isolated row carries them."""
    return result.get("phases_s", 0.0) if cell.regime is Regime.ISOLATED else 0.0


def _samples_frame(blocks: Sequence[np.ndarray], rejected: Sequence[np.ndarray]) -> pd.DataFrame:
    """Raw samples [ranks, iterations, 3] of each block as one table, rejected ones at the end."""
    parts = [_block_frame(block, index, True) for index, block in enumerate(blocks)]
    parts += [_block_frame(block, index, False) for index, block in enumerate(rejected)]
    return pd.concat(parts, ignore_index=True)[list(SAMPLE_TYPES)]


def _block_frame(block: np.ndarray, index: int, accepted: bool) -> pd.DataFrame:
    ranks, iterations, _ = block.shape
    rank, iteration = np.meshgrid(np.arange(ranks), np.arange(iterations), indexing="ij")
    return pd.DataFrame(
        {
            "block": index,
            "iteration": iteration.ravel(),
            "rank": rank.ravel(),
            "start_us": block[:, :, START].ravel(),
            "duration_us": block[:, :, DURATION].ravel(),
            "sm_clock_mhz": block[:, :, CLOCK].ravel(),
            "accepted": accepted,
        }
    )
