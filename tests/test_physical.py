"""Bytes per step from link counters of several ranks, with replayed readings."""

import pytest

from mokbench.measure.link_counters import Count, LinkBytes
from mokbench.measure.physical import PhysicalBytes, physical_bytes


class Ranks:
    """A group whose other ranks answer what they are given."""

    def __init__(self, others):
        self.others = others
        self.log = []

    def barrier(self):
        self.log.append("barrier")

    def gather(self, value):
        return [value, *self.others]


class Chain:
    def __init__(self, log):
        self.log = log

    def steady(self, step, iterations):
        self.log.append(iterations)


class Counters:
    def __init__(self, log, payload, raw):
        self.log = log
        self.found = LinkBytes("replayed", 1.0, payload, payload, raw, raw)

    def read(self):
        self.log.append("read")
        return "before"

    def since(self, before):
        assert before == "before"
        self.log.append("read")
        return self.found


def measure(payload, raw, others, step_us=250.0):
    ranks = Ranks(others)
    found = physical_bytes(
        ranks, Chain(ranks.log), Counters(ranks.log, payload, raw), lambda: None, step_us
    )
    return found, ranks.log


def test_bytes_of_a_step_are_all_ranks_sent_bytes_over_the_passes():
    found, log = measure(Count(4000 * 1024), Count(5000 * 1024), [[(8000 * 1024, None)] * 2])
    assert log == ["barrier", "read", "barrier", 4000, "barrier", "read"]
    assert found == PhysicalBytes(3 * 1024, 3328, None)


@pytest.mark.parametrize("step_us, passes", [(1e6, 1), (999_999.0, 2), (3e6, 1)])
def test_the_chain_lasts_a_second(step_us, passes):
    assert measure(Count(0), Count(0), [], step_us)[1][3] == passes


def test_one_rank_that_cannot_read_leaves_null_with_its_reason():
    others = [[(None, "unavailable: NotSupported"), (None, "unavailable: NotSupported")]]
    found, _ = measure(Count(10), Count(10), others)
    assert found == PhysicalBytes(None, None, "physical_bytes: rank 1: unavailable: NotSupported")


def test_payload_may_be_unknown_where_raw_is_known():
    unknown = Count.unavailable("these fields do not tell payload from protocol")
    found, _ = measure(unknown, Count(4000), [], step_us=1e6)
    assert found.payload_bytes is None
    assert found.raw_bytes == 4000
    assert "payload from protocol" in found.note
