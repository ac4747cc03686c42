"""The host fabric: ranks are processes of one machine, peers' memory is POSIX shared memory.

The twin's shared segments carry the protocols under test.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import torch.distributed as dist

from mokbench import twin
from mokbench.errors import MokbenchError
from mokbench.fabric.group import RankGroup
from mokbench.fabric.segments import SHM_PREFIX

if TYPE_CHECKING:
    from mokbench._twin import SharedMemory, SignalRank, TwinConfig


class HostFabric(RankGroup):
    """One rank's view of the fabric. Every method but ``close`` is collective.

    ``shm_token`` is unique to these workers: it names their segments, so that what a killed run
    leaves can be found and removed.
    """

    name: ClassVar[str] = "host"
    link: ClassVar[str] = "shm"

    def __init__(
        self, rank: int, ranks: int, store: dist.Store, shm_token: str, wait_bound_s: float
    ) -> None:
        super().__init__(rank, ranks, store, wait_bound_s)
        self._shm_token = shm_token
        self._num_segments = 0
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
        # Construction sets the rank's own counters, which a peer's first round raises.
        self.barrier()

    @property
    def signal(self) -> "SignalRank":
        """Alignment and signaling rounds over all ranks."""
        return self._signal

    def align(self) -> None:
        """Ranks leave at one agreed time; bounded."""
        self._signal.align()

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
        if problems := self.problems(problem):
            raise MokbenchError(problems)
        return result

    def close(self) -> None:
        """Unmap and leave the group."""
        self._signal_memory.close()
        super().close()
