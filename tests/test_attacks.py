"""Found by attacking runs: odd environments, hostile files, ranks that accuse each other."""

import json
import os
import subprocess

import numpy as np
import pytest
from runs import command, mokbench, statuses, write_config

from mokbench import trace
from mokbench.blame import Failure, at_fault
from mokbench.errors import ConfigError, MokbenchError, ResultsError
from mokbench.fabric import segments
from mokbench.joined import Launcher
from mokbench.results import RunFolder
from mokbench.spawn import LocalStarter


def fault(rank, late, waited_s):
    return Failure(rank, "fault", "waited in vain", {"late_rank": late, "waited_s": waited_s})


def test_of_ranks_that_accuse_each_other_the_one_that_waited_long_is_believed():
    slept = fault(1, 0, 0.001)
    waited = fault(0, 1, 2.0)
    for order in ([waited, slept], [slept, waited]):
        found = at_fault(order)
        assert (found.rank, found.kind) == (1, "late")
        assert "rank 0 waited in vain" in found.text


def test_a_cycle_of_three_ends():
    ring = [fault(0, 1, 2.0), fault(1, 2, 2.5), fault(2, 0, 0.1)]
    assert at_fault(ring).rank == 2


@pytest.mark.parametrize("name", ["mokbench-99999999999999999999-a-0", "mokbench-folder"])
def test_alien_names_beside_our_segments_do_not_stop_a_run(tmp_path, monkeypatch, name):
    monkeypatch.setattr(segments, "_SHM_FOLDER", tmp_path)
    if name == "mokbench-folder":
        (tmp_path / "mokbench-4194303-a-0").mkdir()
    else:
        (tmp_path / name).touch()
    segments.remove_stale()


@pytest.mark.parametrize(
    "environment",
    [
        {"TORCHELASTIC_RUN_ID": "x"},
        {"SLURM_STEP_NUM_TASKS": "2"},
        {"SLURM_STEP_NUM_TASKS": "abc"},
    ],
)
def test_half_of_a_launchers_environment_says_what_to_unset(environment):
    with pytest.raises(ConfigError, match="unset TORCHELASTIC_RUN_ID and SLURM_STEP_NUM_TASKS"):
        Launcher.detect(environment)


def test_metadata_nested_without_end_is_a_bad_trace(tmp_path):
    path = tmp_path / "t.npz"
    ids = np.zeros((1, 4, 1), dtype=np.int32)
    np.savez(path, topk_idx=ids, metadata=np.array("[" * 100_000))
    with pytest.raises(ConfigError, match="metadata is not JSON"):
        trace.read(path, 0, 8, 1)


def test_a_trace_whose_path_no_system_takes_is_refused():
    with pytest.raises(ConfigError, match="cannot be read"):
        trace.read("a\0b.npz", 0, 8, 1)


def test_logs_that_are_no_folder_are_named(tmp_path):
    (tmp_path / "logs").touch()
    starter = LocalStarter(tmp_path / "logs")
    with pytest.raises(MokbenchError, match="logs cannot be kept there"):
        starter.start([{"rank": 0, "fabric": "host", "shm_token": "test"}])
    starter.close()


def test_a_rank_whose_log_is_gone_is_still_described(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    starter = LocalStarter(tmp_path / "logs")
    starter.start([{"rank": 0, "fabric": "host", "shm_token": "test"}])
    (tmp_path / "logs" / "rank0.log").unlink()
    assert starter.describe(0) == "exit code 1; its log is gone"
    starter.kill()
    starter.close()


@pytest.mark.slow
def test_a_run_goes_on_when_nobody_reads_its_progress_and_where_samples_are_gone(tmp_path):
    out = tmp_path / "r\xfcn"
    config = write_config(tmp_path)
    keep = ("--only", "tokens_per_rank=4", "--only", "system=push,mok")
    reader, writer = os.pipe()
    os.close(reader)
    run = command("run", config, "--out", out, "--no-charts", *keep)
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(run, stdout=subprocess.PIPE, stderr=writer, env=environment, timeout=120)
    os.close(writer)
    assert done.returncode == 0
    assert set(statuses(out).values()) == {"ok"}
    for path in (out / "samples").iterdir():
        path.unlink()
    (out / "samples").rmdir()
    assert mokbench("run", "--resume", out, "--no-charts").returncode == 0
    assert len(statuses(out)) == 12


@pytest.mark.slow
def test_rows_nested_without_end_are_named(tmp_path):
    out = tmp_path / "run"
    config = write_config(tmp_path)
    keep = ("--only", "tokens_per_rank=4", "--only", "system=push")
    assert mokbench("run", config, "--out", out, "--no-charts", *keep).returncode == 0
    with (out / "records.jsonl").open("a", encoding="utf-8") as file:
        file.write("[" * 100_000 + "\n")
    with pytest.raises(ResultsError, match="not a row"):
        RunFolder.open(out).records()
    meta = json.loads((out / "run.json").read_text(encoding="utf-8"))
    assert meta["config"]["from_run"].endswith("small.yaml")
