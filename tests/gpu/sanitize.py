"""Runs every kernel on small shapes, in one process and without torch's allocator, for
compute-sanitizer: each buffer is an allocation of its own, of exactly the size that is needed.

    compute-sanitizer --tool memcheck --report-api-errors no python tests/gpu/sanitize.py [defect]

There is one rank, since the sanitizer may run kernels one after another, and ranks wait for each
other. A defect is made on purpose and must be reported: "bounds" (an output that is too small),
"race" (a barrier that is missing).
"""

import ctypes
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sanitize_mok

from mokbench import jit
from mokbench.device_kernel import DeviceKernel, checked
from mokbench.fabric import cuda_signal, fault
from mokbench.fabric.cuda import MAX_RANKS
from mokbench.gemm_config import (
    PART_BYTES,
    PARTS_A_CTA,
    SOURCE,
    GemmConfig,
)
from mokbench.grouped_gemm import THREADS, GemmArgs, Matrix, gemm_maps
from mokbench.measure.gpu_timing import AlignArgs, StampArgs
from mokbench.systems.cuda_push import PushShape
from mokbench.systems.cuda_push_workspace import KERNELS, PushArgs
from mokbench.twin import load_twin
from mokbench.workload import Model

GRID = 4
PUSH_THREADS = 512
ROUNDS = 3
WAIT_BOUND_NS = 20 * 10**9  # instrumented code is slow
DEFECTS = ("none", "bounds", "race")
# (model, tokens): rows that fill no warp, every token on all experts, no token.
PUSH_CASES = [
    (Model("small", 256, 64, 6, 3), 37),
    (Model("one_token", 64, 64, 8, 8), 1),
    (Model("odd", 320, 200, 24, 8), 70),
    (Model("odd", 320, 200, 24, 8), 0),
]


class Device:
    """Raw memory and launches on GPU 0."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._driver = driver
        checked("cuInit", driver.cuInit(0))
        gpu = checked("cuDeviceGet", driver.cuDeviceGet(0))
        context = checked("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(gpu))
        checked("cuCtxSetCurrent", driver.cuCtxSetCurrent(context))
        names = driver.CUdevice_attribute
        major, minor = (
            checked("cuDeviceGetAttribute", driver.cuDeviceGetAttribute(name, gpu))
            for name in (
                names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        self.arch = f"sm_{major}{minor}" + ("a" if major >= 9 else "")

    def allocate(self, num_bytes: int) -> int:
        """Zeroed memory of exactly this size (CUDA knows none of 0 bytes)."""
        size = max(1, num_bytes)
        at = checked("cuMemAlloc", self._driver.cuMemAlloc(size))
        checked("cuMemsetD8", self._driver.cuMemsetD8(at, 0, size))
        return int(at)

    def upload(self, array: np.ndarray) -> int:
        array = np.ascontiguousarray(array)
        at = self.allocate(array.nbytes)
        if array.nbytes:
            checked("cuMemcpyHtoD", self._driver.cuMemcpyHtoD(at, array.ctypes.data, array.nbytes))
        return at

    def download(self, at: int, count: int, dtype: type) -> np.ndarray:
        array = np.zeros(count, dtype=dtype)
        if count:
            checked("cuMemcpyDtoH", self._driver.cuMemcpyDtoH(array.ctypes.data, at, array.nbytes))
        return array

    def launch(
        self,
        source: str,
        name: str,
        grid: int,
        block: int,
        args: ctypes.Structure,
        cooperative: bool = False,
        maps: tuple[ctypes.Array, ...] = (),
        after: tuple[ctypes.Array, ...] = (),
        shared_bytes: int = 0,
    ) -> None:
        cubin = jit.build(source, f"mokbench::{name}", self.arch)
        kernel = DeviceKernel(cubin, shared_bytes)
        kernel.launch(grid, block, [*maps, args, *after], 0, cooperative)
        checked("cuCtxSynchronize", self._driver.cuCtxSynchronize())

    def require_no_fault(self, segment: int) -> None:
        head = self.download(segment, fault.RECORD_BYTES, np.uint8).tobytes()
        if record := fault.parse(head):
            raise fault.FaultError(record)


def segment_bytes(protocol: str, model: Model, max_tokens: int = 1) -> int:
    """The exact end of a segment, from protocol.h's own layout."""
    twin = load_twin()
    config = twin.TwinConfig(
        num_ranks=1,
        num_experts=model.experts,
        top_k=model.top_k,
        max_tokens=max_tokens,
        hidden=model.hidden,
        intermediate=model.intermediate,
        element_bytes=2,
    )
    return max(offset + num_bytes for offset, num_bytes in twin.layout(protocol, config).values())


