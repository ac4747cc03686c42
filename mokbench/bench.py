"""A rank's fabric with the measuring tools that belong to it: the host's, or the GPU's."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from mokbench.fabric.group import RankGroup
from mokbench.fabric.host import HostFabric
from mokbench.measure.link_counters import LinkCounters
from mokbench.measure.nvml_gpu import NvmlGpu
from mokbench.measure.physical import PhysicalBytes, gpu_uuid, physical_bytes
from mokbench.measure.timing import HostTimer, Step, Timer

# Dense FLOP a cycle of one SM's tensor cores, FP32 sums: NVIDIA states 989 TFLOP/s for 132 SMs at
# 1830 MHz.
_MMA_FLOPS = {"sm_90a": {"bf16": 4096}}


class Peak(Protocol):
    """Bytes by which a rank's memory rose above its level at construction."""

    def rise_bytes(self) -> int | None:
        """None where it cannot be read."""


class Reference(Protocol):
    """What every turn also measures, to divide by."""

    flops: int

    def run(self) -> object:
        """One repetition on this rank."""


@dataclass(frozen=True)
class Sharing:
    """The GPUs and how ranks share them, for the rows; nothing on the host fabric."""

    ranks_per_gpu: int | None = None
    num_sms: int | None = None
    # FLOP a cycle of all SMs of one GPU, by the workload's dtype, where it is known.
    mma_flops_per_cycle: Mapping[str, int] = field(default_factory=dict)


class Bench(Protocol):
    """One rank's place to measure: ``fabric`` reaches the others, ``timer`` times passes."""

    device: str
    sharing: Sharing

    @property
    def fabric(self) -> RankGroup:
        """The ranks' group and its memory."""

    @property
    def timer(self) -> Timer:
        """How passes are timed here."""

    def peak_memory(self) -> Peak:
        """Start watching this rank's memory."""

    def reference(self, dtype: torch.dtype) -> Reference | None:
        """The matmul that rows of ``dtype`` are held against; None where there is none."""

    def rates(self) -> dict[str, Any] | None:
        """Denominators measured once, and the self-tests; collective. None where there are none."""

    def physical(self, step: Step, step_us: float) -> PhysicalBytes | None:
        """What the links counted per pass; collective. None where ranks have no link to count."""

    def synchronize(self) -> None:
        """Wait until all that this rank queued has run."""


class _UnknownPeak:
    def rise_bytes(self) -> None:
        return None


class HostBench:
    """The host fabric: CPU tensors, the monotonic clock, no peak to hold anything against."""

    device = "cpu"

    def __init__(self, fabric: HostFabric) -> None:
        self.fabric = fabric
        self.timer = HostTimer(fabric)
        self.sharing = Sharing()

    def peak_memory(self) -> Peak:
        """Not known: a worker's heap keeps what earlier rows made it take, see docs/metrics.md."""
        return _UnknownPeak()

    def reference(self, dtype: torch.dtype) -> None:
        """The twin is a protocol check: no row is held against a peak."""

    def rates(self) -> None:
        """See reference."""

    def physical(self, step: Step, step_us: float) -> None:
        """Shared memory has no link counters."""

    def synchronize(self) -> None:
        """The host's passes return when they are done."""


class CudaBench:
    """The cuda fabric: tensors on the rank's GPU, CUDA events, cuBLAS in turn."""

    def __init__(self, fabric: Any) -> None:
        from mokbench.fabric.overlap import require_overlap
        from mokbench.measure.gpu_timing import GpuTimer

        self.fabric = fabric
        # A wait among ranks that take turns would never end, so this comes before any other.
        self._overlap_s = require_overlap(fabric) if fabric.ranks_per_gpu > 1 else None
        self.timer = GpuTimer(fabric)
        self.device = str(fabric.device)
        self.sharing = Sharing(fabric.ranks_per_gpu, fabric.num_sms, _mma_flops(fabric))
        self._references: dict[torch.dtype, Reference] = {}
        self._counters: LinkCounters | None = None

    def peak_memory(self) -> Peak:
        """See Bench."""
        from mokbench.measure.gpu_memory import GpuPeakMemory

        return GpuPeakMemory(self.fabric)

    def reference(self, dtype: torch.dtype) -> Reference:
        """See Bench."""
        from mokbench.measure.denominators import MatmulPeak

        if dtype not in self._references:
            self._references[dtype] = MatmulPeak(self.fabric, dtype)
        return self._references[dtype]

    def rates(self) -> dict[str, Any]:
        """See Bench; overlap_ms is how long the kernels of a shared GPU ran at the same time."""
        from mokbench.measure.denominators import device_rates

        return {
            **device_rates(self.fabric, self.timer).to_dict(),
            "overlap_ms": None if self._overlap_s is None else self._overlap_s * 1e3,
            "ranks_per_gpu": self.sharing.ranks_per_gpu,
        }

    def physical(self, step: Step, step_us: float) -> PhysicalBytes | None:
        """See Bench."""
        if self.fabric.ranks == 1 or self.fabric.ranks_per_gpu > 1 or not self.fabric.maps_peers:
            return None
        if self._counters is None:
            self._counters = LinkCounters(NvmlGpu(gpu_uuid(self.fabric.device)))
        return physical_bytes(self.fabric, self.timer, self._counters, step, step_us)

    def synchronize(self) -> None:
        """See Bench."""
        torch.cuda.synchronize()


def _mma_flops(fabric: Any) -> dict[str, int]:
    count = torch.cuda.get_device_properties(fabric.device).multi_processor_count
    return {dtype: count * flops for dtype, flops in _MMA_FLOPS.get(fabric.arch, {}).items()}


def open_bench(
    fabric: str,
    rank: int,
    ranks: int,
    store: torch.distributed.Store,
    wait_bound_s: float,
    shm_token: str,
) -> Bench:
    """Join the other ranks; collective. Raises MokbenchError where this fabric cannot be."""
    if fabric == "host":
        return HostBench(HostFabric(rank, ranks, store, shm_token, wait_bound_s))
    from mokbench.fabric.cuda import CudaFabric

    return CudaBench(CudaFabric(rank, ranks, store, wait_bound_s))
