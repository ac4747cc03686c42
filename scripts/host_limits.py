"""Measures what the host fabric promises: run from the repository root, writes a run folder.

    python scripts/host_limits.py results/host

leaves results/host/quickstart (an ordinary run folder) and results/host/limits.json: wall time and
peak memory of the quickstart, harness overhead a row, copy rates of the twin beside memcpy, the
signal hop of several starts of two ranks, and the time to expand 10 000 cells; with machine, date,
versions and command.
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from steps import origin

from mokbench.cells import expand
from mokbench.config import parse
from mokbench.fabric import segments
from mokbench.launch import WorkerPool
from mokbench.results import RunFolder
from mokbench.spawn import LocalStarter
from mokbench.twin import load_twin

QUICKSTART = "configs/quickstart.yaml"
ROW_BYTES = (1024, 4096, 14336)
# New processes each: the hop has two modes, and one start shows one of them.
SIGNAL_STARTS = 14
# Larger than any cache level that could hold both ends.
COPY_BYTES = 256 << 20
MANY_CELLS = """\
ranks: [1, 2, 4, 8]
model: {hidden: 512, intermediate: 256, experts: 32, top_k: 4}
systems: [mok, push, alltoall]
dtype: [bf16, fp32]
seed: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
sweep: {tokens_per_rank: [1, 2, 4, 8, 16, 32, 64], routing: [balanced, typical, skewed]}
measure: {regimes: [isolated, steady]}
"""


class PeakMemory(threading.Thread):
    """Highest sum of proportional set sizes of a process and all below it, in bytes."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._root = psutil.Process(pid)
        self.peak_bytes = 0

    def run(self) -> None:
        """Sample until the process is gone."""
        while self._root.is_running() and self._root.status() != psutil.STATUS_ZOMBIE:
            total = 0
            for process in [self._root, *self._root.children(recursive=True)]:
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:
                    continue
            self.peak_bytes = max(self.peak_bytes, total)
            # Reading the sets takes milliseconds of a core that the ranks want.
            time.sleep(1.0)


def quickstart(folder: Path) -> dict[str, Any]:
    """Run the quickstart as a user would, and account for its time and memory."""
    command = [sys.executable, "-P", "-m", "mokbench", "run", QUICKSTART, "--out", str(folder)]
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    memory = PeakMemory(process.pid)
    memory.start()
    code = process.wait()
    wall_s = time.monotonic() - start
    memory.join()
    stored = RunFolder.open(folder)
    rows = [r for r in stored.records() if r.status == "ok"]
    spent = sum((r.elapsed_s or 0) - (r.measured_s or 0) for r in rows)
    return {
        "exit_code": code,
        "wall_s": round(wall_s, 2),
        "parts_of_wall_s": _parts(stored, wall_s),
        "rows_ok": len(rows),
        "peak_memory_mib": round(memory.peak_bytes / (1 << 20), 1),
        "overhead_s_per_row": round(spent / len(rows), 3),
    }


def _parts(folder: RunFolder, wall_s: float) -> dict[str, float]:
    """Where the wall time went, to the second of the stored times.

    ``before_rows``: starting the ranks, signaling, the minimal steps. ``rows``: all that rows count
    as theirs. ``outside``: imports, reading the config, the report and its charts.
    """
    rows = folder.records()
    created, finished = _time(folder.meta.created), _time(folder.meta.finished)
    first = min(_time(r.started) for r in rows)
    parts = {
        "before_rows": (first - created).total_seconds(),
        "rows": sum(r.elapsed_s or 0 for r in rows),
        "outside": wall_s - (finished - created).total_seconds(),
    }
    return {name: round(seconds, 1) for name, seconds in parts.items()}


def _time(stored: str | None) -> datetime:
    assert stored is not None, "the run did not get that far"
    return datetime.fromisoformat(stored)


def signal_hops() -> dict[str, Any]:
    """Median hop in us of every start of two ranks, and the least and largest of them."""
    medians = []
    for _ in range(SIGNAL_STARTS):
        token = segments.new_token()
        with tempfile.TemporaryDirectory() as logs:
            pool = WorkerPool(2, LocalStarter(Path(logs)), wait_bound_s=10.0, shm_token=token)
            try:
                points = pool.call({"kind": "signals"}, 120.0, 120.0)["points"]
            finally:
                pool.stop()
                segments.remove(token)
        medians.append(round(median(points[0]["samples"]["signal_hop_us"]), 4))
    return {"medians": medians, "least": min(medians), "largest": max(medians)}


def copy_rates() -> dict[str, dict[str, float]]:
    """GB/s by row size: memcpy and the twin's own pull and push copies, in turn."""
    twin = load_twin()
    rates: dict[str, dict[str, float]] = {}
    for row_bytes in ROW_BYTES:
        samples: dict[str, list[float]] = {"memcpy": [], "pull": [], "push": []}
        for _ in range(5):
            for kind, found in samples.items():
                found += twin.copy_rate(kind, row_bytes, COPY_BYTES // row_bytes, 3)
        rates[str(row_bytes)] = {kind: round(median(found), 2) for kind, found in samples.items()}
    return rates


def expansion() -> dict[str, float]:
    """Time to parse, check and expand about 10 000 cells."""
    start = time.perf_counter()
    cells = expand(parse(MANY_CELLS))
    return {"cells": len(cells), "seconds": round(time.perf_counter() - start, 3)}


def main() -> None:
    """Measure everything and write the summary."""
    root = Path(sys.argv[1])
    limits = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **origin(*sys.argv[:2]),
        "copy_gb_per_s_by_row_bytes": copy_rates(),
        "expansion": expansion(),
        "signal_hop_us_by_start": signal_hops(),
        "quickstart": quickstart(root / "quickstart"),
    }
    (root / "limits.json").write_text(json.dumps(limits, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(limits, indent=1))


if __name__ == "__main__":
    main()
