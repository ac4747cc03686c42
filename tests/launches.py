"""Run folders of several launches with noise between them, for tests of compare and check."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from click.testing import CliRunner, Result
from fake_run import fake_machine, fake_meta, fake_record

from mokbench.cli import main
from mokbench.machine import Machine
from mokbench.regression.check import Checked
from mokbench.results import RunFolder

H200 = {"gpu": "NVIDIA H200", "gpus": 1, "driver": "580.1", "cuda": "13.0", "torch": "2.11.0"}
SLOW = {"push": 1.05}
CELLS = {"mok": 900.0, "push": 1000.0, "alltoall": 2500.0}


def h200(**changes: Any) -> Machine:
    return fake_machine(**(H200 | changes))


def cell(system: str, value: float, **changes: Any) -> Any:
    fields = {
        "fabric": "cuda",
        "link": "nvlink",
        "ranks_per_gpu": 1,
        "cell_digest": f"all-{system}",
    }
    step = {"median": value, "p95": value, "min": value, "ci_low": value, "ci_high": value, "n": 9}
    return fake_record(system=system, step_time_us=step, **(fields | changes))


def write_launch(path: Path, records: Sequence[Any], hour: int, **changes: Any) -> RunFolder:
    fields = {"machine": h200(), "created": f"2026-01-{1 + hour // 24:02d}T{hour % 24:02d}:00:00Z"}
    # Hundreds of folders, none of which has to survive a crash.
    with patch("os.fsync"):
        run = RunFolder.create(path, fake_meta(**(fields | changes)))
        (path / "records.jsonl").write_text("".join(r.to_json() + "\n" for r in records))
        run.finish("done")
    return RunFolder.open(path)


def launches(
    folder: Path,
    name: str,
    count: int,
    *,
    start: int = 0,
    noise: float = 0.01,
    factors: Mapping[str, float] | None = None,
    clock: float | None = 1500.0,
    seed: int = 0,
    **changes: Any,
) -> list[RunFolder]:
    """``count`` launches of ``CELLS``; ``factors`` slow a system down by so much."""
    rng = np.random.default_rng(seed)
    runs = []
    for i in range(count):
        records = [
            cell(
                system,
                value * (factors or {}).get(system, 1.0) * float(np.exp(rng.normal(0, noise))),
                sm_clock_mhz=clock,
            )
            for system, value in CELLS.items()
        ]
        runs.append(write_launch(folder / f"{name}-{i}", records, start + i, **changes))
    return runs


def verdicts(checked: Checked) -> dict[str, str]:
    """Verdict by system."""
    return {one.series[0].split(".")[1]: one.call.verdict for one in checked.judged}


def gate(*arguments: str | Path, **environment: str) -> Result:
    """``mokbench check``, with no commit in the environment but the one given."""
    clean = {
        name: environment.get(name) for name in ("MOKBENCH_COMMIT", "GITHUB_SHA", "CI_COMMIT_SHA")
    }
    return CliRunner().invoke(main, ["check", *map(str, arguments)], env=clean)
