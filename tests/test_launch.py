import os
import signal
import sys
import threading
import time
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest

from mokbench.blame import Failure, at_fault
from mokbench.joined import Launcher
from mokbench.launch import GroupError, StartError, WorkerPool
from mokbench.spawn import LocalStarter, worker_environment


def fault(rank: int, late_rank: int) -> Failure:
    return Failure(rank, "fault", "waited in vain", {"rank": rank, "late_rank": late_rank})


def test_a_death_explains_expired_waits():
    died = Failure(2, "died", "died: killed by SIGKILL")
    assert at_fault([fault(0, 2), fault(1, 0), died]) == died


def test_an_own_error_explains_lost_peers():
    error = Failure(1, "error", "raised ValueError")
    assert at_fault([Failure(0, "peer", "saw a lost peer"), error]) == error


def test_a_silent_rank_is_at_fault_and_its_witness_is_kept():
    hung = Failure(3, "hung", "hung: no answer while others waited for it")
    found = at_fault([fault(1, 0), fault(0, 3), hung])
    assert (found.rank, found.kind) == (3, "hung")
    assert "rank 0 waited in vain" in found.text
    assert found.fault == {"rank": 0, "late_rank": 3}


def test_of_several_silent_ranks_the_one_that_another_waited_for_is_at_fault():
    hung = [Failure(rank, "hung", "hung: no answer (silent ranks: 0, 2)") for rank in (0, 2)]
    found = at_fault([fault(1, 2), *hung])
    assert (found.rank, found.kind, found.certain) == (2, "hung", True)
    assert "rank 1 waited in vain" in found.text


def test_of_several_silent_ranks_without_a_witness_nobody_is_accused():
    hung = [Failure(rank, "hung", "hung: no answer (silent ranks: 0, 1)") for rank in (0, 1)]
    found = at_fault(hung)
    assert not found.certain
    assert "silent ranks: 0, 1" in found.text
    assert "which of them the others waited for is unknown" in found.text


def test_expired_waits_are_followed_to_the_rank_nobody_explains():
    # 0 waits for 1, 1 waits for 2, and 2 itself has no complaint: it finished, too late.
    found = at_fault([fault(0, 1), fault(1, 2)])
    assert (found.rank, found.kind) == (2, "late")
    assert "rank 1 waited in vain" in found.text


def test_a_cycle_of_waits_ends():
    assert at_fault([fault(0, 1), fault(1, 0)]).rank in (0, 1)


def test_a_wait_on_the_rank_itself_is_its_own_fault():
    assert at_fault([fault(1, 1)]).rank == 1


def torchrun(**changes: str) -> dict[str, str]:
    environment = {
        "TORCHELASTIC_RUN_ID": "x",
        "RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return environment | changes


def test_torchrun_is_recognised():
    found = Launcher.detect(torchrun())
    assert found == Launcher("torchrun", 1, 4, 1, "localhost", 29500, True)
    assert found.bind_host == "127.0.0.1"
    assert Launcher.detect(torchrun(LOCAL_WORLD_SIZE="2")).nodes == 2


def test_srun_is_recognised_but_a_batch_script_is_not():
    batch = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    assert Launcher.detect(batch) is None
    step = batch | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}
    assert Launcher.detect(step) == Launcher("srun", 3, 4, 1, "127.0.0.1", 20007, False)


def test_srun_on_several_nodes_needs_a_master():
    step = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_NODES": "2"}
    with pytest.raises(Exception, match="set MASTER_ADDR"):
        Launcher.detect(step)
    found = Launcher.detect(step | {"MASTER_ADDR": "node1", "MASTER_PORT": "1234"})
    assert (found.nodes, found.bind_host, found.master_port) == (2, "", 1234)


def test_no_launcher():
    assert Launcher.detect({}) is None


def test_workers_get_one_thread_each(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    assert worker_environment("host")["OMP_NUM_THREADS"] == "1"


def test_a_worker_that_cannot_start_is_named_with_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    starter = LocalStarter(tmp_path / "logs")
    pool = WorkerPool(2, starter, wait_bound_s=1.0, shm_token="test")
    with pytest.raises(StartError, match=r"rank [01] did not start: exit code 1"):
        pool.start()
    pool.stop()


def test_a_rank_that_dies_between_jobs_is_named_and_the_next_job_runs(tmp_path):
    starter = LocalStarter(tmp_path / "logs")
    pool = WorkerPool(2, starter, wait_bound_s=2.0, shm_token="test-idle")
    pool.start()
    os.kill(starter.pids[1], signal.SIGKILL)
    with pytest.raises(GroupError, match="rank 1 died: killed by SIGKILL") as caught:
        pool.call({"kind": "signals"}, 60, 60)
    assert not isinstance(caught.value, StartError)
    assert caught.value.cell_id is None
    reply = pool.call({"kind": "signals"}, 60, 60)
    assert [point["ranks"] for point in reply["points"]] == [2]
    pool.stop()


class FakeStarter:
    """Ranks that the test plays itself."""

    address = None

    def __init__(self, ranks):
        self.pairs = [Pipe() for _ in range(ranks)]

    def listen(self, authkey):
        return SimpleNamespace(close=lambda: None)

    def describe(self, rank):
        return "killed by SIGKILL"

    def kill(self):
        pass


def played_pool(ranks):
    starter = FakeStarter(ranks)
    pool = WorkerPool(ranks, starter, wait_bound_s=1.0, shm_token="test-fake")
    pool._connections = {rank: pair[0] for rank, pair in enumerate(starter.pairs)}
    return pool, [pair[1] for pair in starter.pairs]


def failed(kind, text):
    return ("failed", {"kind": kind, "text": text, "fault": None})


def test_a_death_is_waited_for_when_a_neighbour_reports_its_lost_context_first():
    pool, ranks = played_pool(3)
    ranks[0].send(failed("error", "CUDA_ERROR_MPS_CLIENT_TERMINATED"))
    threading.Timer(0.5, ranks[1].close).start()
    with pytest.raises(GroupError, match="rank 1 died: killed by SIGKILL"):
        pool.call({}, 60, 60)


def test_an_error_is_not_waited_upon_for_long():
    pool, ranks = played_pool(2)
    ranks[1].send(failed("error", "ValueError"))
    start = time.monotonic()
    with pytest.raises(GroupError, match="rank 1 raised ValueError"):
        pool.call({}, 60, 60)
    assert time.monotonic() - start < 10
    assert ranks[0].poll(0)  # the job, which it never answered


def test_a_long_temporary_folder_does_not_break_the_socket(tmp_path, monkeypatch):
    long = tmp_path / ("t" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    starter = LocalStarter(tmp_path / "logs")
    starter.listen(b"key").close()
    assert len(starter.address.encode()) < 104
    assert list(long.iterdir()) == []
    starter.close()


def test_only_the_last_workers_log_is_quoted(tmp_path, monkeypatch):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank0.log").write_text("ValueError: of an earlier worker\n", encoding="utf-8")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    starter = LocalStarter(logs)
    starter.start([{"rank": 0, "fabric": "host", "shm_token": "test"}])
    assert starter.describe(0) == "exit code 1"
    starter.kill()
    starter.close()
