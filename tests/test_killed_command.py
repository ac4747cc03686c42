"""A killed command takes its ranks with it, whatever they do, and nothing is left behind."""

import os
import random
import signal
import time
from contextlib import contextmanager

import pytest
from runs import (
    NUM_CELLS,
    gone,
    inject,
    mokbench,
    segments,
    send,
    started,
    statuses,
    wait_for_rows,
    wait_until,
    worker_processes,
    write_config,
)

from mokbench.results import RunFolder

pytestmark = pytest.mark.slow

# The kernel ends ranks at once; a busy machine may need a moment to get there.
RANKS_END_S = 5
LEFTOVERS_GO_S = 5


@contextmanager
def running(tmp_path, environment=os.environ):
    """A command with a temporary folder of its own, tmp_path / "scratch"."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    arguments = ("run", write_config(tmp_path), "--out", tmp_path / "run", "--no-charts")
    with started(*arguments, env=environment | {"TMPDIR": str(scratch)}) as process:
        yield process


def started_workers(process):
    assert wait_until(lambda: len(worker_processes(process.pid)) == 2, 60)
    return worker_processes(process.pid)


def kill_and_see_nothing(tmp_path, process, workers):
    send(process, signal.SIGKILL)
    process.wait()
    assert gone(workers, RANKS_END_S)

    def left():
        return [*(tmp_path / "scratch").iterdir(), *segments(process)]

    assert wait_until(lambda: not left(), LEFTOVERS_GO_S), left()


def test_after_its_first_rows_nothing_is_left_and_the_run_can_be_resumed(tmp_path):
    out = tmp_path / "run"
    with running(tmp_path) as process:
        wait_for_rows(out, 2, process)
        kill_and_see_nothing(tmp_path, process, started_workers(process))
    assert RunFolder.open(out).meta.status == "interrupted"
    assert mokbench("run", "--resume", out, "--no-charts").returncode == 0
    assert len(statuses(out)) == NUM_CELLS


def test_a_stopped_rank_ends_too(tmp_path):
    with running(tmp_path) as process:
        wait_for_rows(tmp_path / "run", 2, process)
        workers = started_workers(process)
        workers[1].suspend()
        kill_and_see_nothing(tmp_path, process, workers)


# As torch's rendezvous of symmetric memory does while it waits for a peer: no other thread of the
# rank can run then.
HOLDS_THE_INTERPRETER = """
import sys
if "mokbench.worker" in sys.orig_argv:
    import ctypes, pathlib
    from mokbench.layer import Layer
    build = Layer.build
    def deaf(workload, rank, *device):
        if rank == 1:
            pathlib.Path({told!r}).touch()
            ctypes.PyDLL(None).sleep(100)
        return build(workload, rank, *device)
    Layer.build = deaf
"""


def test_a_rank_that_no_other_thread_can_interrupt_ends_too(tmp_path):
    told = tmp_path / "deaf"
    environment = inject(tmp_path, HOLDS_THE_INTERPRETER.format(told=str(told)))
    with running(tmp_path, environment) as process:
        assert wait_until(told.exists, 60)
        kill_and_see_nothing(tmp_path, process, started_workers(process))


# While ranks start they import torch for seconds, and more on a busy machine.
@pytest.mark.parametrize("seed", range(4))
def test_at_any_moment(tmp_path, seed):
    with running(tmp_path) as process:
        workers = started_workers(process)
        time.sleep(random.Random(seed).uniform(0, 6) if seed else 0)
        kill_and_see_nothing(tmp_path, process, workers)
