"""Ranks that die, stop or raise, interrupts, full disks: a clear row, nothing lost or left."""

import contextlib
import json
import signal
import subprocess
import time

import pytest
from runs import (
    NUM_CELLS,
    end,
    gone,
    inject,
    mokbench,
    segments,
    send,
    started,
    statuses,
    wait_for_rows,
    worker_processes,
    write_config,
)

from mokbench.results import RunFolder

pytestmark = pytest.mark.slow


def failed_records(folder):
    return [r for r in RunFolder.open(folder).records() if r.status == "failed"]


def test_a_killed_rank_fails_one_row_and_the_rest_completes(tmp_path):
    out = tmp_path / "run"
    with started("run", write_config(tmp_path), "--out", out, "--no-charts") as process:
        wait_for_rows(out, 3, process)
        workers = worker_processes(process.pid)
        workers[1].kill()
        code, _, err = end(process)
    assert code == 3, err
    found = statuses(out)
    assert len(found) == NUM_CELLS
    (failed,) = failed_records(out)
    assert failed.error.rank == 1
    assert "rank 1 died: killed by SIGKILL" in failed.reason
    assert sorted(found.values()).count("ok") == NUM_CELLS - 1
    assert gone(workers)
    assert segments(process) == set()

    code = mokbench("run", "--resume", out, "--rerun-failed", "--no-charts").returncode
    assert code == 0
    assert set(statuses(out).values()) == {"ok"}


def test_a_stopped_rank_is_named_by_those_who_wait(tmp_path):
    out = tmp_path / "run"
    with started("run", write_config(tmp_path), "--out", out, "--no-charts") as process:
        wait_for_rows(out, 3, process)
        worker_processes(process.pid)[1].suspend()
        code, _, err = end(process)
    assert code == 3, err
    (failed,) = failed_records(out)
    assert failed.error.rank == 1
    assert failed.error.kind in ("hung", "late")
    assert len(statuses(out)) == NUM_CELLS


RAISING = """
import sys
if "mokbench.worker" in sys.orig_argv:
    from mokbench.systems import push
    def run(self, x, topk_idx, topk_weights):
        if self._rank_number == 1:
            raise ValueError("injected")
        return self._run(x, topk_idx, topk_weights)
    def prepare(self, setup):
        self._rank_number = setup.rank
        self._prepare(setup)
    push.Push._run, push.Push.run = push.Push.run, run
    push.Push._prepare, push.Push.prepare = push.Push.prepare, prepare
"""


def test_a_raising_rank_fails_its_rows_only(tmp_path):
    out = tmp_path / "run"
    environment = inject(tmp_path, RAISING)
    config = write_config(tmp_path)
    keep = ("--only", "routing=balanced", "--only", "tokens_per_rank=4")
    done = mokbench("run", config, "--out", out, "--no-charts", *keep, env=environment)
    assert done.returncode == 3, done.stderr
    (failed,) = failed_records(out)
    assert failed.system == "push"
    assert failed.error.rank == 1
    assert "ValueError: injected" in failed.reason
    assert sorted(statuses(out).values()) == ["failed", "ok", "ok"]


SILENT = """
import sys, time
if "mokbench.worker" in sys.orig_argv:
    from mokbench.layer import Layer
    build = Layer.build
    def slow(workload, rank, *device):
        if rank == 1:
            time.sleep(1000)
        return build(workload, rank, *device)
    Layer.build = slow
"""


@pytest.mark.parametrize("deadline, rank", [("4s", None), ("16s", 1)])
def test_a_rank_silent_before_a_collective_is_named_only_if_known(tmp_path, deadline, rank):
    # Rank 0 gives up on the collective after 10 s; before that both ranks are silent alike.
    out = tmp_path / "run"
    config = write_config(tmp_path)
    text = config.read_text(encoding="utf-8").replace("deadline: 20s", f"deadline: {deadline}")
    config.write_text(text, encoding="utf-8")
    keep = ("--only", "id=tiny.push.*.t4.balanced.*")
    environment = inject(tmp_path, SILENT)
    done = mokbench("run", config, "--out", out, "--no-charts", *keep, env=environment)
    assert done.returncode == 3, done.stderr
    (failed,) = failed_records(out)
    assert (failed.error.rank, failed.error.kind) == (rank, "hung")
    if rank is None:
        assert "silent ranks: 0, 1" in failed.reason
        assert "unknown" in failed.reason
        assert "deadline well above 10 s" in failed.reason
    else:
        assert failed.reason.startswith("rank 1 hung")


WRONG = """
import sys
if "mokbench.worker" in sys.orig_argv:
    from mokbench.systems import mok
    def run(self, x, topk_idx, topk_weights):
        y = self._run(x, topk_idx, topk_weights)
        y[:1, :1] += 1.0
        return y
    mok.Mok._run, mok.Mok.run = mok.Mok.run, run
"""


