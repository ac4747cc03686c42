"""One rank on a GPU, no exchange: the layer as one torch.compile'd function around grouped GEMMs.

Gather into expert order, gate and up, SwiGLU, down, weighted sum per token. Routes are sorted on
the device, so the CPU never waits and a CUDA graph can hold the pass.
"""

from typing import TYPE_CHECKING, ClassVar

from mokbench.errors import UnsupportedError
from mokbench.systems import Setup, expect_options, options_of
from mokbench.systems.gpu_support import DEFAULT_BLOCK_M, grouped_mm_reason
from mokbench.systems.options import LocalOptions
from mokbench.workload import Cell

if TYPE_CHECKING:
    from torch import Tensor

# torch._grouped_mm has its fast kernels for these; elsewhere it loops over experts on the CPU.
_CAPABILITIES = (9, 10)


class Local:
    """The layer on one rank that holds all experts."""

    name: ClassVar[str] = "local"
    deterministic: ClassVar[bool] = True
    traffic: ClassVar[str | None] = None
    signal: ClassVar[str | None] = None

    @staticmethod
    def supports(cell: Cell) -> str | None:
        """One rank, shapes that grouped GEMMs take, and a compiler where it is asked for."""
        options = expect_options(options_of(cell), LocalOptions)
        if cell.workload.ranks != 1:
            return f"local has no exchange and runs with ranks: 1 only, not {cell.workload.ranks}"
        return tile_reason(options.block_m) or grouped_mm_reason(cell, options.compile)

    @staticmethod
    def workspace_bytes(cell: Cell) -> int:
        """Per route: input and output rows, gate and up, hidden, sort keys; and y."""
        work = cell.workload
        return layer_bytes(work.tokens_per_rank, work.model.top_k, cell)

    def prepare(self, setup: Setup) -> None:
        """Weights only; the first pass compiles."""
        from mokbench.systems.grouped_experts import as_written, compiled, expert_layer

        require_fast_kernels()
        options = expect_options(setup.options, LocalOptions)
        self._weights = setup.w13, setup.w2
        self._layer = (compiled if options.compile else as_written)(expert_layer)

    def run(self, x: "Tensor", topk_idx: "Tensor", topk_weights: "Tensor") -> "Tensor":
        """See System.run."""
        import torch

        if x.shape[0] == 0:
            return torch.empty_like(x)
        return self._layer(x, topk_idx, topk_weights, *self._weights, 0, topk_idx.numel())

    def close(self) -> None:
        """Nothing is held outside torch; compiled code serves the next row of this shape."""


def tile_reason(block_m: int) -> str | None:
    """A variant's label must not name a tile height that nothing uses."""
    if block_m == DEFAULT_BLOCK_M:
        return None
    return "torch._grouped_mm picks its own tiles on the cuda fabric; leave block_m out there"


def layer_bytes(rows: int, routes_per_row: int, cell: Cell) -> int:
    """What ``expert_layer`` allocates for ``rows`` of x with that many routes each."""
    model = cell.workload.model
    by_route = (2 * model.hidden + 3 * model.intermediate) * cell.workload.dtype.num_bytes + 3 * 8
    return rows * (routes_per_row * by_route + model.hidden * cell.workload.dtype.num_bytes)


def require_fast_kernels() -> None:
    """UnsupportedError on a GPU where torch._grouped_mm would go through the CPU."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    if major not in _CAPABILITIES:
        raise UnsupportedError(
            f"torch._grouped_mm has no grouped kernel for sm_{major}{minor}; use sm_90 or sm_100"
        )
