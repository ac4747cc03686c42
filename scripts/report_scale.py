"""Time and memory of report and check on 10 000 cells.

    python scripts/report_scale.py --cells 10000 --out results/host/report-scale.json

Makes run folders of made-up figures in a temporary folder: 30 launches of history, 3 candidates.
Each command is a process of its own; memory is its peak resident size.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from steps import origin

from mokbench import machine
from mokbench.regression.check import check, record
from mokbench.results import RunFolder
from mokbench.run_meta import RunMeta

SYSTEMS = ("mok", "push", "deepep", "alltoall")
BASE, CANDIDATES = 30, 3


def write_run(path: Path, values: np.ndarray, hour: int) -> RunFolder:
    """A run with one row per value, in us: systems in turn over models, ranks, tokens, routings."""
    meta = RunMeta(
        name="scale",
        machine=machine.describe(),
        created=f"2026-01-{hour // 24 + 1:02d}T{hour % 24:02d}:00:00Z",
    )
    run = RunFolder.create(path, meta)
    lines = [json.dumps(_row(i, float(value))) for i, value in enumerate(values)]
    (path / "records.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    run.finish("done")
    return RunFolder.open(path)


def _row(i: int, us: float) -> dict[str, Any]:
    workload, system = divmod(i, len(SYSTEMS))
    tokens, routing, ranks, model = _digits(workload, (5, 10, 4, 1000))
    name, regime = SYSTEMS[system], "isolated"
    tokens_per_rank, label = 4**tokens, f"hot_rank-{1 + routing / 10:g}"
    return {
        "record_version": 1,
        "id": f"m{model}.{name}.r{2 << ranks}.t{tokens_per_rank}.{label}.bf16.{regime}",
        "system": name,
        "status": "ok",
        "fabric": "cuda",
        "link": "nvlink",
        "ranks": 2 << ranks,
        "ranks_per_gpu": 1,
        "model": f"m{model}",
        "hidden": 7168,
        "intermediate": 2048,
        "experts": 256,
        "top_k": 8,
        "tokens_per_rank": tokens_per_rank,
        "dtype": "bf16",
        "routing": label,
        "regime": regime,
        "step_time_us": dict.fromkeys(("median", "p95", "min", "ci_low", "ci_high"), us)
        | {"n": 99},
        "block_us": [us * (1 + 0.01 * k) for k in range(9)],
        "turn": f"t{workload}",
        "cell_digest": f"all-{i:016d}",
        "sm_clock_mhz": 1500.0,
        "roofline_ratio": 1.5,
        "link_utilization": 0.5,
        "wire_utilization": 0.7,
        "expert_counts": [100 + (i + k) % 37 for k in range(256)],
        "imbalance": {
            "expert_max_over_mean": 1 + routing / 10,
            "rank_max_over_mean": 1 + routing / 10,
            "pair_max_over_mean": 1.0,
            "cv": 0.1,
            "gini": 0.1,
            "empty_experts": 0.0,
        },
    }


def _digits(number: int, bases: tuple[int, ...]) -> list[int]:
    found = []
    for base in bases:
        number, digit = divmod(number, base)
        found.append(digit)
    return found


def prepare(folder: Path, cells: int) -> None:
    """History of ``BASE`` launches at 1 % noise and candidates in which cell 77 is 6 % slower."""
    rng = np.random.default_rng(0)
    levels = rng.uniform(100, 10_000, cells)
    for i in range(BASE + CANDIDATES):
        values = levels * np.exp(rng.normal(0, 0.01, cells))
        if i >= BASE:
            values[77] *= 1.06
            write_run(folder / f"candidate-{i}", values, i)
        else:
            run = write_run(folder / f"base-{i}", values, i)
            record(check([run], folder / "history"))


def measure(arguments: list[str], out: Path) -> dict[str, Any]:
    """Run a mokbench command into ``out``: exit code, seconds, peak MiB."""
    start = time.monotonic()
    with out.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "mokbench", *arguments], stdout=file, stderr=file
        )
        _, status, usage = os.wait4(process.pid, 0)
    return {
        "command": " ".join(arguments).replace(str(out.parent), "DIR"),
        "exit": os.waitstatus_to_exitcode(status),
        "seconds": round(time.monotonic() - start, 1),
        "peak_mib": round(usage.ru_maxrss / 1024),
        "bytes": out.stat().st_size,
    }


def main() -> None:
    """Print one JSON line a command; --out gets them with machine, date, versions and command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=int, default=10_000, help="at least 78")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cells, measured = options.cells, []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, cells)
        one = str(folder / "base-0")
        for arguments in (
            ["report", one, "--format=html"],
            ["report", one, "--format=table"],
            ["report", one, "--format=json"],
            ["check", str(folder / "candidate-*"), f"--history={folder / 'history'}"],
        ):
            measured.append(measure(arguments, folder / "out"))
            print(json.dumps(measured[-1]), flush=True)
    if options.out:
        content = {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            **origin(*sys.argv),
            "cells": cells,
            "launches": {"base": BASE, "candidate": CANDIDATES},
            "commands": measured,
        }
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
