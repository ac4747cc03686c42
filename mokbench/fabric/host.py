"""The host fabric: ranks are processes of one machine, peers' memory is POSIX shared memory.

A gloo group carries the small talk (statuses, samples, decisions); the twin's shared segments
carry the protocols under test. Nothing here is timed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from mokbench import twin
from mokbench.errors import MokbenchError
from mokbench.fabric.segments import SHM_PREFIX

if TYPE_CHECKING:
    from mokbench._twin import SharedMemory, SignalRank, TwinConfig


class PeerLostError(MokbenchError):
    """A collective failed because a peer died or does not answer; this rank is not at fault."""


@contextmanager
def _peers_expected() -> Iterator[None]:
    """gloo reports a lost or silent peer as a RuntimeError without saying which one."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(f"a collective among the ranks failed: {error}") from error


class HostFabric:
    """One rank's view of the fabric. Every method but ``close`` is collective.

    ``shm_token`` is unique to these workers: it names their segments, so that what a killed run
    leaves can be found and removed. ``wait_bound_s`` bounds every wait of every protocol.
    """

    name: ClassVar[str] = "host"
    link: ClassVar[str] = "shm"

    def __init__(
        self, rank: int, ranks: int, store: dist.Store, shm_token: str, wait_bound_s: float
    ) -> None:
        self.rank, self.ranks, self.wait_bound_s = rank, ranks, wait_bound_s
        self._shm_token = shm_token
        self._num_segments = 0
        # Collectives of a healthy run end well within this; a peer that sleeps must not hold us.
        timeout = timedelta(seconds=max(10.0, 2 * wait_bound_s))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
        smallest = twin.TwinConfig(
            num_ranks=ranks,
            num_experts=ranks,
            top_k=1,
            max_tokens=1,
            hidden=64,
            intermediate=64,
            element_bytes=4,
        )
        self._signal_memory = self._shared("signal", smallest)
        self._signal = twin.SignalRank(self._signal_memory, ranks, rank, wait_bound_s)

    @property
    def signal(self) -> "SignalRank":
        """Alignment and signaling rounds over all ranks."""
        return self._signal

    def align(self) -> None:
        """Ranks leave at one agreed time; bounded."""
        self._signal.align()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, by rank, on every rank."""
        values: list[Any] = [None] * self.ranks
        with _peers_expected():
            dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """All ranks are here; slow, for set-up only (``align`` is the one for timing)."""
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

    def allocate(self, protocol: str, config: "TwinConfig") -> "SharedMemory":
        """A zeroed segment that all ranks map; its name is gone again when this returns.

        Raises MokbenchError on every rank when one cannot map it.
        """
        return self._shared(protocol, config)

    def _shared(self, protocol: str, config: "TwinConfig") -> "SharedMemory":
        size = self.ranks * twin.segment_bytes(protocol, config)
        name = f"/{SHM_PREFIX}{self._shm_token}-{self._num_segments}"
        self._num_segments += 1
        created = self._together(
            lambda: twin.SharedMemory(name, size, create=True) if self.rank == 0 else None
        )
        try:
            attached = self._together(
                lambda: created or twin.SharedMemory(name, size, create=False)
            )
        finally:
            # Unlinked as soon as all have it mapped: a SIGKILL then leaves nothing behind.
            if created is not None:
                created.unlink()
        assert attached is not None
        return attached

    def _together(self, act: Callable[[], "SharedMemory | None"]) -> "SharedMemory | None":
        """``act`` on every rank; an OSError of one is raised on all, so that none waits for it."""
        result, problem = None, None
        try:
            result = act()
        except OSError as error:
            problem = str(error)
        problems = [f"rank {r}: {p}" for r, p in enumerate(self.gather(problem)) if p]
        if problems:
            raise MokbenchError("; ".join(problems))
        return result

    def close(self) -> None:
        """Unmap and leave the group."""
        self._signal_memory.close()
        dist.destroy_process_group()
