"""Peak GPU memory of a system on one rank: torch's allocator and the symmetric buffers."""

import torch

from mokbench.fabric.cuda import CudaFabric


class GpuPeakMemory:
    """Bytes of GPU memory by which this rank rose above its level at construction, at its highest.

    What libraries take past torch's allocator (NCCL's buffers, loaded kernels) is not in it.
    """

    def __init__(self, fabric: CudaFabric) -> None:
        self._fabric = fabric
        torch.cuda.reset_peak_memory_stats(fabric.device)
        self._torch_bytes = torch.cuda.memory_allocated(fabric.device)
        self._symmetric_bytes = fabric.allocated_bytes

    def rise_bytes(self) -> int:
        """Rise since construction."""
        torch_rise = torch.cuda.max_memory_allocated(self._fabric.device) - self._torch_bytes
        return torch_rise + self._fabric.allocated_bytes - self._symmetric_bytes
