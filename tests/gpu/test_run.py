"""Whole runs of the cuda fabric: rows, shared GPUs, killed ranks, killed commands, what is left."""

import os
import signal
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from runs import (
    end,
    gone,
    mokbench,
    send,
    started,
    statuses,
    wait_for_rows,
    wait_until,
    worker_processes,
)

from mokbench import rates
from mokbench.results import RunFolder

CONFIG = """\
name: small
fabric: cuda
ranks: {ranks}
model: {{name: small, hidden: 1024, intermediate: 256, experts: 16, top_k: 4}}
systems: [push, {{alltoall: {{compile: false}}}}]
sweep:
  tokens_per_rank: {tokens}
  routing: [balanced, skewed]
measure: {{regimes: {regimes}, graph: {graph}, noise: 5%, blocks: 3, max_time: 100ms,
  deadline: 60s, wait_bound: 2s, signals: {signals}, min_step: {signals}}}
"""


@pytest.fixture
def scratch():
    """A temporary folder for the runs, short enough to hold their sockets: pytest's own is not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def config(folder, ranks, **values):
    usual = {
        "tokens": "[64, 256]",
        "regimes": "[isolated]",
        "graph": "[false]",
        "signals": "false",
    }
    path = folder / "small.yaml"
    path.write_text(CONFIG.format(ranks=ranks, **(usual | values)), encoding="utf-8")
    return path


# alltoall's four rows are unsupported here and come first, before any rank is started; one more is
# a measured one.
FIRST_MEASURED = 5


def daemons(scratch):
    """MPS processes of a daemon whose folder is under ``scratch``."""
    found = []
    for process in psutil.process_iter(["name"]):
        if not (process.info["name"] or "").startswith("nvidia-cuda-mps"):
            continue
        try:
            folder = process.environ().get("CUDA_MPS_PIPE_DIRECTORY", "")
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
        if folder.startswith(str(scratch)):
            found.append(process)
    return found


def shared_memory():
    """Names in /dev/shm, whoever made them: those from before a test are not its own."""
    return {path.name for path in Path("/dev/shm").iterdir()}


def test_rows_of_a_shared_gpu_say_what_they_are(tmp_path, scratch):
    out = tmp_path / "run"
    every = {"regimes": "[isolated, steady]", "graph": "[false, true]", "signals": "true"}
    path = config(tmp_path, "[1, 2]", tokens=256, **every)
    done = mokbench("run", path, "--out", out, env=os.environ | {"TMPDIR": str(scratch)})
    print(done.stdout[-6000:], done.stderr[-3000:])
    assert done.returncode == 0
    records = [r for r in RunFolder.open(out).records() if r.system == "push"]
    assert len(records) == 2 * 2 * 4
    for record in records:
        assert record.status == "ok", record.reason
        assert record.rel_error < 8e-3
        assert record.bitwise_repeat
        assert record.ranks_per_gpu == record.ranks
        assert record.link == ("none" if record.ranks == 1 else "hbm")
        assert record.link_utilization is None
        shared = "ranks share one GPU; ratios do not predict NVLink"
        assert (shared in record.notes) == (record.ranks == 2)
        assert record.l2_state == ("flushed" if record.regime == "isolated" else "warm")
        assert 100 < record.peak_tflops < 1500
        # A pass cannot be faster than its roofline, and nothing is in the L2 at its start.
        if record.regime == "isolated":
            assert record.roofline_ratio > 1
        assert 300 < record.sm_clock_mhz < 2500
        assert record.hold_expired_share is not None
        assert 0 < record.mma_utilization < 1
        assert 0 < record.timer_step_us < 2
        assert 5 < record.step_time_us.median < 20_000
    points = rates.read(out)
    assert [point.ranks for point in points] == [1, 2]
    for point in points:
        assert 1000 < point.gpu_copy_gbs < 6000
        assert abs(point.skew_self_test_us - 200) < 20
    assert points[1].overlap_ms > 5
    assert daemons(scratch) == []
    assert list(scratch.glob("mokbench-*")) == []


# Soon after a row ranks meet for the next ones, where one that waits in torch's rendezvous lets no
# other thread of its own run.
@pytest.mark.parametrize("later_s", [0.0, 0.1, 0.5])
def test_a_killed_parent_leaves_no_daemon_no_process_and_no_folder(tmp_path, scratch, later_s):
    out = tmp_path / "run"
    environment = os.environ | {"TMPDIR": str(scratch)}
    before = shared_memory()
    with started("run", config(tmp_path, 2), "--out", out, "--no-charts", env=environment) as run:
        wait_for_rows(out, FIRST_MEASURED, run)
        workers = worker_processes(run.pid)
        mps = daemons(scratch)
        assert len(workers) == 2
        assert mps, "the daemon must be seen, or its end would mean nothing"
        time.sleep(later_s)
        send(run, signal.SIGKILL)
        run.wait()
        assert gone(workers)
        assert gone(mps, 30)
    guards = [p for p in psutil.process_iter(["cmdline"]) if _is_guard(p, scratch)]
    assert gone(guards, 20)
    assert daemons(scratch) == []

    def left():
        found = [*scratch.glob("mokbench-*"), *scratch.glob("symm_mem-*")]
        return found + sorted(shared_memory() - before)

    assert wait_until(lambda: not left()), left()


def _is_guard(process, scratch):
    line = process.info["cmdline"] or []
    return "mokbench.fabric.mps" in line and any(str(scratch) in word for word in line)


def test_a_killed_rank_fails_one_row_and_new_ranks_do_the_rest(tmp_path, scratch):
    out = tmp_path / "run"
    environment = os.environ | {"TMPDIR": str(scratch)}
    with started("run", config(tmp_path, 2), "--out", out, "--no-charts", env=environment) as run:
        wait_for_rows(out, FIRST_MEASURED, run)
        assert daemons(scratch)
        worker_processes(run.pid)[1].kill()
        code, _, err = end(run)
    assert code == 3, err
    found = RunFolder.open(out).records()
    failed = [record for record in found if record.status == "failed"]
    assert len(found) == 8
    assert [record.error.rank for record in failed] == [1]
    assert sum(record.status == "ok" for record in found) == 3
    assert daemons(scratch) == []


def test_ctrl_c_keeps_rows_and_stops_the_daemon(tmp_path, scratch):
    out = tmp_path / "run"
    environment = os.environ | {"TMPDIR": str(scratch)}
    with started("run", config(tmp_path, 2), "--out", out, "--no-charts", env=environment) as run:
        wait_for_rows(out, FIRST_MEASURED, run)
        assert daemons(scratch)
        send(run, signal.SIGINT)
        code, _, err = end(run)
    assert code == 130, err
    assert len(statuses(out)) >= FIRST_MEASURED
    assert daemons(scratch) == []
    assert not list(Path(scratch).glob("mokbench-*"))
