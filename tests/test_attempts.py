"""Whose fault a failure is: a row's, nobody's, or that of a tool that some rank counts need."""

import pytest
from fake_run import fake_meta

from mokbench import sweep
from mokbench.attempts import attempts
from mokbench.blame import Failure
from mokbench.cells import expand
from mokbench.config import parse
from mokbench.errors import UnsupportedError
from mokbench.launch import GroupError
from mokbench.progress import make_progress
from mokbench.results import RunFolder
from mokbench.spawn import LocalStarter

CONFIG = """\
ranks: [1, 2]
model: {hidden: 64, intermediate: 64, experts: 8, top_k: 2}
systems: [mok, push]
tokens_per_rank: 4
measure: {regimes: [isolated], signals: false, min_step: false}
"""
DIED = Failure(1, "died", "died: killed by SIGKILL")


class Pool:
    """Workers that fail where they are told to, else answer nothing about every cell."""

    ranks = 2

    def __init__(self, *failures):
        self.failures = list(failures)
        self.jobs = []

    def start(self):
        pass

    def call(self, job, silence_s, total_s, on_phase):
        self.jobs.append([cell["id"] for cell in job["cells"]])
        failed_in = self.failures.pop(0) if self.failures else "nothing"
        if failed_in != "nothing":
            raise GroupError(DIED, failed_in)
        return {"facts": {}, "results": dict.fromkeys(self.jobs[-1], "result")}


def tried(pool):
    """The cells, and what became of each, by place."""
    suite = parse(CONFIG)
    cells = [cell for cell in expand(suite, fabric="host") if cell.workload.ranks == 2]
    turns = []
    with make_progress(len(cells), True) as progress:
        found = list(
            attempts(pool, cells, suite.measure, None, progress, lambda: turns.append(None))
        )
    assert len(turns) == len(pool.jobs)
    assert {cell.id for cell, _, _ in found} == {cell.id for cell in cells}
    return [cell.id for cell in cells], {cell.id: outcome for cell, _, outcome in found}


def test_a_failure_of_a_row_takes_no_other_along():
    (first, second), _ = tried(Pool())
    pool = Pool(second)
    _, outcomes = tried(pool)
    assert outcomes[first] == "result"
    assert outcomes[second].text == DIED.text
    assert pool.jobs == [[first, second], [first]]


def test_a_failure_in_the_matmul_peak_is_no_rows():
    pool = Pool("matmul peak")
    ids, outcomes = tried(pool)
    assert pool.jobs == [ids, ids]
    assert set(outcomes.values()) == {"result"}


def test_a_matmul_peak_that_fails_again_fails_all_rows_and_says_where():
    pool = Pool("matmul peak", "matmul peak")
    ids, outcomes = tried(pool)
    assert len(pool.jobs) == 2
    assert {outcomes[name].text for name in ids} == {
        "died: killed by SIGKILL (in matmul peak, which is no row's own work)"
    }
    assert {outcomes[name].rank for name in ids} == {1}


def test_a_death_before_the_first_row_shows_in_some_row():
    pool = Pool(None)
    ids, outcomes = tried(pool)
    assert outcomes[ids[0]].kind == "died"
    assert outcomes[ids[1]] == "result"


class NoMps(Pool):
    """Ranks that cannot start, for want of a tool."""

    def start(self):
        raise UnsupportedError("several ranks on one GPU need CUDA MPS")

    def stop(self):
        pass


class Able(Pool):
    ranks = 1

    def call(self, job, *_):
        reply = super().call(job, *_)
        told = {"problem": "not measured by this fake", "unsupported": None}
        return reply | {"results": dict.fromkeys(reply["results"], told)}

    def stop(self):
        pass


def test_ranks_that_cannot_share_a_gpu_are_unsupported_and_others_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "checked_fields", lambda *_: {})
    suite = parse(CONFIG)
    cells = expand(suite, fabric="host")
    folder = RunFolder.create(tmp_path / "run", fake_meta())
    pools = {1: Able(), 2: NoMps()}
    with make_progress(len(cells), True) as progress:
        sweep.Sweep(suite, folder, pools.__getitem__, progress).run(cells)
    found = {(record.ranks, record.status, record.reason) for record in folder.records()}
    assert found == {
        (1, "failed", "not measured by this fake"),
        (2, "unsupported", "several ranks on one GPU need CUDA MPS"),
    }


class NotAgain(Able):
    """Ranks that die in the first job, or in their first row, and whose daemon is then stuck."""

    def call(self, job, *arguments):
        if self.failures or job["kind"] != "cells":
            self.jobs.append(job)
            raise GroupError(DIED, self.failures.pop() if self.failures else None)
        raise UnsupportedError("the CUDA MPS daemon does not start: busy")


class Two(Able):
    ranks = 2

    def call(self, job, *arguments):
        return super().call(job, *arguments) if job["kind"] == "cells" else {"points": []}


AGAIN = "the ranks do not start again: the CUDA MPS daemon does not start: busy"


@pytest.mark.parametrize("signals", [False, True])
def test_ranks_that_do_not_start_again_fail_their_rows_and_others_run(
    tmp_path, monkeypatch, signals
):
    monkeypatch.setattr(sweep, "checked_fields", lambda *_: {})
    suite = parse(CONFIG.replace("signals: false", f"signals: {str(signals).lower()}"))
    cells = expand(suite, fabric="host")
    first = next(cell.id for cell in cells if cell.workload.ranks == 1)
    folder = RunFolder.create(tmp_path / "run", fake_meta())
    pools = {1: NotAgain() if signals else NotAgain(first), 2: Two()}
    with make_progress(len(cells), True) as progress:
        sweep.Sweep(suite, folder, pools.__getitem__, progress).run(cells)
    found = [(record.ranks, record.status, record.reason) for record in folder.records()]
    died = [] if signals else [(1, "failed", f"rank 1 {DIED.text}")]
    left = [(1, "failed", AGAIN)] * (2 - len(died))
    assert found == [*died, *left, *[(2, "failed", "not measured by this fake")] * 2]
    assert {record.error.kind for record in folder.records()} <= {"died", "start", "check"}


def test_without_the_control_program_a_shared_gpu_is_unsupported(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    starter = LocalStarter(tmp_path / "logs", share_gpu=True)
    try:
        with pytest.raises(UnsupportedError, match="nvidia-cuda-mps-control is not on the PATH"):
            starter.start([{"rank": 0, "fabric": "cuda", "shm_token": "1-ab"}])
    finally:
        starter.kill()
        starter.close()
