"""The self-test of a shared GPU sees kernels that run together, and kernels that cannot."""

import pytest
from cuda_ranks import run_ranks

from mokbench.fabric.overlap import overlap_s, require_overlap


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_with_their_share_of_the_sms_run_together(ranks):
    answers = run_ranks(ranks, require_overlap)
    assert all(isinstance(answer, float) for answer in answers), answers
    print(f"ranks {ranks}: all kernels together for {min(answers) * 1e3:.1f} ms of 50")
    assert min(answers) >= 0.04


def probe_all_sms(fabric):
    return overlap_s(fabric, fabric.num_sms * fabric.ranks_per_gpu)


def test_ranks_that_take_every_sm_are_seen_to_take_turns():
    answers = run_ranks(2, probe_all_sms)
    assert all(isinstance(answer, float) for answer in answers), answers
    assert max(answers) < 0
