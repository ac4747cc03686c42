"""DeepEP on the host fabric, where it cannot be: it moves tokens between GPUs."""

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
    """Refuses every cell; the cuda fabric's is in cuda_deepep.py."""

    name: ClassVar[str] = "deepep"
    deterministic: ClassVar[bool] = False
    traffic: ClassVar[str | None] = "per_rank"
    signal: ClassVar[str | None] = None
    host_link: ClassVar[str] = "none"

    @staticmethod
    def supports(cell: Cell) -> str | None:
        """Never."""
        return _NEEDS_GPU

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
