"""Builds run folders with made-up but plausible figures, for tests of results and reports only."""

import io
import itertools
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console

from mokbench import report
from mokbench.figures import Quantity, SignalPoint
from mokbench.machine import Machine
from mokbench.record import Record
from mokbench.results import RunFolder
from mokbench.run_meta import RunMeta
from mokbench.stats import block_medians, noise, quantity, summarize

CUDA = {"fabric": "cuda", "link": "nvlink"}
NUM_BLOCKS = 8
ITERATIONS = 12
# Made-up step times relative to mok at balanced routing, and slowdowns by routing.
SYSTEM_FACTOR = {"mok": 1.0, "push": 1.2, "alltoall": 3.5, "local": 0.6, "deepep": 1.3}
SKEW = {"balanced": 0.0, "typical": 0.25, "skewed": 0.6, "extreme": 1.4}


def fake_machine(**changes: Any) -> Machine:
    """A host of two cores and no GPU, unless changed."""
    fields: dict[str, Any] = {
        "cpu": "Example CPU 9000",
        "cores": 2,
        "usable_cores": 2,
        "memory_bytes": 16 * 2**30,
        "torch": "2.13.0+cpu",
        "python": "3.12.1",
        "os": "Example Linux 1",
    }
    machine = Machine(**(fields | changes))
    return machine.model_copy(update={"key": machine.computed_key()})


def fake_meta(**changes: Any) -> RunMeta:
    fields: dict[str, Any] = {
        "name": "fake",
        "machine": fake_machine(),
        "config_text": "name: fake\n",
        "created": "2026-01-02T03:04:05+00:00",
    }
    return RunMeta(**(fields | changes))


def fake_record(**changes: Any) -> Record:
    """An ok row of mok on the host with few figures; the id follows from what it is."""
    fields: dict[str, Any] = {
        "system": "mok",
        "status": "ok",
        "fabric": "host",
        "link": "shm",
        "ranks": 4,
        "model": "tiny",
        "hidden": 512,
        "intermediate": 256,
        "experts": 16,
        "top_k": 4,
        "tokens_per_rank": 128,
        "dtype": "bf16",
        "routing": "balanced",
        "regime": "isolated",
    }
    fields |= changes
    graph = ".graph" if fields.get("graph") else ""
    where = f".seed{fields['seed']}" if fields.get("seed") else ""
    where += f".{fields['placement']}" if fields.get("placement") else ""
    variant = f"~{fields['variant']}" if fields.get("variant") else ""
    return Record(
        **{
            "id": f"{fields['model']}.{fields['system']}{variant}.r{fields['ranks']}"
            f".t{fields['tokens_per_rank']}.{fields['routing']}.{fields['dtype']}"
            f".{fields['regime']}{graph}{where}",
            **fields,
        }
    )


def fake_samples(median_us: float, ranks: int, seed: int) -> pd.DataFrame:
    """Raw samples whose slow tail and drift between blocks look like a machine's."""
    rng = np.random.default_rng(seed)
    index = list(itertools.product(range(NUM_BLOCKS), range(ITERATIONS), range(ranks)))
    frame = pd.DataFrame(index, columns=["block", "iteration", "rank"])
    drift = rng.normal(1.0, 0.02, NUM_BLOCKS)[frame["block"].to_numpy()]
    tail = 1.0 + rng.gamma(2.0, 0.01, len(frame))
    frame["duration_us"] = median_us * drift * tail
    frame["sm_clock_mhz"] = np.nan
    frame["start_us"] = np.cumsum(frame["duration_us"].to_numpy())
    frame["accepted"] = True
    return frame


def measured(record: Record, median_us: float, **changes: Any) -> tuple[Record, pd.DataFrame]:
    """``record`` with the figures of made-up samples around ``median_us``."""
    samples = fake_samples(median_us, record.ranks, zlib.crc32(record.id.encode()))
    slowest = samples.groupby(["block", "iteration"])["duration_us"].max()
    block = slowest.index.get_level_values("block").to_numpy()
    blocks = block_medians(slowest.to_numpy(), block)
    figures = {
        "step_time_us": summarize(slowest.to_numpy(), block),
        "block_us": blocks,
        "noise": noise(blocks),
        "stop_reason": "noise",
        "rank_spread_us": 0.05 * median_us,
        "tokens_per_s": record.tokens_per_rank * record.ranks / median_us * 1e6,
    }
    return Record.model_validate({**record.to_dict(), **figures, **changes}), samples


def fake_counts(experts: int, routes: int, skew: float) -> list[int]:
    """Rows per expert: even at skew 0, falling off faster the higher it is."""
    share = np.exp(-skew * np.arange(experts) / experts * 3.0)
    share = np.random.default_rng(7).permutation(share / share.sum())
    edges = np.round(np.concatenate([[0.0], np.cumsum(share)]) * routes)
    return [int(count) for count in np.diff(edges)]


