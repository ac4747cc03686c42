"""Checks and times MoK on one GPU; run from the repository root.

    python scripts/h200_mok.py OUT [STEP ...]

Steps, all by default: compile (every kernel of check, several at a time), check (a dozen cases, a
line each, with the fault record where a wait was given up), test (pytest tests/gpu/test_mok.py),
bench (mok, push and local in turn). OUT gets check.log, test.log and mok.json.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from steps import run_steps

from mokbench import jit, reference
from mokbench.layer import Layer
from mokbench.mok_config import SOURCE, choose_mok
from mokbench.routing import RoutingSpec
from mokbench.systems import Setup, system_class
from mokbench.systems.options import SYSTEM_OPTIONS, MokOptions
from mokbench.workload import Dtype, Model, Workload

sys.path.insert(0, "tests/gpu")

ARCH = "sm_90a"
# Of all ranks to start, of each case, of a wait on the GPU.
_LIMIT_S, _CASE_S, _BOUND_S = 40.0, 4.0, 2.0
_DEFAULT = MokOptions()


@dataclass(frozen=True)
class Case:
    """One layer on so many ranks; ``max_tokens`` only names the kernel."""

    model: Model
    ranks: int
    tokens: int
    spec: dict[str, Any] = field(default_factory=dict)
    options: MokOptions = _DEFAULT
    max_tokens: int = 320

    @property
    def work(self) -> Workload:
        """The layer's workload."""
        routing = RoutingSpec.model_validate(self.spec or "balanced")
        return Workload(self.model, self.ranks, self.tokens, Dtype.BF16, routing)

    @property
    def name(self) -> str:
        """For its line."""
        given = {key: getattr(self.options, key) for key in sorted(self.options.model_fields_set)}
        routing = self.work.routing.label
        return f"{self.model.name} r{self.ranks} t{self.tokens} {routing} {given or ''}"


SMALL = Model("small", 512, 256, 12, 3)
ODD = Model("odd", 2880, 128, 24, 8)
GPT = Model("gpt", 2880, 2880, 32, 4)
MANY = Model("many", 512, 1408, 384, 6)
WIDE = MokOptions(tile_rows=128)
HALF = MokOptions(tile_rows=64)
LEAST = MokOptions(tile_rows=32, group_tiles=1, ring_tiles=1)
CASES = [
    Case(SMALL, 1, 300, options=WIDE),
    Case(SMALL, 1, 1, options=WIDE),
    Case(SMALL, 1, 37, {"masked": 1.0}, WIDE),
    Case(SMALL, 1, 300),
    Case(SMALL, 1, 300, options=HALF),
    Case(SMALL, 1, 300, options=LEAST),
    Case(GPT, 1, 320, options=WIDE),
    Case(GPT, 1, 5),
    Case(MANY, 1, 320),
    Case(ODD, 2, 300),
    Case(SMALL, 2, 300, {"masked": 0.3, "uneven": 1.0}, WIDE),
    Case(SMALL, 4, 300, {"empty_experts": 2, "empty_ranks": 1}, WIDE),
    Case(SMALL, 4, 320, {"hot_expert": 1.0}, WIDE),
    Case(SMALL, 4, 300, {"hot_rank": 2.5}, WIDE),
    Case(ODD, 4, 37, {"uneven": 1.0}),
]

# name, model, ranks, tokens a rank, what to compare with, share of the peak asked, beyond it asked
SHAPES = [
    ("dsv3", Model("dsv3", 7168, 2048, 32, 8), 1, 8192, ("push", "local"), 0.78, ("local", 1.1)),
    ("qwen3", Model("qwen3", 2048, 768, 128, 8), 1, 8192, ("push", "local"), 0.60, ("local", 1.3)),
    ("mixtral", Model("mixtral", 4096, 14336, 8, 2), 1, 8192, ("push",), 0.82, None),
    ("few", Model("dsv3", 7168, 2048, 32, 8), 1, 128, ("push",), None, None),
    ("four", Model("qwen235", 4096, 1536, 128, 8), 4, 1024, ("push",), None, ("push", 1.2)),
]


def compile_all(out: Path) -> dict[str, Any]:
    """The kernels of every case, so that no case's time limit has to hold a compilation."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    names = {choose_mok(c.work, c.options, c.max_tokens, sms // c.ranks).expression for c in CASES}
    jit.build_all([(SOURCE, name) for name in sorted(names)], ARCH)
    return {"kernels": len(names)}


def prepared(fabric: Any, work: Workload, name: str, options: Any, max_tokens: int = 0) -> Any:
    """A system with its layer's inputs."""
    layer = Layer.build(work, fabric.rank, str(fabric.device))
    system = system_class(name, "cuda")()
    tokens = max(1, layer.max_tokens, max_tokens)
    system.prepare(Setup(work, options, fabric.rank, tokens, layer.w13, layer.w2, fabric))
    return system, layer, (layer.x, layer.topk_idx, layer.topk_weights)


def check_case(fabric: Any, case: Case) -> dict[str, Any]:
    """Error against the oracle, and whether eleven passes gave the same bits."""
    mok, layer, here = prepared(fabric, case.work, "mok", case.options, case.max_tokens)
    first = mok.run(*here).clone()
    mok.check()
    same = True
    for _ in range(5):
        mok.run(*here).fill_(float("nan"))
        same &= torch.equal(first, mok.run(*here))
    mok.check()
    parts = fabric.gather((reference.error_sums(first, layer.truth), same))
    accuracy = reference.judge([part for part, _ in parts], Dtype.BF16)
    same = all(repeat for _, repeat in parts)
    bad_rows = first.isnan().any(dim=1).nonzero().flatten().tolist()
    mok.close()
    return {
        "ok": bool(accuracy.ok and same),
        "rel_error": accuracy.rel_error,
        "same": same,
        "nan_rows": bad_rows[:8],
        "note": mok_note(case, fabric.num_sms),
    }


