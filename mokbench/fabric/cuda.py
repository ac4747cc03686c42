"""The cuda fabric: one process per rank, peers' memory through torch symmetric memory.

With fewer GPUs than ranks, ranks share a GPU under CUDA MPS, and every kernel's grid is limited to
its share of the SMs: a kernel that took them all would starve a peer that spins on another one.
NVLink multicast is never used.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from mokbench.fabric.fault import RECORD_BYTES, FaultError, parse
from mokbench.fabric.group import RankGroup

# Set for every worker before torch is imported: a program that uses multicast can put the GPUs of
# a shared host out of service, and one GPU for several ranks has to be allowed explicitly.
WORKER_ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}

# On top of it where ranks share a GPU, for systems over NCCL (2.30 or newer).
SHARED_GPU_ENVIRONMENT = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_CUMEM_ENABLE": "1",
}


@dataclass(frozen=True)
class SymmetricBuffer:
    """Memory of the same size on every rank: ``own`` is this rank's, ``pointers`` all ranks'."""

    own: Tensor
    pointers: tuple[int, ...]

    def fault(self) -> FaultError | None:
        """The fault that this rank's kernels recorded at the buffer's head; synchronizes."""
        record = parse(bytes(self.own[:RECORD_BYTES].cpu().numpy().tobytes()))
        return FaultError(record) if record else None


class CudaFabric(RankGroup):
    """One rank's view of the fabric. Every method but ``close`` is collective.

    ``num_sms`` is what a kernel of this rank may use: its GPU's SMs over the ranks that share it.
    """

    name: ClassVar[str] = "cuda"

    def __init__(self, rank: int, ranks: int, store: dist.Store, wait_bound_s: float) -> None:
        super().__init__(rank, ranks, store, wait_bound_s)
        num_gpus = torch.cuda.device_count()
        self.ranks_per_gpu = -(-ranks // num_gpus)
        self.device = torch.device("cuda", rank // self.ranks_per_gpu)
        torch.cuda.set_device(self.device)
        properties = torch.cuda.get_device_properties(self.device)
        self.num_sms = properties.multi_processor_count // self.ranks_per_gpu
        major, minor = properties.major, properties.minor
        # wgmma and setmaxnreg exist only in the architecture-specific targets.
        self.arch = f"sm_{major}{minor}" + ("a" if major >= 9 else "")

    def allocate(self, num_bytes: int) -> SymmetricBuffer:
        """Zeroed memory of ``num_bytes`` that all ranks can reach."""
        own = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=self.device)
        group = dist.group.WORLD
        assert group is not None
        handle = symmetric_memory.rendezvous(own, group)
        # The handle's pointers are those of the allocation, which may hold more than this tensor.
        offset = own.data_ptr() - handle.buffer_ptrs[self.rank]
        pointers = tuple(int(pointer) + offset for pointer in handle.buffer_ptrs)
        own.zero_()
        torch.cuda.synchronize()
        self.barrier()
        return SymmetricBuffer(own, pointers)
