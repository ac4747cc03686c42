"""Ranks of the twin as real processes, driven over pipes; NumPy GEMMs; an independent oracle."""

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from mokbench.twin import load_twin


def to_float(rows: np.ndarray) -> np.ndarray:
    """BF16 bits (uint16) or float32 rows as float32."""
    if rows.dtype == np.uint16:
        return (rows.astype(np.uint32) << 16).view(np.float32)
    return rows


def to_elements(values: np.ndarray, element_bytes: int) -> np.ndarray:
    """Float32 values as float32 or as BF16 bits, rounded to nearest even."""
    if element_bytes == 4:
        return np.ascontiguousarray(values, dtype=np.float32)
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def weights_of(shape: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """W13 [E, 2I, H] and W2 [E, H, I], the same in every process."""
    rng = np.random.default_rng(99)
    e, h, i = shape["num_experts"], shape["hidden"], shape["intermediate"]
    w13 = rng.standard_normal((e, 2 * i, h), dtype=np.float32) / np.sqrt(h)
    w2 = rng.standard_normal((e, h, i), dtype=np.float32) / np.sqrt(i)
    return w13.astype(np.float32), w2.astype(np.float32)


def swiglu(both: np.ndarray) -> np.ndarray:
    """SwiGLU of [rows, 2I], the gate first."""
    gate, up = np.split(both, 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


@dataclass
class Batch:
    """One rank's share of a pass."""

    x: np.ndarray
    idx: np.ndarray
    weights: np.ndarray


def batches(
    shape: dict[str, int], seed: int, tokens: list[int], masked: float = 0.0
) -> list[Batch]:
    """Random tokens and routes of every rank; ``tokens`` counts them."""
    rng = np.random.default_rng(seed)
    made = []
    for count in tokens:
        x = rng.standard_normal((count, shape["hidden"]), dtype=np.float32)
        order = rng.random((count, shape["num_experts"])).argsort(axis=1)
        idx = order[:, : shape["top_k"]].astype(np.int32)
        idx[rng.random(idx.shape) < masked] = -1
        weights = rng.random(idx.shape, dtype=np.float32)
        made.append(
            Batch(to_elements(x, shape["element_bytes"]), np.ascontiguousarray(idx), weights)
        )
    return made


def oracle(shape: dict[str, int], batch: Batch) -> np.ndarray:
    """The layer's output [T, H] in float32, route by route; intermediates are not rounded."""
    w13, w2 = weights_of(shape)
    x = to_float(batch.x)
    y = np.zeros((len(x), shape["hidden"]), np.float32)
    for token, k in np.argwhere(batch.idx >= 0):
        expert = batch.idx[token, k]
        row = swiglu(x[token : token + 1] @ w13[expert].T) @ w2[expert].T
        y[token] += batch.weights[token, k] * row[0]
    return y


def assert_right(shape: dict[str, int], batch: Batch, y: np.ndarray) -> None:
    """Relative error of the whole output below what the element type allows."""
    want, got = oracle(shape, batch), to_float(y)
    assert got.shape == want.shape
    allowed = 1e-5 if shape["element_bytes"] == 4 else 1e-2
    assert np.linalg.norm(got - want) <= allowed * np.linalg.norm(want) + 1e-30


class Worker:
    """What one rank's process does; the parent calls the methods by name."""

    def __init__(self) -> None:
        self.rank: Any = None
        self.on_gemm: Callable[[int], None] = lambda call: None
        self.num_calls = 0

    def build(
        self, protocol: str, name: str, shape: dict[str, int], rank: int, options: dict[str, Any]
    ) -> None:
        twin = load_twin()
        config = twin.TwinConfig(**shape)
        size = config.num_ranks * twin.segment_bytes(protocol, config)
        memory = twin.SharedMemory(name, size, False)
        self.shape, self.index, self.num_calls = shape, rank, 0
        self.on_gemm = lambda call: None
        if protocol == "signal":
            self.rank = twin.SignalRank(memory, config.num_ranks, rank, **options)
            return
        element = np.float32 if config.element_bytes == 4 else np.uint16
        if protocol == "mok":
            rows = [t * config.block_m for t in (config.ring_tiles, config.hidden_ring_tiles, 1)]
        else:
            capacity = twin.PushRank.capacity_rows(config)
            rows = [capacity, config.block_m, capacity]
        widths = (config.hidden, config.intermediate, config.hidden)
        self.buffers = [np.zeros(size, element) for size in zip(rows, widths, strict=True)]
        self.w13, self.w2 = weights_of(shape)
        self.first = rank * (config.num_experts // config.num_ranks)
        kind = twin.MokRank if protocol == "mok" else twin.PushRank
        self.rank = kind(memory, config, rank, self.gemm1, self.gemm2, *self.buffers, **options)

    def gemm1(self, expert: int, in_row: int, out_row: int, rows: int) -> None:
        self.num_calls += 1
        self.on_gemm(self.num_calls)
        x, hidden, _ = self.buffers
        both = to_float(x[in_row : in_row + rows]) @ self.w13[self.first + expert].T
        hidden[out_row : out_row + rows] = to_elements(swiglu(both), self.shape["element_bytes"])

    def gemm2(self, expert: int, in_row: int, out_row: int, rows: int) -> None:
        _, hidden, y = self.buffers
        out = to_float(hidden[in_row : in_row + rows]) @ self.w2[self.first + expert].T
        y[out_row : out_row + rows] = to_elements(out, self.shape["element_bytes"])

    def run(self, *passes: Batch) -> list[np.ndarray]:
        done = []
        for batch in passes:
            y = np.full_like(batch.x, 7)
            self.rank.run(batch.x, batch.idx, batch.weights, y)
            done.append(y)
        return done

    def phases(self, batch: Batch) -> np.ndarray:
        y = np.full_like(batch.x, 7)
        self.rank.dispatch(batch.x, batch.idx, batch.weights)
        self.rank.compute()
        self.rank.combine(y)
        return y

    def raise_in_gemm(self, call: int) -> None:
        def on_gemm(now: int) -> None:
            if now == call:
                raise ZeroDivisionError("the callback's own error")

        self.num_calls, self.on_gemm = 0, on_gemm

    def kill_in_gemm(self, call: int, signal: int) -> None:
        def on_gemm(now: int) -> None:
            if now == call:
                os.kill(os.getpid(), signal)

        self.num_calls, self.on_gemm = 0, on_gemm

    def sleep_in_gemm(self, seconds: float) -> None:
        self.num_calls, self.on_gemm = 0, lambda now: time.sleep(seconds if now == 1 else 0)

    def idle_cpu(self, seconds: float) -> float:
        """CPU seconds that the process spends while it does nothing for so long."""
        before = time.process_time()
        time.sleep(seconds)
        return time.process_time() - before

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.rank, method)(*arguments)

    def align_times(self, rounds: int) -> list[int]:
        times = []
        for _ in range(rounds):
            self.rank.align()
            times.append(time.monotonic_ns())
        return times


def serve(pipe: Any) -> None:
    worker = Worker()
    pipe.send("up")
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        started = time.monotonic()
        outcome = Outcome()
        try:
            outcome.value = getattr(worker, method)(*arguments)
        except Exception as error:
            outcome.error, outcome.message = type(error).__name__, str(error)
            outcome.record = getattr(error, "record", {})
        outcome.seconds = time.monotonic() - started
        pipe.send(outcome)


@dataclass
class Outcome:
    """What a rank's method returned or raised, and how long it took."""

    value: Any = None
    error: str = ""
    message: str = ""
    record: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


class Pool:
    """Rank processes that live across cases; dead ones are replaced when they are needed."""

    def __init__(self) -> None:
        self.processes: list[Any] = []
        self.pipes: list[Any] = []

    def ensure(self, count: int) -> None:
        started = []
        for index in range(count):
            if index < len(self.processes) and self.processes[index].is_alive():
                continue
            here, there = get_context("spawn").Pipe()
            process = get_context("spawn").Process(target=serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self.processes[index : index + 1] = [process]
            self.pipes[index : index + 1] = [here]
            started.append(here)
        for pipe in started:
            assert pipe.recv() == "up"

    def discard(self, index: int) -> None:
        self.processes[index].kill()
        self.processes[index].join()

    def close(self) -> None:
        for index in range(len(self.processes)):
            self.discard(index)


@dataclass
class Ranks:
    """The ranks of one case."""

    pool: Pool
    name: str
    count: int

    def start(self, rank: int, method: str, *arguments: Any) -> None:
        self.pool.pipes[rank].send((method, arguments))

    def finish(self, rank: int, timeout: float = 60.0) -> Outcome:
        pipe = self.pool.pipes[rank]
        assert pipe.poll(timeout), f"rank {rank} did not answer"
        outcome: Outcome = pipe.recv()
        return outcome

    def all(self, method: str, *arguments: Any) -> list[Outcome]:
        """The same call on every rank."""
        return self.each(method, [arguments] * self.count)

    def each(self, method: str, arguments: list[Any]) -> list[Outcome]:
        """One call on every rank, each with its own arguments."""
        for rank in range(self.count):
            self.start(rank, method, *arguments[rank])
        return [self.finish(rank) for rank in range(self.count)]

    def run(self, *passes: list[Batch]) -> list[list[np.ndarray]]:
        """Passes in a row; [pass][rank] outputs."""
        outcomes = self.each("run", [[p[rank] for p in passes] for rank in range(self.count)])
        assert [o.message for o in outcomes] == [""] * self.count
        return [[o.value[index] for o in outcomes] for index in range(len(passes))]

    def memory(self) -> np.memmap:
        """All segments' bytes, as the ranks see them."""
        return np.memmap(Path("/dev/shm") / self.name, np.uint8, mode="r")


@contextmanager
def ranks(pool: Pool, protocol: str, shape: dict[str, int], **options: Any) -> Iterator[Ranks]:
    """Memory and built ranks of one case."""
    twin = load_twin()
    options = {"wait_bound_s": 30.0, **options}
    config = twin.TwinConfig(**shape)
    count = config.num_ranks
    name = f"mokbench-test-{uuid.uuid4().hex[:12]}"
    memory = twin.SharedMemory(name, count * twin.segment_bytes(protocol, config), True)
    pool.ensure(count)
    case = Ranks(pool, name, count)
    try:
        built = case.each("build", [(protocol, name, shape, r, options) for r in range(count)])
        assert [o.message for o in built] == [""] * count
        yield case
        case_alive = [r for r in range(count) if pool.processes[r].is_alive()]
        for rank in case_alive:
            case.start(rank, "call", "close")
        for rank in case_alive:
            case.finish(rank)
    except BaseException:
        # A failed case leaves ranks in an unknown state: the next case gets new ones.
        for rank in range(count):
            pool.discard(rank)
        raise
    finally:
        memory.unlink()