def mok_note(case: Case, num_sms: int) -> str:
    """How the case's tiles and rings were chosen."""
    return choose_mok(case.work, case.options, case.max_tokens, num_sms).note


@dataclass(frozen=True)
class CheckCases:
    """Cases one after the other on every rank, each answer written down at once; picklable."""

    cases: tuple[Case, ...]
    folder: str

    def __call__(self, fabric: Any) -> None:
        """Ends at the first error: what follows it in a process says nothing."""
        with Path(self.folder, f"rank{fabric.rank}.jsonl").open("w", encoding="utf-8") as file:
            for case in self.cases:
                try:
                    answer = check_case(fabric, case)
                except Exception as error:
                    answer = {"ok": False, "error": f"{type(error).__name__}: {error}"[-600:]}
                file.write(json.dumps(answer) + "\n")
                file.flush()
                if "error" in answer:
                    return


def answers_of(folder: str, ranks: int) -> list[list[dict[str, Any]]]:
    """By case, each rank's answer; what a rank did not get to is an error."""
    found = []
    for rank in range(ranks):
        path = Path(folder, f"rank{rank}.jsonl")
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        found.append([json.loads(line) for line in lines])
    silent = {"ok": False, "error": "no answer: it hangs, or its process died"}
    most = max(1, *map(len, found))
    return [[own[i] if i < len(own) else silent for own in found] for i in range(most)]


def check(out: Path) -> dict[str, Any]:
    """Every case; ranks that hang are killed, and new ones go on behind the case."""
    from cuda_ranks import run_ranks

    found = {}
    with (out / "check.log").open("w", encoding="utf-8") as log:
        for ranks in sorted({case.ranks for case in CASES}):
            waiting = [case for case in CASES if case.ranks == ranks]
            while waiting:
                with tempfile.TemporaryDirectory() as folder:
                    limit_s = _LIMIT_S + _CASE_S * len(waiting)
                    run_ranks(ranks, CheckCases(tuple(waiting), folder), _BOUND_S, limit_s)
                    answers = answers_of(folder, ranks)
                for case, of_case in zip(waiting, answers, strict=False):
                    good = all(answer["ok"] for answer in of_case)
                    lines = [f"{'ok ' if good else 'BAD'} {case.name}"]
                    shown = of_case[:1] if good else of_case
                    lines += [f"    rank {rank}: {answer}" for rank, answer in enumerate(shown)]
                    print("\n".join(lines), flush=True)
                    log.write("\n".join(lines) + "\n")
                    found[case.name] = {"ok": good, "answers": of_case}
                waiting = waiting[len(answers) :]
    return found


@dataclass(frozen=True)
class TimeSystems:
    """A shape's systems in turn on every rank; medians of us over the rounds, slowest rank."""

    work: Workload
    names: tuple[str, ...]

    def __call__(self, fabric: Any) -> dict[str, float]:
        """Microseconds by system."""
        from mokbench.measure.columns import DURATION
        from mokbench.measure.gpu_timing import GpuTimer

        timer = GpuTimer(fabric)
        calls: dict[str, Callable[[], object]] = {}
        for name in self.names:
            options = SYSTEM_OPTIONS[name]()
            system, _, here = prepared(fabric, self.work, name, options)
            calls[name] = partial(system.run, *here)
        if fabric.ranks == 1:
            x, y = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in "xy")
            calls["8192^3"] = lambda: x @ y.T
        for call in calls.values():
            call()
            timer.isolated(call, 5)
        blocks: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(6):
            for name, call in calls.items():
                samples = fabric.gather_samples(timer.isolated(call, 5))[:, :, DURATION]
                blocks[name].append(float(samples.amax(dim=0).median()))
        return {name: median(us) for name, us in blocks.items()}


def bench(out: Path) -> dict[str, Any]:
    """Every shape; a line each system."""
    from cuda_ranks import run_ranks

    found: dict[str, Any] = {}
    for name, model, ranks, tokens, others, peak, beyond in SHAPES:
        routing = RoutingSpec.model_validate("balanced")
        work = Workload(model, ranks, tokens, Dtype.BF16, routing)
        answer = run_ranks(ranks, TimeSystems(work, ("mok", *others)), timeout_s=200)[0]
        found[name] = answer
        if not isinstance(answer, dict):
            print(name, str(answer)[-600:], flush=True)
            continue
        flop = 6.0 * model.hidden * model.intermediate * tokens * ranks * model.top_k
        for system, us in answer.items():
            rate = (2.0 * 8192**3 if system == "8192^3" else flop) / us / 1e6
            print(f"{name:8} {system:8} {us:9.1f} us {rate:6.0f} TFLOP/s", flush=True)
        if peak is not None:
            seen = flop / answer["mok"] / (2.0 * 8192**3 / answer["8192^3"])
            print(f"{name:8} of the peak {seen:.3f}, asked {peak}")
        if beyond is not None:
            seen = answer[beyond[0]] / answer["mok"]
            print(f"{name:8} beyond {beyond[0]} {seen:.3f}, asked {beyond[1]}")
    return found


def test(out: Path) -> dict[str, Any]:
    """The GPU tests."""
    with (out / "test.log").open("wb") as log:
        command = [sys.executable, "-m", "pytest", "tests/gpu/test_mok.py", "-q"]
        done = subprocess.run([*command, "-p", "no:cacheprovider"], stdout=log, stderr=log)
    return {"exit_code": done.returncode}


def main() -> int:
    """Every step."""
    run_steps({"compile": compile_all, "check": check, "test": test, "bench": bench}, "mok.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
