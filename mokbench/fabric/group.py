"""The small talk among ranks over gloo: statuses, samples, decisions. Nothing of it is timed."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mokbench.blame import collective_bound_s
from mokbench.errors import MokbenchError


class PeerLostError(MokbenchError):
    """A collective failed because a peer died or does not answer; this rank is not at fault."""


@contextmanager
def _peers_expected() -> Iterator[None]:
    """Turn gloo's RuntimeError for a lost or silent peer, which names nobody, into our own."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(f"a collective among the ranks failed: {error}") from error


class RankGroup:
    """All ranks of these workers; every method but ``close`` is collective.

    ``wait_bound_s`` bounds every wait of every protocol that runs among them.
    """

    # Ranks of one GPU; the host fabric's have none to share.
    ranks_per_gpu = 1

    def __init__(self, rank: int, ranks: int, store: dist.Store, wait_bound_s: float) -> None:
        self.rank, self.ranks, self.wait_bound_s = rank, ranks, wait_bound_s
        timeout = timedelta(seconds=collective_bound_s(wait_bound_s))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)

    @property
    def signal(self) -> Any:
        """Signaling rounds: hop, local_hop, entry and ready; see measure/signaling.py."""
        raise NotImplementedError

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, by rank, on every rank."""
        values: list[Any] = [None] * self.ranks
        with _peers_expected():
            dist.all_gather_object(values, value)
        return values

    def problems(self, problem: str | None) -> str:
        """Every rank's problem behind its rank, on every rank; empty where none has one."""
        return "; ".join(f"rank {r}: {text}" for r, text in enumerate(self.gather(problem)) if text)

    def barrier(self) -> None:
        """All ranks are here; slow, for set-up only: a fabric's ``align`` is for timing."""
        self.gather(None)

    def gather_samples(self, samples: Tensor) -> Tensor:
        """Same-shaped tensors of all ranks, stacked by rank."""
        parts = [torch.empty_like(samples) for _ in range(self.ranks)]
        with _peers_expected():
            dist.all_gather(parts, samples)
        return torch.stack(parts)

    def all_to_all(self, out: Tensor, rows: Tensor, recv: list[int], send: list[int]) -> None:
        """all_to_all_single: the next ``send[r]`` entries of ``rows`` go to rank r."""
        with _peers_expected():
            dist.all_to_all_single(out, rows, recv, send)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()
