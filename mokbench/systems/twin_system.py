"""What the systems of the host twin share: a segment, a rank built on it, and the matmul."""

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from mokbench import twin
from mokbench.systems import Setup, twin_only
from mokbench.workload import Cell, Workload

if TYPE_CHECKING:
    from torch import Tensor

    from mokbench._twin import MokRank, PushRank, SharedMemory, TwinConfig

Rank = TypeVar("Rank", bound="MokRank | PushRank")


class TwinSystem(Generic[Rank]):
    """A protocol of kernels/protocol.h between processes; ``name`` is the protocol's, too."""

    name: ClassVar[str]
    deterministic: ClassVar[bool] = True
    host_link: ClassVar[str] = "shm"

    def __init__(self) -> None:
        self._rank: Rank | None = None
        self._memory: SharedMemory | None = None

    @classmethod
    def supports(cls, cell: Cell) -> str | None:
        """Any host cell whose ranks share one host."""
        return twin_only(cell, cls.name)

    def _start(
        self,
        setup: Setup,
        config: "TwinConfig",
        make_rank: Callable[..., Rank],
        x_rows: int,
        hidden_rows: int,
        y_rows: int,
    ) -> None:
        """Map the segment and build the rank; its GEMMs work on buffers of so many rows."""
        import torch

        from mokbench.systems.expert_mlp import ExpertMlp

        model, dtype = setup.workload.model, setup.w13.dtype
        x = torch.empty(x_rows, model.hidden, dtype=dtype)
        hidden = torch.empty(hidden_rows, model.intermediate, dtype=dtype)
        y = torch.empty(y_rows, model.hidden, dtype=dtype)
        mlp = ExpertMlp(setup.w13, setup.w2, config.block_m)

        def gemm1(expert: int, x_row: int, hidden_row: int, rows: int) -> None:
            mlp.gemm1(expert, x[x_row : x_row + rows], hidden[hidden_row : hidden_row + rows])

        def gemm2(expert: int, hidden_row: int, y_row: int, rows: int) -> None:
            mlp.gemm2(expert, hidden[hidden_row : hidden_row + rows], y[y_row : y_row + rows])

        self._memory = setup.fabric.allocate(self.name, config)
        self._rank = make_rank(
            self._memory,
            config,
            setup.rank,
            gemm1,
            gemm2,
            x,
            hidden,
            y,
            wait_bound_s=setup.fabric.wait_bound_s,
        )
        # Construction sets the rank's own counters, which a peer's first pass raises.
        setup.fabric.barrier()
        self._y: Tensor = torch.empty(setup.max_tokens, model.hidden, dtype=dtype)

    @property
    def rank(self) -> Rank:
        """The twin's rank; there is one between ``prepare`` and ``close``."""
        assert self._rank is not None, "prepare() comes first"
        return self._rank

    def close(self) -> None:
        """Stop the rank, its role threads too, then unmap."""
        if self._rank is not None:
            self._rank.close()
            self._rank = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def twin_config(work: Workload, tiles: dict[str, int], max_tokens: int) -> "TwinConfig":
    """The twin's shape for a workload; at least one token, so that no buffer is empty.

    ``tiles`` are the TwinConfig's own tile, ring and worker counts.
    """
    model = work.model
    return twin.TwinConfig(
        num_ranks=work.ranks,
        num_experts=model.experts,
        top_k=model.top_k,
        max_tokens=max(1, max_tokens),
        hidden=model.hidden,
        intermediate=model.intermediate,
        element_bytes=work.dtype.num_bytes,
        **tiles,
    )
