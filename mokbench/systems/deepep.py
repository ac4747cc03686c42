"""DeepEP (ElasticBuffer, legacy Buffer); its adapter needs the cuda fabric, so it only refuses."""

from typing import TYPE_CHECKING, ClassVar

from mokbench.errors import UnsupportedError
from mokbench.systems import Setup
from mokbench.workload import Cell

if TYPE_CHECKING:
    from torch import Tensor

_NEEDS_GPU = (
    "DeepEP moves tokens between NVIDIA GPUs; the host fabric has none. "
    "Use mok, push or alltoall here, or a machine with Hopper GPUs and deep_ep installed"
)


class Deepep:
    """DeepEP dispatch and combine around grouped GEMMs."""

    name: ClassVar[str] = "deepep"
    deterministic: ClassVar[bool] = False
    traffic: ClassVar[str | None] = "per_rank"
    signal: ClassVar[str | None] = None
    host_link: ClassVar[str] = "none"

    @staticmethod
    def supports(cell: Cell) -> str | None:
        """Never on the host fabric."""
        if cell.fabric == "host":
            return _NEEDS_GPU
        return "mokbench has no cuda fabric yet, which its DeepEP adapter needs"

    @staticmethod
    def num_threads(cell: Cell) -> int:
        """The caller, which launches kernels."""
        return 1

    @staticmethod
    def workspace_bytes(cell: Cell) -> int:
        """Nothing is allocated where nothing runs."""
        return 0

    def prepare(self, setup: Setup) -> None:
        """Unreachable while ``supports`` refuses every cell."""
        raise UnsupportedError(_NEEDS_GPU)

    def run(self, x: "Tensor", topk_idx: "Tensor", topk_weights: "Tensor") -> "Tensor":
        """Unreachable while ``supports`` refuses every cell."""
        raise UnsupportedError(_NEEDS_GPU)

    def close(self) -> None:
        """Nothing to free."""
