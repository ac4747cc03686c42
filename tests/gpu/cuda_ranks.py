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

from mokbench.fabric.cuda import SHARED_GPU_ENVIRONMENT, WORKER_ENVIRONMENT, CudaFabric
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
        shares = SHARED_GPU_ENVIRONMENT | daemon.environment if daemon else {}
        os.environ.update(WORKER_ENVIRONMENT | shares)
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
