"""Signaling on the GPU: plausible times, right payloads, and a fault that names the late rank."""

from statistics import median

import pytest
from cuda_ranks import run_ranks

from mokbench.fabric.cuda_signal import CudaSignal
from mokbench.fabric.fault import FaultError
from mokbench.measure.signaling import signal_samples


def measure(fabric):
    fabric.signal = CudaSignal(fabric)
    return signal_samples(fabric)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_quantity_has_plausible_rounds(ranks):
    answers = run_ranks(ranks, measure)
    assert all(isinstance(answer, list) for answer in answers), answers
    for point in answers[0]:
        for name, rounds in point["samples"].items():
            assert len(rounds) >= 20, name
            print(f"ranks {point['ranks']} {name}: median {median(rounds):.3f} us")
            # Nothing travels faster than an L2 hit, and a round that waits for a millisecond means
            # that the ranks' kernels did not run at the same time.
            assert 0.0 <= median(rounds) < 1000, name
            if "after_arrival" not in name:
                assert median(rounds) > 0.2, name


def lose_rank_one(fabric):
    signal = CudaSignal(fabric)
    if fabric.rank == 1:
        signal._buffer.own.zero_()
        fabric.barrier()
        return "absent"
    try:
        signal.entry(5, fabric.ranks)
    except FaultError as error:
        return error.record
    return "no fault"


def test_a_rank_that_never_arrives_is_named_by_the_others():
    answers = run_ranks(4, lose_rank_one, wait_bound_s=1.0)
    assert answers[1] == "absent"
    for rank in (0, 2, 3):
        record = answers[rank]
        assert isinstance(record, dict), record
        assert record["rank"] == rank
        assert record["late_rank"] == 1
        assert 0.9 < record["waited_s"] < 5
