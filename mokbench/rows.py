"""From what the ranks measured to the stored row: statistics, derived figures, notes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from mokbench import metrics, stats
from mokbench.figures import Quantity, SignalPoint
from mokbench.record import Record
from mokbench.results import SAMPLE_TYPES
from mokbench.systems import System
from mokbench.workload import Cell, Regime

TWIN_NOTE = "host twin: a protocol check, no performance verdict"
MEMORY_NOTE = "peak_memory_bytes: not known on the host fabric, see docs/metrics.md"


@dataclass(frozen=True)
class Surroundings:
    """What a row carries beyond its own measurement."""

    link: str
    oversubscribed: bool
    timer_step_us: float
    signals: Mapping[int, SignalPoint]  # by number of ranks
    min_step: Quantity | None
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
    slowest = [block[:, :, 1].max(axis=0) for block in blocks]
    step = stats.summarize(
        np.concatenate(slowest), np.repeat(np.arange(len(blocks)), [len(s) for s in slowest])
    )
    notes = [TWIN_NOTE, MEMORY_NOTE]
    if around.min_step_note:
        notes.append(around.min_step_note)
    traffic = _traffic(cell, system, facts)
    scalars: dict[str, Any]
    detail, scalars = _signal_fields(system, cell.workload.ranks, around.signals)
    detail |= _phase_fields(cell, result, scalars)
    if around.min_step is not None:
        detail["min_step_us"] = around.min_step
        scalars["min_step_us"] = around.min_step.median
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
        rejected_samples=0,
        block_us=result["block_us"],
        noise=stats.noise(result["block_us"]),
        measured_s=result["measured_s"] + _phases_s(cell, result),
        oversubscribed=around.oversubscribed,
        timer_step_us=around.timer_step_us,
        signal_detail=detail,
        notes=notes,
        **scalars,
        **checked_fields(facts, result),
        **context,
    )
    return record, _samples_frame(blocks)


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
    points: list[dict[str, Any]], fabric: str, link: str, usable_cores: int
) -> list[SignalPoint]:
    """Stored form of the workers' signaling rounds."""
    return [
        SignalPoint.model_validate(
            {
                "ranks": point["ranks"],
                "fabric": fabric,
                "link": link,
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


def _traffic(cell: Cell, system: type[System], facts: dict[str, Any]) -> dict[str, int] | None:
    """Bytes by phase, or None for a system that moves nothing."""
    if system.traffic is None:
        return None
    protocol = "per_rank" if system.traffic == "all" else system.traffic
    found = metrics.Traffic(**facts["traffic"][protocol])
    if system.traffic == "all":
        found = metrics.traffic_to_all(found, cell.workload, facts["num_tokens"])
    return {f"{phase}_bytes": count for phase, count in asdict(found).items()}


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
    }
    detail = {name: value for name, value in found.items() if value is not None}
    scalars = {n: q.median for n, q in detail.items() if n != "signal_after_arrival_us"}
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


def _samples_frame(blocks: list[np.ndarray]) -> pd.DataFrame:
    """Raw samples [ranks, iterations, 2] of each block as one table."""
    parts = []
    for index, block in enumerate(blocks):
        ranks, iterations, _ = block.shape
        rank, iteration = np.meshgrid(np.arange(ranks), np.arange(iterations), indexing="ij")
        parts.append(
            pd.DataFrame(
                {
                    "block": index,
                    "iteration": iteration.ravel(),
                    "rank": rank.ravel(),
                    "start_us": block[:, :, 0].ravel(),
                    "duration_us": block[:, :, 1].ravel(),
                    "accepted": True,
                }
            )
        )
    return pd.concat(parts, ignore_index=True)[list(SAMPLE_TYPES)]
