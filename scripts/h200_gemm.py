"""Checks and times the grouped GEMM on one GPU; run from the repository root.

    python scripts/h200_gemm.py OUT [STEP ...]

Steps, all by default: check (pytest tests/gpu/test_gemm.py), bench (our kernel, torch._grouped_mm
and an 8192^3 matmul in turn, so that all share one clock), shared (four ranks at once on a quarter
of the SMs each). OUT gets check.log and gemm.json (every figure, with machine, date, versions and
command); the last lines say what was asked of each case and what was seen.
"""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from steps import run_steps

from mokbench import jit
from mokbench.device_kernel import DeviceKernel
from mokbench.gemm_config import GemmConfig, choose_gemm, with_spread
from mokbench.grouped_gemm import GroupedGemm
from mokbench.measure.gpu_timing import StampArgs, start_and_clock

ARCH = "sm_90a"
# BF16 operations an SM of sm_90 does in a cycle: m64n256k16 takes 128.
_FLOP_A_CYCLE = 4096
_SECONDS, _MAX_ROUNDS, _WARM_ROUNDS = 0.4, 60, 4
PEAK = "8192^3"
RANKS = 4

# name, experts, rows, n, k
SHAPES = [
    ("E32 M65536 N4096 K7168", 32, 65536, 4096, 7168),
    ("E32 M65536 N7168 K2048", 32, 65536, 7168, 2048),
    ("E128 M65536 N1536 K2048", 128, 65536, 1536, 2048),
    ("E128 M65536 N2048 K768", 128, 65536, 2048, 768),
    ("E8 M16384 N28672 K4096", 8, 16384, 28672, 4096),
    ("E8 M16384 N4096 K14336", 8, 16384, 4096, 14336),
]
# Least MMA utilization asked of our kernel.
ASKED = {
    "E32 M65536 N4096 K7168 balanced": 0.97,
    "E32 M65536 N7168 K2048 balanced": 0.97,
    "E128 M65536 N1536 K2048 balanced": 0.95,
    "E128 M65536 N1536 K2048 skewed": 0.95,
    "E128 M65536 N2048 K768 balanced": 0.90,
    "E8 M16384 N28672 K4096 balanced": 0.97,
    "E8 M16384 N4096 K14336 balanced": 0.97,
}
SWIGLU = {"E32 M65536 N4096 K7168", "E128 M65536 N1536 K2048", "E8 M16384 N28672 K4096"}
RAGGED = {"E128 M65536 N1536 K2048", "E128 M65536 N2048 K768"}
FEW = ("E32 M1024 N4096 K7168", 32, 1024, 4096, 7168)

Lanes = dict[str, Callable[[], object]]


def in_turn(lanes: Lanes) -> dict[str, dict[str, float]]:
    """Each lane's launches one after the other, round by round; medians of us and SM MHz."""
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    stamp = DeviceKernel(jit.build("timing.cuh", "mokbench::stamp_clocks", ARCH))
    stream = torch.cuda.current_stream().cuda_stream

    def rounds(count: int) -> dict[str, dict[str, float]]:
        stamps = torch.zeros((count, len(lanes), 2, num_sms, 2), dtype=torch.int64, device="cuda")
        events = [
            [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in lanes]
            for _ in range(count)
        ]
        for i in range(count):
            for j, call in enumerate(lanes.values()):
                for k in range(2):
                    if k == 1:
                        call()
                        events[i][j][1].record()
                    arguments = StampArgs(stamps[i, j, k].data_ptr(), num_sms)
                    stamp.launch(num_sms, 32, [arguments], stream)
                    if k == 0:
                        events[i][j][0].record()
        torch.cuda.synchronize()
        readings = stamps.cpu()
        found = {}
        for j, name in enumerate(lanes):
            us = [events[i][j][0].elapsed_time(events[i][j][1]) * 1e3 for i in range(count)]
            clocks = [start_and_clock(*readings[i, j], 0)[1] for i in range(count)]
            cycles = [a * b for a, b in zip(us, clocks, strict=True)]
            found[name] = {
                "us": float(np.median(us)),
                "sm_clock_mhz": float(np.median(clocks)),
                "sm_cycles": float(np.median(cycles)),
                "rounds": count,
            }
        return found

    trial = rounds(_WARM_ROUNDS)
    turn_s = sum(lane["us"] for lane in trial.values()) / 1e6
    return rounds(max(10, min(_MAX_ROUNDS, round(_SECONDS / turn_s))))


