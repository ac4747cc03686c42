"""The cuda fabric: one process per rank, peers' memory through torch symmetric memory.

With fewer GPUs than ranks, ranks share a GPU under CUDA MPS, and every kernel's grid is limited to
its share of the SMs: a kernel that took them all would starve a peer that spins on another one.
NVLink multicast is never used.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from mokbench.errors import UnsupportedError
from mokbench.fabric.fault import RECORD_BYTES, FaultError, parse
from mokbench.fabric.group import RankGroup
from mokbench.gpus import arch_of, ranks_a_gpu
from mokbench.topology import together

if TYPE_CHECKING:
    from mokbench.fabric.cuda_signal import CudaSignal

# kMaxRanks of protocol.h: kernels take that many segment pointers.
MAX_RANKS = 128


@dataclass(frozen=True)
class SymmetricBuffer:
    """Memory of the same size on every rank: ``own`` is this rank's, ``pointers`` all ranks'."""

    own: Tensor
    pointers: tuple[int, ...]
    handle: Any

    def of(self, rank: int) -> Tensor:
        """Another rank's memory as a tensor on this rank's GPU, uint8 [num_bytes]."""
        offset = self.pointers[rank] - int(self.handle.buffer_ptrs[rank])
        found: Tensor = self.handle.get_buffer(rank, self.own.shape, torch.uint8, offset)
        return found

    def fault(self) -> FaultError | None:
        """The fault that this rank's kernels recorded at the buffer's head; synchronizes."""
        record = parse(bytes(self.own[:RECORD_BYTES].cpu().numpy().tobytes()))
        return FaultError(record) if record else None


class CudaFabric(RankGroup):
    """One rank's view of the fabric. Every method but ``close`` is collective.

    ``num_sms`` is what a kernel of this rank may use: its GPU's SMs over the ranks that share it.
    ``allocated_bytes`` counts symmetric memory that this rank holds or held. ``maps_peers``:
    ranks reach one another's memory; where they do not, ``allocate`` cannot be used.
    """

    name: ClassVar[str] = "cuda"

    def __init__(self, rank: int, ranks: int, store: dist.Store, wait_bound_s: float) -> None:
        super().__init__(rank, ranks, store, wait_bound_s)
        num_gpus = torch.cuda.device_count()
        if num_gpus == 0:
            raise UnsupportedError("fabric: cuda needs a GPU; torch sees none here")
        self.topology = together("cuda", rank, self.gather)
        self.maps_peers = self.topology.nodes == 1 or self.topology.is_mnnvl
        local_rank, local_ranks = self.topology.local(rank)
        self.ranks_per_gpu = ranks_a_gpu(local_ranks, num_gpus)
        self.allocated_bytes = 0
        self._signal: CudaSignal | None = None
        self.device = torch.device("cuda", local_rank // self.ranks_per_gpu)
        torch.cuda.set_device(self.device)
        properties = torch.cuda.get_device_properties(self.device)
        self.num_sms = properties.multi_processor_count // self.ranks_per_gpu
        self.arch = arch_of((properties.major, properties.minor))

    def allocate(self, num_bytes: int) -> SymmetricBuffer:
        """Zeroed memory of ``num_bytes`` that all ranks can reach.

        Between nodes of an MNNVL domain torch passes fabric handles, within a node descriptors.
        """
        own = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=self.device)
        group = dist.group.WORLD
        assert group is not None
        handle = symmetric_memory.rendezvous(own, group)
        # The handle's pointers are those of the allocation, which may hold more than this tensor.
        offset = own.data_ptr() - handle.buffer_ptrs[self.rank]
        pointers = tuple(int(pointer) + offset for pointer in handle.buffer_ptrs)
        self.allocated_bytes += num_bytes
        own.zero_()
        torch.cuda.synchronize()
        self.barrier()
        return SymmetricBuffer(own, pointers, handle)

    def allocate_alone(self, num_bytes: int) -> SymmetricBuffer:
        """Zeroed memory of this rank that no other reaches; not collective."""
        own = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        return SymmetricBuffer(own, (own.data_ptr(),), None)

    @cached_property
    def nccl_group(self) -> "dist.ProcessGroup":
        """An NCCL group of these ranks, connected once and kept until ``close``.

        For libraries that hold on to the communicator of a group for good.
        """
        from mokbench.fabric.nccl import connect

        return connect(self)

    @property
    def signal(self) -> "CudaSignal":
        """Signaling rounds among all ranks, set up by the first question."""
        from mokbench.fabric.cuda_signal import CudaSignal

        if self._signal is None:
            self._signal = CudaSignal(self)
        return self._signal
