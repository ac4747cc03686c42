"""The push baseline on the cuda fabric: each (token, rank) pushed once, one row pushed back.

Dispatch is over when the rows of all ranks have arrived. Their placement among the experts belongs
to compute, like the permutation behind DeepEP's non-expanded dispatch; so does SwiGLU, which our
grouped GEMM has in its epilogue and which is a kernel of its own between torch's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mokbench.reach import reach_reason
from mokbench.systems import InPhases, Setup, expect_options, options_of
from mokbench.systems.gemm_choice import choose, expert_gemm_bytes, gemm_reason
from mokbench.systems.gpu_support import require_share
from mokbench.systems.options import PushOptions
from mokbench.systems.torch_gemms import TorchGemmLimit
from mokbench.workload import Cell, Dtype, Model

if TYPE_CHECKING:
    from torch import Tensor

    from mokbench.systems.cuda_push_workspace import PushWorkspace

_MAX_RANKS = 128  # kMaxRanks
_MAX_TOP_K = 16  # kMaxTopK
_MAX_LOCAL_EXPERTS = 512  # kPushThreads
_VEC_ELEMENTS = 8  # BF16 of a 16-byte access
# For workspace_bytes, which cannot ask a GPU: more SMs than any has.
_MANY_SMS = 256


@dataclass(frozen=True)
class PushShape:
    """What the kernels are compiled and a workspace is made for: BF16, ``max_tokens`` a rank."""

    model: Model
    ranks: int
    max_tokens: int

    @property
    def local_experts(self) -> int:
        """Experts of each rank."""
        return self.model.experts // self.ranks

    @property
    def capacity_rows(self) -> int:
        """push_capacity_rows of protocol.h: the most rows one rank's experts can get."""
        return self.ranks * self.max_tokens * min(self.model.top_k, self.local_experts)

    @property
    def segment_bytes(self) -> int:
        """At least push_layout's segment: rows and meta received, partial sums, flags, counts."""
        rows = self.ranks * self.max_tokens
        meta_bytes = (2 + 2 * self.model.top_k) * 4
        return rows * (2 * self.model.hidden * 2 + meta_bytes) + self.ranks * 512 + (1 << 16)

    def scratch_words(self, num_sms: int) -> dict[str, int]:
        """32-bit words of each array in which a rank keeps what is its own."""
        slots = self.ranks * self.max_tokens
        return {
            "epoch": 1,
            "finished": 1,
            "barrier": 1,
            "slot_of": slots,
            "num_sent": self.ranks,
            "chunk_rows": num_sms * self.local_experts,
            "row_of": slots * self.model.top_k,
            "expert_ends": self.local_experts,
        }

    def workspace_bytes(self, gemm: str) -> int:
        """Segment, scratch, y, and the rows before, between and behind the GEMMs."""
        model, rows = self.model, self.capacity_rows
        scratch = sum(self.scratch_words(_MANY_SMS).values())
        own = self.segment_bytes + 4 * scratch
        own += 2 * (self.max_tokens + rows) * model.hidden
        if gemm == "torch":
            return own + 2 * rows * (model.hidden + 3 * model.intermediate)
        return own + expert_gemm_bytes(rows, self.local_experts, model.hidden, model.intermediate)

    @property
    def config(self) -> str:
        """The kernels' template argument."""
        model = self.model
        return (
            f"mokbench::Config{{.num_ranks={self.ranks},.num_experts={model.experts},"
            f".top_k={model.top_k},.max_tokens={self.max_tokens},.hidden={model.hidden},"
            f".intermediate={model.intermediate}}}"
        )


