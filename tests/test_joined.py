"""Ranks that a launcher started: torchrun for real, srun by its environment."""

import os
import subprocess
import sys
import time

import psutil
import pytest
from runs import (
    NUM_CELLS,
    command,
    gone,
    statuses,
    wait_for_rows,
    wait_until,
    worker_processes,
    write_config,
)

from mokbench.results import RunFolder

pytestmark = pytest.mark.slow


def torchrun(*arguments) -> list[str]:
    launcher = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node=2", "-m", "mokbench", *map(str, arguments)]


def test_torchrun_joins_and_writes_one_folder(tmp_path):
    out = tmp_path / "run"
    run = torchrun("run", write_config(tmp_path), "--out", out, "--no-charts")
    done = subprocess.run(run, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert len(statuses(out)) == NUM_CELLS
    assert set(statuses(out).values()) == {"ok"}
    assert done.stdout.splitlines()[-1] == str(out)
    told = RunFolder.open(out).meta.launcher
    assert told == {"name": "torchrun", "ranks": 2, "nodes": 1}


def test_a_rank_killed_under_torchrun_fails_one_row(tmp_path):
    out = tmp_path / "run"
    run = torchrun("run", write_config(tmp_path), "--out", out, "--no-charts")
    process = subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_rows(out, 2, process)
    workers = worker_processes(process.pid, recursive=True)
    assert len(workers) == 2
    workers[1].kill()
    _, err = process.communicate(timeout=240)
    assert process.returncode != 0
    found = RunFolder.open(out).records()
    assert len(found) == NUM_CELLS, err
    (failed,) = [record for record in found if record.status == "failed"]
    assert "died: killed by SIGKILL" in failed.reason
    assert gone(workers)


def test_killed_agents_take_their_workers_with_them(tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    out = tmp_path / "run"
    process = subprocess.Popen(
        torchrun("run", write_config(tmp_path), "--out", out, "--no-charts"),
        env=os.environ | {"TMPDIR": str(scratch)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for_rows(out, 2, process)
    workers = worker_processes(process.pid, recursive=True)
    agents = psutil.Process(process.pid).children()
    assert (len(workers), len(agents)) == (2, 2)
    for killed in (psutil.Process(process.pid), *agents):
        killed.kill()
    process.wait()
    assert gone(workers, 5)
    assert wait_until(lambda: not list(scratch.glob("mokbench-*")), 5)


def srun_environment(rank: int, port: int) -> dict[str, str]:
    slurm = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_PROCID": str(rank),
        "MASTER_PORT": str(port),
    }
    return os.environ | slurm


def test_srun_ranks_join(tmp_path, unused_port):
    out = tmp_path / "run"
    run = command("run", write_config(tmp_path), "--out", out, "--no-charts")
    tasks = [
        subprocess.Popen(
            run,
            env=srun_environment(rank, unused_port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [task.communicate(timeout=240) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], outputs
    assert set(statuses(out).values()) == {"ok"}
    assert outputs[1][0] == "", "only the leading rank prints"


def test_a_plan_is_printed_by_one_rank(tmp_path, unused_port):
    run = command("run", write_config(tmp_path), "--dry-run")
    for rank, lines in ((0, True), (1, False)):
        environment = srun_environment(rank, unused_port)
        done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=60)
        assert (done.returncode, bool(done.stdout)) == (0, lines), done.stderr


def test_more_ranks_than_the_launcher_gave_are_unsupported(tmp_path):
    out = tmp_path / "run"
    run = torchrun("run", write_config(tmp_path, ranks=4), "--out", out, "--no-charts")
    done = subprocess.run(run, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    records = RunFolder.open(out).records()
    assert {record.reason for record in records} == {"needs 4 ranks; the launcher started 2"}
    assert "no row was measured: all 12 are unsupported" in done.stderr


def test_a_leading_rank_that_dies_takes_its_agents_along(tmp_path, unused_port):
    out = tmp_path / "run"
    run = command("run", write_config(tmp_path), "--out", out, "--no-charts")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    tasks = [
        subprocess.Popen(run, env=srun_environment(rank, unused_port), **quiet) for rank in range(2)
    ]
    wait_for_rows(out, 2, tasks[0])
    workers = [w for task in tasks for w in worker_processes(task.pid, recursive=True)]
    tasks[0].kill()
    start = time.monotonic()
    assert tasks[1].wait(timeout=30) == 3
    assert time.monotonic() - start < 30
    assert gone(workers)
    tasks[0].wait()
