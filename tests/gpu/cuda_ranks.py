"""Ranks on GPUs for tests: processes under one MPS daemon that each run a function and answer."""

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from mokbench.fabric.cuda import CudaFabric
from mokbench.fabric.environment import CUDA_ENVIRONMENT
from mokbench.fabric.mps import MpsDaemon

Body = Callable[[CudaFabric], Any]


def run_ranks(
    ranks: int, body: Body, wait_bound_s: float = 5.0, timeout_s: float = 120.0
) -> list[Any]:
    """What ``body`` returned on each rank; an exception's traceback text where it raised."""
    context = get_context("spawn")
    shared = ranks > torch.cuda.device_count()
    daemon = MpsDaemon() if shared else None
    before = dict(os.environ)
    try:
        os.environ.update(CUDA_ENVIRONMENT | (daemon.environment if daemon else {}))
        with tempfile.TemporaryDirectory() as folder:
            queue = context.Queue()
            store = str(Path(folder) / "store")
            processes = [
                context.Process(target=_rank, args=(rank, ranks, store, body, wait_bound_s, queue))
                for rank in range(ranks)
            ]
            for process in processes:
                process.start()
            answers = _answers(queue, ranks, timeout_s)
            for process in processes:
                process.join(5)
                process.kill()
    finally:
        os.environ.clear()
        os.environ.update(before)
        if daemon:
            daemon.stop()
    return [answers.get(rank, "no answer") for rank in range(ranks)]


def follows(
    graph: torch.cuda.CUDAGraph,
    y: torch.Tensor,
    here: tuple[torch.Tensor, ...],
    passes: list[tuple[tuple[torch.Tensor, ...] | None, torch.Tensor]],
    settle: Callable[[], object],
    same: Callable[[torch.Tensor, torch.Tensor], bool],
) -> list[bool]:
    """Whether each of three replays gives what an eager pass gave, for every (inputs, output).

    ``here`` are the inputs and ``y`` the output that the graph was captured with; no inputs: those
    that lie there.
    """
    answers = []
    for inputs, expected in passes:
        for tensor, value in zip(here, inputs or here, strict=True):
            tensor.copy_(value)
        for _ in range(3):
            y.fill_(float("nan"))
            graph.replay()
            settle()
            answers.append(same(y, expected))
    return answers


def _answers(queue, ranks: int, timeout_s: float) -> dict[int, Any]:
    deadline = time.monotonic() + timeout_s
    answers: dict[int, Any] = {}
    while len(answers) < ranks and time.monotonic() < deadline:
        try:
            rank, answer = queue.get(timeout=1.0)
        except Exception:
            continue
        answers[rank] = answer
    return answers


def _rank(rank: int, ranks: int, store: str, body: Body, wait_bound_s: float, queue) -> None:
    try:
        file_store = torch.distributed.FileStore(store, ranks)
        fabric = CudaFabric(rank, ranks, file_store, wait_bound_s)
        queue.put((rank, body(fabric)))
        fabric.close()
    except Exception:
        queue.put((rank, traceback.format_exc()))
