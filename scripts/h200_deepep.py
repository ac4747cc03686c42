"""Checks and times DeepEP beside our systems on one GPU; run from the repository root.

    python scripts/h200_deepep.py OUT [STEP ...]

deep_ep, and the NCCL that it was built for, must be what this Python imports and torch loads; see
docs/deepep.md. Steps, all by default:

* check: pytest of the DeepEP tests against the oracle
* compare: dispatch and combine by the harness and by a bare loop, in turn
* sms-2, sms-4: DeepEP's SM count at every shape of the config, on so many ranks
* run-MODEL-RANKS: that part of configs/h200-vs-deepep.yaml, in a run folder of its own

Logs, run folders and deepep.json (figures with machine, date, versions and command) land in OUT;
the last lines are a short table.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from steps import run_logged, run_steps

from mokbench.cells import expand
from mokbench.config import load
from mokbench.fabric.cuda import CudaFabric
from mokbench.results import RunFolder
from mokbench.workload import Workload

CONFIG = "configs/h200-vs-deepep.yaml"
# Seconds after which a step is given up.
_LIMIT_S = 560
Step = Callable[[Path], dict[str, Any]]


def command(out: Path, name: str, *arguments: str) -> dict[str, Any]:
    """Run a command with its output in OUT/name.log; its exit code and seconds."""
    code, seconds = run_logged(out / f"{name}.log", _LIMIT_S, *arguments)
    return {"exit_code": code, "seconds": round(seconds, 1)}


def check_step(out: Path) -> dict[str, Any]:
    """The GPU tests of DeepEP, the comparison with a bare loop left to its own step."""
    files = ["tests/gpu/test_expanded_rows.py", "tests/gpu/test_deepep.py"]
    chosen = [*files, "-k", "not bare_loop"]
    options = ["-v", "-s", "-rs", "--durations=8", "-p", "no:cacheprovider"]
    return command(out, "check", "-m", "pytest", *chosen, *options)


def compare_step(out: Path) -> dict[str, Any]:
    """By ranks and tokens: medians of harness and bare loop in us, and their ratios."""
    cuda_ranks, deepep_bare = _gpu_tests()
    found = {}
    for ranks in (2, 4):
        answers = cuda_ranks.run_ranks(ranks, deepep_bare.compare, timeout_s=250)
        if not all(isinstance(answer, dict) for answer in answers):
            raise RuntimeError(f"{ranks} ranks: {answers}")
        found |= {f"r{ranks}.{tokens}": figures for tokens, figures in answers[0].items()}
    return found


def sms_step(ranks: int, out: Path) -> dict[str, Any]:
    """By shape and tokens: what the sweep found, with DeepEP's own advice."""
    cuda_ranks, _ = _gpu_tests()
    cells = expand(load(CONFIG), fabric="cuda")
    works = dict.fromkeys(
        cell.workload
        for cell in cells
        if cell.workload.ranks == ranks and cell.workload.routing.label == "balanced"
    )
    answers = cuda_ranks.run_ranks(ranks, partial(sweep, list(works)), timeout_s=_LIMIT_S - 20)
    if not all(isinstance(answer, dict) for answer in answers):
        raise RuntimeError(f"{ranks} ranks: {answers}")
    return dict(answers[0])


def sweep(works: list[Workload], fabric: CudaFabric) -> dict[str, Any]:
    """One rank's part of the sweep over ``works``."""
    from mokbench.layer import Layer
    from mokbench.measure.gpu_timing import GpuTimer
    from mokbench.measure.sm_sweep import sweep_sms
    from mokbench.systems import Setup
    from mokbench.systems.cuda_deepep import Deepep
    from mokbench.systems.options import DeepepOptions

    timer, found = GpuTimer(fabric), {}
    for work in works:
        layer = Layer.build(work, fabric.rank, str(fabric.device))
        system = Deepep()
        options, tokens = DeepepOptions(num_sms="best"), layer.max_tokens
        start = time.monotonic()
        system.prepare(Setup(work, options, fabric.rank, tokens, layer.w13, layer.w2, fabric))
        here = (layer.x, layer.topk_idx.long(), layer.topk_weights)
        advice = system.notes[0]
        swept = sweep_sms(
            fabric,
            timer,
            list(system.candidates),
            system.set_num_sms,
            partial(system.run, *here),
            torch.cuda.synchronize,
        )
        name = f"{work.model.name}.r{work.ranks}.t{work.tokens_per_rank}"
        found[name] = {
            "advised": advice,
            "best": swept.best,
            "pass_us": swept.pass_us,
            "seconds": round(time.monotonic() - start, 1),
        }
        if fabric.rank == 0:
            print(f"{name}: {swept.note}", flush=True)
        system.close()
    return found


def run_step(model: str, ranks: int, out: Path) -> dict[str, Any]:
    """One part of the config in a run folder of its own: rows by status, and the SM counts."""
    name = f"{model}-r{ranks}"
    part = ("--only", f"model={model}", "--only", f"ranks={ranks}")
    arguments = ("run", CONFIG, "--out", str(out / name), "--no-charts", *part)
    done = command(out, name, "-m", "mokbench", *arguments)
    return done | _figures(out / name)


def _figures(folder: Path) -> dict[str, Any]:
    try:
        records = RunFolder.open(folder).records()
    except Exception as error:
        return {"rows": f"not readable: {error}"}
    found: dict[str, Any] = {
        "rows": {
            status: sum(record.status == status for record in records)
            for status in ("ok", "unsupported", "failed")
        },
        "refused": sorted({f"{r.system}: {r.reason}" for r in records if r.status != "ok"}),
    }
    errors = [r.rel_error for r in records if r.system == "deepep" and r.rel_error is not None]
    found["worst deepep rel_error"] = max(errors, default=None)
    for record in records:
        if record.system == "deepep" and record.regime == "isolated":
            notes = [note for note in record.notes if note.startswith("num_sms")]
            found |= {f"{record.id} SMs": note for note in notes}
    return found


def _gpu_tests() -> tuple[Any, Any]:
    """The modules that start ranks for tests, and the bare loop."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests/gpu"))
    import cuda_ranks
    import deepep_bare

    return cuda_ranks, deepep_bare


def steps() -> dict[str, Step]:
    """Every step by its name; the config says which parts there are."""
    found: dict[str, Step] = {"check": check_step, "compare": compare_step}
    works = [cell.workload for cell in expand(load(CONFIG), fabric="cuda")]
    for ranks in dict.fromkeys(work.ranks for work in works):
        found[f"sms-{ranks}"] = partial(sms_step, ranks)
    for model, ranks in dict.fromkeys((work.model.name, work.ranks) for work in works):
        found[f"run-{model}-{ranks}"] = partial(run_step, model, ranks)
    return found


def main() -> int:
    """Every step, then a short table."""
    figures = run_steps(steps(), "deepep.json")
    for name, found in figures.items():
        for key, value in found.items():
            print(f"{name:28} {key}: {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
