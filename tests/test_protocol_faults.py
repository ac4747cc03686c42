"""Lost, stopped, slow and raising ranks: everybody else names the right one, in time."""

import os
import signal
import time

import pytest
from protocol_ranks import Pool, assert_right, batches, ranks

PROTOCOLS = ["mok", "push"]
BOUND = 0.5
SHAPE = {
    "num_ranks": 4,
    "num_experts": 8,
    "top_k": 2,
    "max_tokens": 24,
    "hidden": 32,
    "intermediate": 16,
    "element_bytes": 4,
    "block_m": 8,
}


@pytest.fixture(scope="module")
def pool():
    made = Pool()
    yield made
    made.close()


def full_batches(seed=1):
    return batches(SHAPE, seed, [24] * 4)


def names_late(outcome, rank):
    assert outcome.error == "Fault", outcome.message
    assert outcome.record["late_rank"] == rank, outcome.message
    assert f"rank {rank} is late" in outcome.message
    return True


@pytest.mark.parametrize(
    ("protocol", "site"), [("mok", "entry"), ("push", "dispatched")], ids=PROTOCOLS
)
def test_fault_record_of_a_rank_that_never_came(pool, protocol, site):
    batch_of = full_batches()
    with ranks(pool, protocol, SHAPE, wait_bound_s=BOUND, initial_epoch=7) as case:
        for rank in (0, 1, 3):
            case.start(rank, "run", batch_of[rank])
        for rank in (0, 1, 3):
            outcome = case.finish(rank)
            assert names_late(outcome, 2)
            waited = outcome.record.pop("waited_s")
            if rank == 1:  # the first peer that it waits for is the missing one
                assert BOUND <= waited < 2 * BOUND
                assert outcome.record == {
                    "rank": 1,
                    "role": "caller",
                    "site": site,
                    "slot": 2,
                    "expected": 8,
                    "observed": 7,
                    "late_rank": 2,
                    "epoch": 8,
                }
            assert outcome.seconds < 2 * BOUND + 0.5


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("lost_by", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_rank_lost_in_the_middle_of_a_pass(pool, protocol, lost_by):
    batch_of = full_batches()
    with ranks(pool, protocol, SHAPE, wait_bound_s=BOUND, max_delay_us=20.0) as case:
        for batch, y in zip(batch_of, case.run(batch_of)[0], strict=True):
            assert_right(SHAPE, batch, y)
        case.start(2, "kill_in_gemm", 2, lost_by)
        case.finish(2)
        for rank in range(4):
            case.start(rank, "run", batch_of[rank], batch_of[rank])
        for rank in (0, 1, 3):
            outcome = case.finish(rank)
            assert names_late(outcome, 2)
            assert outcome.record["rank"] == rank
            assert outcome.seconds < 3 * BOUND
        pool.discard(2)


def test_stopped_rank_returns_once_it_goes_on(pool):
    batch_of = full_batches()
    with ranks(pool, "mok", SHAPE, wait_bound_s=BOUND) as case:
        case.start(2, "kill_in_gemm", 2, signal.SIGSTOP)
        case.finish(2)
        for rank in range(4):
            case.start(rank, "run", batch_of[rank], batch_of[rank])
        assert all(names_late(case.finish(rank), 2) for rank in (0, 1, 3))
        os.kill(pool.processes[2].pid, signal.SIGCONT)
        assert case.finish(2).error == "Fault"


def test_ranks_of_different_epochs_name_the_same_rank(pool):
    """Rank 0 sends nothing to the lost rank 3, so it waits a pass ahead, for ranks that wait."""
    batch_of = full_batches()
    batch_of[0].idx[batch_of[0].idx >= 6] = -1
    with ranks(pool, "mok", SHAPE, wait_bound_s=BOUND) as case:
        case.start(3, "kill_in_gemm", 1, signal.SIGKILL)
        case.finish(3)
        for rank in range(4):
            case.start(rank, "run", batch_of[rank], batch_of[rank])
        outcomes = [case.finish(rank) for rank in range(3)]
        assert all(names_late(outcome, 3) for outcome in outcomes)
        assert [o.record["epoch"] for o in outcomes] == [2, 1, 1]
        assert outcomes[0].record["site"] == "entry"
        pool.discard(3)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_error_of_a_callback_is_raised_and_peers_leave_at_once(pool, protocol):
    batch_of = full_batches()
    with ranks(pool, protocol, SHAPE, wait_bound_s=20.0) as case:
        case.start(1, "raise_in_gemm", 2)
        case.finish(1)
        outcomes = case.each("run", [(batch, batch) for batch in batch_of])
        assert (outcomes[1].error, outcomes[1].message) == (
            "ZeroDivisionError",
            "the callback's own error",
        )
        assert all(names_late(outcomes[rank], 1) for rank in (0, 2, 3))
        assert all(o.seconds < 10 for o in outcomes)

        again = case.each("run", [(batch,) for batch in batch_of])
        assert all(o.error == "RuntimeError" and "reset()" in o.message for o in again)

        case.all("call", "reset")
        for seed in range(2):
            fresh = full_batches(seed)
            for batch, y in zip(fresh, case.run(fresh)[0], strict=True):
                assert_right(SHAPE, batch, y)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_reset_after_an_expired_wait(pool, protocol):
    batch_of = full_batches()
    with ranks(pool, protocol, SHAPE, wait_bound_s=BOUND, initial_epoch=2**32 - 2) as case:
        case.run(batch_of)
        for rank in (0, 1, 3):
            case.start(rank, "run", batch_of[rank])
        assert all(names_late(case.finish(rank), 2) for rank in (0, 1, 3))
        case.all("call", "reset")
        for batch_set in [batch_of, full_batches(2), full_batches(3)]:
            for batch, y in zip(batch_set, case.run(batch_set)[0], strict=True):
                assert_right(SHAPE, batch, y)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_slow_gemm_is_its_own_ranks_fault(pool, protocol):
    batch_of = full_batches()
    with ranks(pool, protocol, SHAPE, wait_bound_s=BOUND) as case:
        case.start(3, "sleep_in_gemm", 3 * BOUND)
        case.finish(3)
        outcomes = case.each("run", [(batch,) for batch in batch_of])
        assert all(names_late(outcomes[rank], 3) for rank in range(3))
        if protocol == "mok":  # its other roles notice; the push baseline has only one
            assert names_late(outcomes[3], 3)


def test_a_late_rank_within_the_bound_is_waited_for(pool):
    batch_of = full_batches()
    with ranks(pool, "mok", SHAPE, wait_bound_s=5.0) as case:
        for rank in range(3):
            case.start(rank, "run", batch_of[rank])
        time.sleep(0.3)
        case.start(3, "run", batch_of[3])
        for rank in range(4):
            outcome = case.finish(rank)
            assert outcome.message == ""
            assert_right(SHAPE, batch_of[rank], outcome.value[0])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_ranks_of_different_configs_are_told(pool, protocol):
    with ranks(pool, protocol, SHAPE, wait_bound_s=BOUND) as case:
        other = {**SHAPE, "intermediate": 24}
        options = {"wait_bound_s": BOUND}
        case.start(2, "build", protocol, case.name, other, 2, options)
        assert case.finish(2).message == ""
        outcomes = case.each("run", [(batch,) for batch in full_batches()])
        assert "another TwinConfig" in outcomes[1].message
        assert all(o.error for o in outcomes)


def test_signal_rank_names_the_missing_rank(pool):
    with ranks(pool, "signal", SHAPE, wait_bound_s=BOUND) as case:
        for rank in (0, 2, 3):
            case.start(rank, "call", "align")
        assert all(names_late(case.finish(rank), 1) for rank in (0, 2, 3))
        case.all("call", "reset")
        assert all(o.message == "" for o in case.all("call", "align"))