class Push(InPhases):
    """The push kernels around grouped GEMMs; every pass only queues work."""

    name: ClassVar[str] = "push"
    deterministic: ClassVar[bool] = True
    traffic: ClassVar[str | None] = "per_rank"
    signal: ClassVar[str | None] = "push"

    def __init__(self) -> None:
        self._workspace: PushWorkspace | None = None
        self._limit: TorchGemmLimit | None = None

    @staticmethod
    def supports(cell: Cell) -> str | None:
        """BF16 where ranks reach one another's memory, within what the kernels are written for."""
        work, options = cell.workload, expect_options(options_of(cell), PushOptions)
        if work.dtype is not Dtype.BF16:
            return (
                f"push on the cuda fabric is BF16 only so far, found {work.dtype}; set dtype: bf16"
            )
        if reason := reach_reason(cell, "memory", "push"):
            return reason
        if options.block_m != PushOptions().block_m:
            return (
                "block_m is a tile of the host's GEMMs; leave block_m out on the cuda fabric and "
                "use gemm_tile_rows"
            )
        return _shape_problem(work.model, work.ranks) or gemm_reason(cell, options)

    @staticmethod
    def workspace_bytes(cell: Cell) -> int:
        """Segment, scratch, expert-sorted rows and the GEMMs' outputs."""
        work, gemm = cell.workload, expect_options(options_of(cell), PushOptions).gemm
        shape = PushShape(work.model, work.ranks, max(1, work.tokens_per_rank))
        return shape.workspace_bytes(gemm)

    def prepare(self, setup: Setup) -> None:
        """Memory and kernels; raises UnsupportedError for more SMs than the rank's share."""
        from mokbench.systems.cuda_push_workspace import PushWorkspace

        options = expect_options(setup.options, PushOptions)
        asked, share = options.num_sms, setup.fabric.num_sms
        num_sms = share if asked == "auto" else asked
        require_share(num_sms, share, ", or auto")
        shape = PushShape(setup.workload.model, setup.workload.ranks, max(1, setup.max_tokens))
        weights = setup.w13, setup.w2
        choice = None if options.gemm == "torch" else choose(setup.workload, options, share)
        if choice is None:
            self._limit = TorchGemmLimit(setup.fabric)
        self._workspace = PushWorkspace(setup.fabric, shape, weights, num_sms, choice)

    @property
    def notes(self) -> Sequence[str]:
        """How the tiles of our grouped GEMM were chosen."""
        return self._prepared.gemm_notes

    def dispatch(self, x: "Tensor", topk_idx: "Tensor", topk_weights: "Tensor") -> None:
        """Plan and send; over when every rank's rows are here."""
        self._prepared.dispatch(x, topk_idx, topk_weights)

    def compute(self) -> None:
        """Place the rows among their experts', and the expert MLPs."""
        self._prepared.compute()

    def combine(self) -> "Tensor":
        """Give back the weighted sums, and add what all ranks gave back."""
        return self._prepared.combine()

    def check(self) -> None:
        """Raise the fault that this rank recorded; waits for the GPU."""
        self._prepared.check()

    def close(self) -> None:
        """Drop all memory and kernels, give torch's GEMMs all SMs again."""
        self._workspace = None
        if self._limit is not None:
            self._limit.lift()
            self._limit = None

    @property
    def _prepared(self) -> "PushWorkspace":
        assert self._workspace is not None, "prepare() comes first"
        return self._workspace


def _shape_problem(model: Model, ranks: int) -> str | None:
    if ranks > _MAX_RANKS:
        return f"push kernels take at most {_MAX_RANKS} ranks, found {ranks}"
    if model.top_k > _MAX_TOP_K:
        return f"push kernels take at most top_k {_MAX_TOP_K}, found {model.top_k}"
    if model.experts // ranks > _MAX_LOCAL_EXPERTS:
        return (
            f"push kernels take at most {_MAX_LOCAL_EXPERTS} experts a rank, found "
            f"{model.experts // ranks}; use more ranks"
        )
    for name, size in (("hidden", model.hidden), ("intermediate", model.intermediate)):
        if size % _VEC_ELEMENTS:
            return f"push kernels need {name} to be a multiple of {_VEC_ELEMENTS}, found {size}"
    return None