def segments(experts: int, rows: int, kind: str) -> torch.Tensor:
    """Row counts: equal, exponential in 128-row steps, or those of random routing."""
    generator = torch.Generator().manual_seed(3)
    if kind == "balanced":
        return torch.full((experts,), rows // experts)
    if kind == "ragged":
        chosen = torch.randint(experts, (rows,), generator=generator)
        return torch.bincount(chosen, minlength=experts)
    shares = torch.rand(experts, generator=generator).log().neg()
    sizes = (shares / shares.sum() * (rows // 128)).floor().long() * 128
    sizes[0] += rows - sizes.sum()
    return sizes


class Case:
    """Inputs of one shape on the GPU."""

    def __init__(self, experts: int, rows: int, n: int, k: int, kind: str) -> None:
        generator = torch.Generator("cuda").manual_seed(1)
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.x = torch.randn(rows, k, generator=generator, **options)
        self.weights = torch.randn(experts, n, k, generator=generator, **options).mul_(k**-0.5)
        sizes = segments(experts, rows, kind)
        self.ends = sizes.cumsum(0).to(torch.int32).cuda()
        self.out = torch.empty(rows, n, **options)
        self.flop = 2.0 * rows * n * k
        self.sms = torch.cuda.get_device_properties(0).multi_processor_count

    def ours(self, config: GemmConfig, num_sms: int | None = None) -> Callable[[], object]:
        """A launch of our kernel; by SwiGLU the weights lie as if packed: only the time counts."""
        gemm = GroupedGemm(self.weights, config, num_sms or self.sms, ARCH)
        rows, n = self.out.shape
        out = self.out.view(-1)[: rows * n // 2].view(rows, n // 2) if config.swiglu else self.out
        return lambda: gemm(self.x, self.ends, out)

    def torch(self) -> Callable[[], object]:
        """A launch of torch._grouped_mm."""
        transposed = self.weights.transpose(1, 2)
        return lambda: torch._grouped_mm(self.x, transposed, self.ends)


def peak_lane() -> tuple[str, Callable[[], object]]:
    """Name and launch of the matmul that stands for the machine."""
    x, y = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in "xy")
    return PEAK, lambda: x @ y.T


def rates(found: dict[str, dict[str, float]], flop: float, sms: int) -> dict[str, Any]:
    """The lanes with TFLOP/s and the share of cycles in which the tensor cores of all SMs work."""
    for name, lane in found.items():
        work = 2.0 * 8192**3 if name == PEAK else flop
        lane["tflops"] = work / lane["us"] / 1e6
        lane["mma_utilization"] = work / (_FLOP_A_CYCLE * sms) / lane["sm_cycles"]
    return found


def bench(out: Path) -> dict[str, Any]:
    """Every lane of every shape."""
    found: dict[str, Any] = {}
    name_of_peak, peak = peak_lane()
    for name, experts, rows, n, k in SHAPES:
        for kind in ("balanced", "skewed", "ragged") if name in RAGGED else ("balanced",):
            case = Case(experts, rows, n, k, kind)
            # As a system chooses: it knows the mean and that routing spreads around it.
            mean = rows / experts
            planned = with_spread(mean) if kind == "ragged" else mean
            config = choose_gemm(planned, experts, n, k, case.sms)
            lanes: Lanes = {"ours": case.ours(config), "torch": case.torch(), name_of_peak: peak}
            if kind == "balanced":
                lanes["quarter"] = case.ours(config, case.sms // 4)
                if name in SWIGLU:
                    lanes["swiglu"] = case.ours(replace(config, swiglu=True))
            lanes["ours"](), lanes["torch"]()
            found[f"{name} {kind}"] = rates(in_turn(lanes), case.flop, case.sms)
            found[f"{name} {kind}"]["ours"]["tile_rows"] = config.tile_rows
            show(f"{name} {kind}", found[f"{name} {kind}"])
            del case, lanes
            torch.cuda.empty_cache()
    name, experts, rows, n, k = FEW
    case = Case(experts, rows, n, k, "balanced")
    config = choose_gemm(rows / experts, experts, n, k, case.sms)
    lanes = {"ours": case.ours(config), "torch": case.torch(), "read": case.weights.view(-1).sum}
    found[name] = rates(in_turn(lanes), case.flop, case.sms)
    show(name, found[name])
    return found


def shared(out: Path) -> dict[str, Any]:
    """Four ranks with a quarter of the experts and SMs each, against one rank with all of them."""
    sys.path.insert(0, "tests/gpu")
    from cuda_ranks import run_ranks

    answers = run_ranks(RANKS, share_the_gpu)
    if not isinstance(answers[0], dict):
        raise RuntimeError(str(answers))
    return answers[0]


def share_the_gpu(fabric: Any) -> dict[str, float]:
    """On every rank: TFLOP/s of all four at once, and of rank 0 alone on the whole GPU."""
    from mokbench.measure.columns import DURATION
    from mokbench.measure.gpu_timing import GpuTimer

    timer = GpuTimer(fabric)
    _, experts, rows, n, k = SHAPES[2]
    case = Case(experts // RANKS, rows // RANKS, n, k, "balanced")
    config = choose_gemm(rows / experts, experts, n, k, case.sms)
    lanes = {"together": case.ours(config, fabric.num_sms), "alone": lambda: None}
    if fabric.rank == 0:
        whole = Case(experts, rows, n, k, "balanced")
        lanes["alone"] = whole.ours(config)
    blocks: dict[str, list[float]] = {name: [] for name in lanes}
    for call in lanes.values():
        timer.isolated(call, 5)
    for _ in range(6):
        for name, call in lanes.items():
            samples = fabric.gather_samples(timer.isolated(call, 10))[:, :, DURATION]
            blocks[name].append(float(samples.amax(dim=0).median()))
    flop = 2.0 * rows * n * k
    return {f"{name}_tflops": flop / median(us) / 1e6 for name, us in blocks.items()}


def verdicts(figures: dict[str, Any]) -> list[str]:
    """What was asked of each case, and what was seen."""
    lines = []

    def line(case: str, what: str, asked: float, seen: float) -> None:
        lines.append(
            f"{'ok ' if seen >= asked else 'NOT'} {case}: {what} {seen:.3f}, asked {asked}"
        )

    found = figures.get("bench", {})
    for name, asked in ASKED.items():
        lanes = found.get(name)
        if lanes is None:
            continue
        line(name, "beyond torch", 1.0, lanes["torch"]["us"] / lanes["ours"]["us"])
        line(name, "MMA utilization", asked, lanes["ours"]["mma_utilization"])
        if "swiglu" in lanes:
            ratio = lanes["ours"]["sm_cycles"] / lanes["swiglu"]["sm_cycles"]
            line(name, "cycles without SwiGLU over with it", 0.98, ratio)
        if "quarter" in lanes:
            ratio = lanes["ours"]["us"] / lanes["quarter"]["us"] * 4
            line(name, "4 x rate on a quarter of the SMs over rate on all", 0.95, ratio)
    for name in RAGGED:
        if f"{name} ragged" in found:
            ratio = (
                found[f"{name} ragged"]["ours"]["mma_utilization"]
                / found[f"{name} balanced"]["ours"]["mma_utilization"]
            )
            line(name, "ragged over padded, per real row and cycle", 0.96, ratio)
    if FEW[0] in found:
        lanes = found[FEW[0]]
        line(
            FEW[0],
            "time to read the weights over time",
            0.8,
            lanes["read"]["us"] / lanes["ours"]["us"],
        )
    if "together_tflops" in figures.get("shared", {}):
        both = figures["shared"]
        line("four ranks at once", "of one", 0.95, both["together_tflops"] / both["alone_tflops"])
    return lines


def show(name: str, lanes: dict[str, Any]) -> None:
    """One line a lane."""
    print(name)
    for lane, value in lanes.items():
        print(
            f"    {lane:8} {value['us']:9.1f} us {value['tflops']:6.0f} TFLOP/s "
            f"MMA {value['mma_utilization']:6.1%} {value['sm_clock_mhz']:6.0f} MHz",
            flush=True,
        )


def check(out: Path) -> dict[str, Any]:
    """The kernel's GPU tests."""
    with (out / "check.log").open("wb") as log:
        command = [sys.executable, "-m", "pytest", "tests/gpu/test_gemm.py", "-q"]
        done = subprocess.run([*command, "-p", "no:cacheprovider"], stdout=log, stderr=log)
    return {"exit_code": done.returncode}


def main() -> int:
    """Every step, then what was asked and seen."""
    figures = run_steps({"check": check, "bench": bench, "shared": shared}, "gemm.json")
    print("\n".join(verdicts(figures)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
