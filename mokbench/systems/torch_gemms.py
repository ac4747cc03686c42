"""torch's grouped GEMMs held to a share of the SMs, where ranks share a GPU.

One that takes all SMs starves a peer's kernel that waits for this rank.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mokbench.fabric.cuda import CudaFabric


class TorchGemmLimit:
    """In force from construction until ``lift``, where ranks share a GPU; else nothing."""

    def __init__(self, fabric: "CudaFabric") -> None:
        import torch

        self._is_set = fabric.ranks_per_gpu > 1
        if self._is_set:
            there = torch.cuda.get_device_properties(fabric.device).multi_processor_count
            torch._C._set_sm_carveout_experimental(there - fabric.num_sms)

    def lift(self) -> None:
        """All SMs again."""
        import torch

        if self._is_set:
            torch._C._set_sm_carveout_experimental(None)
            self._is_set = False
