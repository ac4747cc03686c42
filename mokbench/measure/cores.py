"""Cores of one's own for the ranks of a signaling round, where there are enough."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def own_cores(rank: int, ranks: int) -> Iterator[None]:
    """Keep this thread, and those it starts, on its share of the cores while inside.

    Two ranks that the scheduler left on one core hand it to one another for every flag, which
    takes 40 times as long as the flag. With fewer cores than ranks nothing is changed.
    """
    allowed = allowed_cores()
    share = len(allowed) // ranks
    if share == 0 or rank >= ranks:
        yield
        return
    os.sched_setaffinity(0, allowed[rank * share : (rank + 1) * share])
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def allowed_cores() -> list[int]:
    """Cores this thread may run on; empty where the system does not tell (not Linux)."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    return sorted(os.sched_getaffinity(0))
