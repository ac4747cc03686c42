"""A pass as a CUDA graph: captured on every rank or on none, and held against the eager pass."""

from collections.abc import Callable

import torch
from torch import Tensor

from mokbench.errors import MokbenchError
from mokbench.fabric.group import PeerLostError, RankGroup
from mokbench.measure.timing import Step, Timer


def captured(
    group: RankGroup, timer: Timer, step: Callable[[], Tensor], settle: Callable[[], None]
) -> tuple[Step | None, str | None]:
    """The captured pass, or why there is none: its replay must give the eager pass's bits.

    Collective; the same on all ranks. ``settle`` waits for a pass and raises what it recorded.
    """
    expected = step().clone()
    graphed, problem = None, None
    try:
        graphed = timer.graphed(step)
    except PeerLostError:
        raise
    except MokbenchError as error:
        problem = str(error)
    # A replay among ranks of which one has none would wait for that one in vain.
    problem = _first(group, problem)
    if problem or graphed is None:
        return None, problem
    output = graphed()
    settle()
    assert isinstance(output, Tensor)
    if not torch.equal(output, expected):
        problem = "a replay of the CUDA graph gave other bits than the pass it was made of"
    problem = _first(group, problem)
    return (None, problem) if problem else (graphed, None)


def _first(group: RankGroup, problem: str | None) -> str | None:
    """The first rank's that has one."""
    return next(filter(None, group.gather(problem)), None)
