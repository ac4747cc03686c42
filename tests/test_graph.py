"""A pass that one rank cannot capture has no graph on any, and nobody replays it alone."""

import threading

import pytest
import torch

from mokbench.errors import MokbenchError
from mokbench.fabric.group import PeerLostError
from mokbench.measure.graph import captured

REFUSED = "the pass cannot be captured in a CUDA graph: it syncs"


class Group:
    """Two ranks as threads; gathers fail, as gloo's do, when one does not come."""

    def __init__(self):
        self._barrier = threading.Barrier(2, timeout=5)
        self._values = {}

    def rank(self, rank):
        def gather(value):
            self._values[rank] = value
            self._barrier.wait()
            found = [self._values[0], self._values[1]]
            self._barrier.wait()
            return found

        return type("Rank", (), {"gather": staticmethod(gather)})()


class Timer:
    def __init__(self, make):
        self.graphed = make


def on_two_ranks(*makers):
    """What ``captured`` gave on each rank, and how often each rank replayed its graph."""
    group, answers, replays = Group(), [None, None], [0, 0]

    def run(rank):
        def counted(step):
            graph = makers[rank](step)

            def replay():
                replays[rank] += 1
                return graph()

            return replay

        answers[rank] = captured(
            group.rank(rank), Timer(counted), lambda: torch.ones(3), lambda: None
        )

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers, replays


def right(step):
    return step


def wrong(step):
    return lambda: step() + 1


def refuse(step):
    raise MokbenchError(REFUSED)


def test_both_capture():
    answers, replays = on_two_ranks(right, right)
    assert [problem for _, problem in answers] == [None, None]
    assert all(graph is not None for graph, _ in answers)
    assert replays == [1, 1]


@pytest.mark.parametrize("makers", [(right, refuse), (refuse, right), (refuse, refuse)])
def test_one_that_cannot_capture_keeps_the_other_from_replaying(makers):
    answers, replays = on_two_ranks(*makers)
    assert answers == [(None, REFUSED)] * 2
    assert replays == [0, 0]


def test_other_bits_on_one_rank_are_both_ranks_problem():
    answers, _ = on_two_ranks(right, wrong)
    assert [graph for graph, _ in answers] == [None, None]
    assert all("other bits" in problem for _, problem in answers)


def test_a_lost_peer_is_no_reason_against_graphs():
    def lost(step):
        raise PeerLostError("gone")

    group = type("Alone", (), {"gather": staticmethod(lambda value: [value])})()
    with pytest.raises(PeerLostError):
        captured(group, Timer(lost), lambda: torch.ones(3), lambda: None)