def test_a_wrong_result_is_never_timed(tmp_path):
    out = tmp_path / "run"
    environment = inject(tmp_path, WRONG)
    keep = ("--only", "routing=balanced", "--only", "tokens_per_rank=4")
    done = mokbench(
        "run", write_config(tmp_path), "--out", out, "--no-charts", *keep, env=environment
    )
    assert done.returncode == 3
    (failed,) = failed_records(out)
    assert failed.system == "mok"
    assert failed.error.kind == "check"
    assert "differs from the FP32 reference" in failed.reason
    assert failed.step_time_us is None
    assert failed.rel_error > 8e-3


def test_ctrl_c_keeps_rows_and_resume_completes(tmp_path):
    out = tmp_path / "run"
    config = write_config(tmp_path)
    with started("run", config, "--out", out, "--no-charts") as process:
        wait_for_rows(out, 3, process)
        workers = worker_processes(process.pid)
        send(process, signal.SIGINT)
        code, printed, err = end(process)
    assert code == 130
    assert printed == f"{out}\n", "who interrupts waits for no report"
    assert f"mokbench run --resume {out}" in err
    assert f"mokbench report {out}" in err
    assert gone(workers)
    assert segments(process) == set()
    kept = statuses(out)
    assert 3 <= len(kept) < NUM_CELLS

    assert mokbench("run", "--resume", out, "--no-charts").returncode == 0
    plan = mokbench("run", config, "--dry-run").stdout
    found = statuses(out)
    assert len(found) == NUM_CELLS
    assert set(kept) < set(found)
    assert all(cell_id in plan.replace("\n", "") for cell_id in found)
    lines = (out / "records.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == NUM_CELLS, "no row was measured twice"


def test_a_second_ctrl_c_does_not_spoil_the_end(tmp_path):
    out = tmp_path / "run"
    with started("run", write_config(tmp_path), "--out", out, "--no-charts") as process:
        wait_for_rows(out, 2, process)
        workers = worker_processes(process.pid)
        send(process, signal.SIGINT)
        time.sleep(0.05)
        send(process, signal.SIGINT)
        code, _, err = end(process)
    assert code == 130, err
    assert "Traceback" not in err
    assert RunFolder.open(out).meta.status == "interrupted"
    assert gone(workers)


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 256 KiB."""
    where = tmp_path / "disk"
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(where)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


def fill_up(path):
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass


def test_a_full_disk_keeps_what_was_stored(tmp_path, tiny_disk):
    out = tiny_disk / "run"
    config = write_config(tmp_path)
    with started("run", config, "--out", out, "--no-charts") as process:
        wait_for_rows(out, 2, process)
        filler = tiny_disk / "filler"
        fill_up(filler)
        code, _, err = end(process)
    assert code == 3
    assert "No space left on device" in err
    assert "rows stored before it are safe" in err
    stored = statuses(out)
    assert 2 <= len(stored) < NUM_CELLS

    filler.unlink()
    assert mokbench("run", "--resume", out, "--no-charts").returncode == 0
    assert len(statuses(out)) == NUM_CELLS


def test_the_output_folder_must_be_new_and_writable(tmp_path):
    config = write_config(tmp_path)
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").write_text("x", encoding="utf-8")
    done = mokbench("run", config, "--out", full)
    assert done.returncode == 2
    assert "exists and is not empty" in done.stderr
    done = mokbench("run", config, "--out", config)
    assert done.returncode == 2
    assert "is a file, not a folder" in done.stderr
    done = mokbench("run", config, "--out", "/proc/run")
    assert done.returncode == 2
    assert "/proc/run" in done.stderr


def test_resume_refuses_a_changed_config(tmp_path):
    out = tmp_path / "run"
    config = write_config(tmp_path)
    keep = ("--only", "id=tiny.mok.*.t4.balanced.*")
    assert mokbench("run", config, "--out", out, "--no-charts", *keep).returncode == 0
    config.write_text(config.read_text(encoding="utf-8").replace("[4, 32]", "[4]"), "utf-8")
    done = mokbench("run", config, "--resume", out)
    assert done.returncode == 2
    assert "differs from the config this run was started with" in done.stderr


def test_required_systems_must_be_supported(tmp_path):
    config = write_config(tmp_path)
    text = config.read_text(encoding="utf-8").replace("alltoall]", "deepep]\nrequire: [deepep]")
    config.write_text(text, encoding="utf-8")
    out = tmp_path / "run"
    keep = ("--only", "system=deepep", "--only", "routing=balanced")
    done = mokbench("run", config, "--out", out, "--no-charts", *keep)
    assert done.returncode == 3
    assert set(statuses(out).values()) == {"unsupported"}
    report = json.loads(mokbench("report", out, "--format", "json").stdout)
    assert "DeepEP" in report["cells"][0]["reason"]