def imbalance_of(counts: Sequence[int], ranks: int) -> dict[str, float]:
    """The contract's imbalance object for made-up counts; pairs are taken as even."""
    rows = np.asarray(counts, dtype=np.float64)
    by_rank = rows.reshape(ranks, -1).sum(axis=1)
    ordered = np.sort(rows)
    index = np.arange(1, len(rows) + 1)
    gini = float((2 * index - len(rows) - 1) @ ordered / (len(rows) * rows.sum()))
    return {
        "expert_max_over_mean": float(rows.max() / rows.mean()),
        "rank_max_over_mean": float(by_rank.max() / by_rank.mean()),
        "pair_max_over_mean": float(by_rank.max() / by_rank.mean()),
        "cv": float(rows.std() / rows.mean()),
        "gini": gini,
        "empty_experts": float((rows == 0).mean()),
    }


def fake_signals(counts: Sequence[int], *, cores: int, fabric: str = "host") -> list[SignalPoint]:
    """Signaling that grows by a line with the number of ranks, 20 times worse without a core."""
    rng = np.random.default_rng(1)
    lines = {
        "local_hop_us": (0.3, 0.0),
        "signal_entry_us": (1.0, 0.5),
        "signal_ready_us.pull": (1.5, 0.3),
        "signal_ready_us.push": (1.8, 0.6),
        "signal_after_arrival_us.pull": (0.3, 0.02),
        "signal_after_arrival_us.push": (0.4, 0.3),
    }
    points = []
    for ranks in counts:
        worse = 20.0 if ranks > cores else 1.0
        quantities: dict[str, Quantity] = {
            name: quantity((alpha + beta * ranks) * worse * (1 + rng.gamma(2.0, 0.05, 200)))
            for name, (alpha, beta) in lines.items()
        }
        if ranks == 2:
            quantities["signal_hop_us"] = quantity(0.8 * (1 + rng.gamma(2.0, 0.05, 200)))
        points.append(
            SignalPoint.model_validate(
                {
                    "ranks": ranks,
                    "fabric": fabric,
                    "link": "shm" if fabric == "host" else "nvlink",
                    "oversubscribed": ranks > cores,
                    "quantities": quantities,
                }
            )
        )
    return points


def fake_run(
    path: Path,
    *,
    systems: Sequence[str] = ("mok", "push", "alltoall"),
    routings: Sequence[str] = ("balanced", "typical", "extreme"),
    tokens: Sequence[int] = (16, 128),
    regimes: Sequence[str] = ("isolated", "steady"),
    signals: Sequence[int] = (2, 3, 4),
    machine: Machine | None = None,
    changes: dict[str, Any] | None = None,
    keep_samples: bool = False,
) -> RunFolder:
    """A finished run whose rows of one workload and regime were measured in turn."""
    machine = machine or fake_machine()
    run = RunFolder.create(path, fake_meta(machine=machine))
    for count, routing, regime in itertools.product(tokens, routings, regimes):
        for system in systems:
            record, samples = _fake_row(system, count, routing, regime, changes or {})
            run.append(record, samples if keep_samples else None)
    if signals:
        fabric = (changes or {}).get("fabric", "host")
        run.write_signals(fake_signals(signals, cores=machine.usable_cores, fabric=fabric))
    run.finish("done")
    return RunFolder.open(path)


def _fake_row(
    system: str, count: int, routing: str, regime: str, changes: dict[str, Any]
) -> tuple[Record, pd.DataFrame]:
    record = fake_record(
        system=system, tokens_per_rank=count, routing=routing, regime=regime, **changes
    )
    counts = fake_counts(record.experts, count * record.ranks * record.top_k, SKEW[routing])
    median_us = (200 + 2.0 * count) * SYSTEM_FACTOR[system] * (1 + 0.5 * SKEW[routing])
    useful = count * record.ranks * record.hidden * 2 * 2
    return measured(
        record,
        median_us * (0.9 if regime == "steady" else 1.0),
        turn=f"{count}-{routing}-{regime}",
        oversubscribed=record.fabric == "host" and record.ranks > 2,
        useful_bytes=useful,
        wire_bytes=int(useful * (1.6 if system == "mok" else 1.0)),
        dispatch_us=None if system == "mok" else 0.2 * median_us,
        combine_us=None if system == "mok" else 0.1 * median_us,
        min_step_us=40.0 * SYSTEM_FACTOR[system],
        rel_error=3.1e-3,
        nan_count=0,
        bitwise_repeat=system != "alltoall",
        expert_counts=counts,
        imbalance=imbalance_of(counts, record.ranks),
    )


def step(median: float, half: float = 1.0) -> dict[str, Any]:
    half = min(half, 0.5 * median)
    low, high = median - half, median + half
    return {"median": median, "p95": high, "min": low, "ci_low": low, "ci_high": high, "n": 60}


def row(system: str, median: float, **changes: Any) -> Record:
    return fake_record(system=system, step_time_us=step(median), **changes)


def stored(path: Path, rows: Sequence[Record], **changes: Any) -> RunFolder:
    run = RunFolder.create(path, fake_meta(**changes))
    for record in rows:
        run.append(record)
    run.finish("done")
    return RunFolder.open(path)


def text_of(runs: list[RunFolder], width: int = 120, **options: Any) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    console.print(report.table(runs, **options))
    return out.getvalue()