def table(segments: list[int]) -> ctypes.Array:
    return (ctypes.c_uint64 * MAX_RANKS)(*segments)


@dataclass
class PushRank:
    """Inputs and arguments. Weights are eighths and x small integers: sums are exact."""

    x: np.ndarray
    idx: np.ndarray
    args: PushArgs

    def expected(self) -> np.ndarray:
        """With experts that hand their rows back: x times the sum of its routes' weights."""
        # + 0.0: the kernel's sum of nothing is 0, not -0.
        return self.x * (self.idx >= 0).sum(axis=1, keepdims=True) / 8 + 0.0


def bf16(values: np.ndarray) -> np.ndarray:
    """Bits of values that BF16 holds exactly."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def push_rank(device: Device, shape: PushShape, segment: int, tokens: int, spare: int) -> PushRank:
    """``spare``: bytes by which the output is too small."""
    model = shape.model
    random = np.random.default_rng(tokens)
    x = random.integers(-15, 16, (tokens, model.hidden)).astype(np.float32)
    idx = np.array(
        [random.permutation(model.experts)[: model.top_k] for _ in range(tokens)], dtype=np.int32
    ).reshape(tokens, model.top_k)
    idx[random.random(idx.shape) < 0.2] = -1
    row_bytes, inner_bytes = 2 * model.hidden, 2 * model.intermediate
    rows = device.allocate(shape.capacity_rows * row_bytes)
    words = shape.scratch_words(GRID)
    args = PushArgs(
        segments=table([segment]),
        num_tokens=tokens,
        wait_bound_ns=WAIT_BOUND_NS,
        x=device.upload(bf16(x)),
        topk_idx=device.upload(idx),
        topk_weights=device.upload(np.full(idx.shape, 0.125, dtype=np.float32)),
        y=device.allocate(tokens * row_bytes - spare),
        x_rows=rows,
        gate_up=device.allocate(shape.capacity_rows * 2 * inner_bytes),
        activated=device.allocate(shape.capacity_rows * inner_bytes),
        y_rows=rows,
        **{name: device.allocate(4 * count) for name, count in words.items()},
    )
    return PushRank(x, idx, args)


def push(device: Device, model: Model, tokens: int, spare: int) -> None:
    """Two passes; the experts hand their rows back as they are."""
    shape = PushShape(model, ranks=1, max_tokens=max(1, tokens))
    segment = device.allocate(segment_bytes("push", model, shape.max_tokens))
    rank = push_rank(device, shape, segment, tokens, spare)
    for _ in range(2):
        for name, file in KERNELS.items():
            device.launch(
                f"push/{file}.cuh",
                f"push_{name}<{shape.config}>",
                1 if name == "plan" else GRID,
                PUSH_THREADS,
                rank.args,
                cooperative=name == "sort",
            )
    device.require_no_fault(segment)
    got = device.download(rank.args.y, rank.x.size, np.uint16).reshape(rank.x.shape)
    assert (got == bf16(rank.expected())).all(), f"{model.name}: wrong sums"


def signal(device: Device) -> None:
    """Signaling kernels that one rank can run alone: CTAs tell each other, no peers are there."""
    ready = "signal_ready<1, mokbench::Transfer::{}>"
    for name, block in (
        ("signal_local_hop<1>", 32),
        ("signal_entry<1>", 32),
        (ready.format("kPull"), 32),
        (ready.format("kPush"), 64),
    ):
        counts = cuda_signal.stamp_counts(ROUNDS)
        arrays = {name: device.allocate(8 * count) for name, count in counts.items()}
        segment = device.allocate(segment_bytes("signal", PUSH_CASES[0][0]))
        args = cuda_signal.SignalArgs(
            segments=table([segment]),
            ranks=1,
            rounds=ROUNDS,
            wait_bound_ns=WAIT_BOUND_NS,
            **arrays,
        )
        grid = 1 if "entry" in name else GRID
        device.launch("signal.cuh", name, grid, block, args, cooperative=True)
        device.require_no_fault(segment)
        stamps = {n: device.download(at, counts[n], np.int64) for n, at in arrays.items()}
        assert stamps["clock"].all(), name
        if "kPull" in name:
            cuda_signal.ready_cycles(stamps, cuda_signal.offset_of(stamps), push=False)


def timing(device: Device) -> None:
    segment = device.allocate(segment_bytes("signal", PUSH_CASES[0][0]))
    expired = device.allocate(4)
    align = AlignArgs(
        segments=table([segment]),
        value=1,
        go=device.allocate(4),
        expired=expired,
        hold_ns=1000,
        wait_bound_ns=WAIT_BOUND_NS,
    )
    device.launch("timing.cuh", "align_ranks<1>", 1, 128, align)
    device.require_no_fault(segment)
    assert device.download(expired, 1, np.int32)[0] == 1, "nobody raises go"
    # Fewer places than SMs: what does not fit must be left out.
    stamp = StampArgs(device.allocate(16 * GRID), GRID)
    device.launch("timing.cuh", "stamp_clocks", 2 * GRID, 32, stamp)


# Every tile height, the stores of plain columns and of SwiGLU's, rows with weights.
GEMM_CONFIGS = [
    GemmConfig(32, 2),
    GemmConfig(64, 3, swiglu=True),
    GemmConfig(128, 2, row_weights=True),
    GemmConfig(128, 2, swiglu=True, row_weights=True),
    GemmConfig(128, 2, split_k=True),
    GemmConfig(144, 2),
    GemmConfig(144, 2, swiglu=True),
]
GEMM_SIZES, GEMM_N = (40, 0, 70, 300, 1), 192


def gemm(device: Device, config: GemmConfig) -> None:
    """Sums of zeros and ones; weights of rows are halves and ones."""
    # So long that two of the ten tiles, which four CTAs take, are shared out; that a tall tile is
    # staged during the next one; as short as can be.
    k = 8192 if config.split_k else 512 if config.tile_rows > 128 else 128
    random = np.random.default_rng(1)
    rows, n, experts = sum(GEMM_SIZES), GEMM_N, len(GEMM_SIZES)
    columns = n // 2 if config.swiglu else n
    x = random.integers(0, 2, (rows, k)).astype(np.float32)
    w = random.integers(-1, 2, (experts, n, k)).astype(np.float32)
    row_weights = random.choice([0.5, 1.0], rows).astype(np.float32)
    ends = np.cumsum(GEMM_SIZES).astype(np.int32)
    out = device.allocate(rows * columns * 2)
    maps = gemm_maps(
        config,
        Matrix(device.upload(bf16(w)), experts * n, k),
        Matrix(device.upload(bf16(x)), rows, k),
        Matrix(out, rows, columns),
    )
    args = GemmArgs(
        row_ends=device.upload(ends),
        row_weights=device.upload(row_weights),
        out=out,
        next=device.allocate(8),
        parts=device.allocate(PARTS_A_CTA * GRID * PART_BYTES),
        parts_there=device.allocate(PARTS_A_CTA * GRID * 8),
        num_experts=experts,
        n=n,
        k=k,
    )
    name = config.expression.removeprefix("mokbench::")
    for _ in range(2):
        device.launch(
            SOURCE, name, GRID, THREADS, args, maps=(maps,), shared_bytes=config.shared_bytes
        )
    sums = np.concatenate(
        [part @ w[e].T for e, part in enumerate(np.split(x, ends[:-1]))], dtype=np.float32
    )
    allowed = 1e-6
    if config.swiglu:  # the weights lie as pack_gate_up would have put them
        gate, up = (sums.reshape(rows, -1, 2, 8)[:, :, i].reshape(rows, -1) for i in (0, 1))
        sums = gate / (1 + np.exp(-gate)) * up
        allowed = allowed + np.abs(gate * up) * 2.0**-12  # of the sigmoid
    if config.row_weights:
        sums *= row_weights[:, None]
    bits = device.download(out, rows * columns, np.uint16).astype(np.uint32) << 16
    got = bits.view(np.float32).reshape(rows, columns)
    assert (np.abs(got - sums) <= np.abs(sums) * 2.0**-7 + allowed).all(), f"{config}: wrong sums"


def make_race() -> None:
    """Compile from a copy of the kernels without the barrier behind the warps' counts."""
    copy = Path(tempfile.mkdtemp(prefix="mokbench-race-")) / "kernels"
    shutil.copytree(jit.kernel_root(), copy)
    path = copy / "push/dispatch.cuh"
    text = path.read_text(encoding="utf-8")
    store = "part_rows[i * kPushWarps + warp] = __popc(votes[i]);\n    }\n"
    barrier = f"{store}    __syncthreads();\n"
    assert barrier in text, "dispatch.cuh has changed: adapt the defect"
    path.write_text(text.replace(barrier, store), encoding="utf-8")
    jit.kernel_root = lambda: copy


def main(defect: str) -> None:
    assert defect in DEFECTS
    if defect == "race":
        make_race()
    device = Device()
    for model, tokens in PUSH_CASES[: 1 if defect != "none" else None]:
        push(device, model, tokens, spare=16 if defect == "bounds" else 0)
    if defect == "none":
        signal(device)
        timing(device)
        for config in GEMM_CONFIGS:
            gemm(device, config)
        for case in sanitize_mok.CASES:
            sanitize_mok.mok(device, table, bf16, case)
    print("all kernels ran")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "none")
