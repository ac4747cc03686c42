"""SignalRank: alignment and signaling samples, between real processes."""

from itertools import pairwise

import pytest
from protocol_ranks import Pool, ranks

SHAPE = {
    "num_ranks": 3,
    "num_experts": 3,
    "top_k": 1,
    "max_tokens": 1,
    "hidden": 8,
    "intermediate": 8,
    "element_bytes": 4,
}


@pytest.fixture(scope="module")
def pool():
    made = Pool()
    yield made
    made.close()


def values(outcomes):
    assert [o.message for o in outcomes] == [""] * len(outcomes)
    return [o.value for o in outcomes]


def test_nobody_leaves_before_all_have_arrived(pool):
    with ranks(pool, "signal", SHAPE, max_delay_us=2000.0) as case:
        left = values(case.all("align_times", 20))
        for this, following in pairwise(zip(*left, strict=True)):
            # Having left round i + 1 means that all had left round i before.
            assert max(this) < min(following)


def test_counters_wrap(pool):
    with ranks(pool, "signal", SHAPE, initial_epoch=2**32 - 5) as case:
        values(case.all("align_times", 5))
        for method, arguments in [("entry", (8, 3)), ("ready", ("push", 8, 3))]:
            assert all(o.message == "" for o in case.all("call", method, *arguments))
        values(case.all("call", "local_hop", 12))
        values(case.all("call", "hop", 12))
        values(case.all("align_times", 1))


def test_hops_are_positive_and_only_of_the_first_rank(pool):
    with ranks(pool, "signal", SHAPE) as case:
        first, second, third = values(case.all("call", "hop", 50))
        assert (len(first), second, third) == (50, [], [])
        assert min(first) > 0
        assert all(len(v) == 50 and min(v) > 0 for v in values(case.all("call", "local_hop", 50)))


@pytest.mark.parametrize("group", [1, 2, 3])
def test_entry_among_the_first_ranks(pool, group):
    with ranks(pool, "signal", SHAPE) as case:
        samples = values(case.all("call", "entry", 30, group))
        assert [len(s) for s in samples] == [30 if rank < group else 0 for rank in range(3)]
        assert all(value > 0 for s in samples for value in s)
        # Ranks outside the group took no part; all meet again.
        values(case.all("align_times", 1))


@pytest.mark.parametrize("protocol", ["pull", "push"])
@pytest.mark.parametrize("group", [2, 3])
def test_ready_and_its_part_after_arrival(pool, protocol, group):
    with ranks(pool, "signal", SHAPE, max_delay_us=50.0) as case:
        for rank, (ready, after) in enumerate(
            values(case.all("call", "ready", protocol, 30, group))
        ):
            assert len(ready) == len(after) == (30 if rank < group else 0)
            assert all(part >= 0 for part in after)
            if protocol == "pull":  # the own local counter is raised after the aligned start
                assert all(part <= whole for part, whole in zip(after, ready, strict=True))


def test_groups_may_change_between_measurements(pool):
    with ranks(pool, "signal", SHAPE) as case:
        for group in (2, 3, 2, 1, 3):
            values(case.all("call", "ready", "push", 3, group))
            values(case.all("call", "ready", "pull", 3, group))
            values(case.all("call", "entry", 3, group))


def test_bad_arguments(pool):
    with ranks(pool, "signal", SHAPE) as case:
        for method, arguments, text in [
            ("entry", (1, 4), "ranks is 4; allowed are 1 to 3"),
            ("ready", ("both", 1, 2), "protocol is 'both'; allowed are pull and push"),
        ]:
            for outcome in case.all("call", method, *arguments):
                assert (outcome.error, outcome.message) == ("ValueError", text)
