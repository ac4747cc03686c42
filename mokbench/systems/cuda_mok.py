"""MoK on the cuda fabric: one cooperative launch a pass, kernels/mok/forward.cuh."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from mokbench.errors import UnsupportedError
from mokbench.mok_config import choose_mok, mok_problem
from mokbench.mok_stamps import mok_phase_times
from mokbench.reach import reach_reason
from mokbench.systems import Setup, expect_options, options_of
from mokbench.systems.options import MokOptions
from mokbench.workload import Cell, Dtype

if TYPE_CHECKING:
    from torch import Tensor

    from mokbench.kernel_phases import PhaseTimes
    from mokbench.systems.cuda_mok_workspace import MokWorkspace

# For what does not depend on the SMs, and for a plan that cannot ask a GPU.
_SOME_SMS = 132


class Mok:
    """The fused pass; every pass only queues one launch."""

    name: ClassVar[str] = "mok"
    deterministic: ClassVar[bool] = True
    traffic: ClassVar[str | None] = "per_route"
    signal: ClassVar[str | None] = "pull"

    def __init__(self) -> None:
        self._workspace: MokWorkspace | None = None
        self._zero_copy = False

    @staticmethod
    def supports(cell: Cell) -> str | None:
        """BF16 where ranks reach one another's memory, within what the kernel is written for."""
        work, options = cell.workload, expect_options(options_of(cell), MokOptions)
        if work.dtype is not Dtype.BF16:
            return f"mok on the cuda fabric is BF16 only so far, found {work.dtype}"
        if reason := reach_reason(cell, "memory", "mok"):
            return reason
        if reason := options.host_options_reason:
            return reason
        if problem := mok_problem(work.model, work.ranks, work.tokens_per_rank):
            return problem
        try:
            choose_mok(work, options, work.tokens_per_rank, _planned_sms(options))
        except ValueError as error:
            return str(error)
        return None

    @staticmethod
    def workspace_bytes(cell: Cell) -> int:
        """Segment, rings, table, packed weights and y."""
        work, options = cell.workload, expect_options(options_of(cell), MokOptions)
        num_sms = _planned_sms(options)
        return choose_mok(work, options, work.tokens_per_rank, num_sms).workspace_bytes

    def prepare(self, setup: Setup) -> None:
        """Memory and the kernel; UnsupportedError where the rank's SMs or rings do not fit."""
        from mokbench.systems.cuda_mok_workspace import MokWorkspace

        options = expect_options(setup.options, MokOptions)
        share = setup.fabric.num_sms
        if options.num_sms != "auto" and options.num_sms > share:
            raise UnsupportedError(
                f"num_sms {options.num_sms} is more than this rank's share of its GPU, {share} "
                f"SMs; use at most {share}, or auto"
            )
        try:
            config = choose_mok(setup.workload, options, setup.max_tokens, _sms(options, share))
        except ValueError as error:
            raise UnsupportedError(str(error)) from error
        self._workspace = MokWorkspace(setup.fabric, config, setup.w13, setup.w2)
        self._zero_copy = options.zero_copy

    @property
    def notes(self) -> Sequence[str]:
        """How tiles and rings were chosen."""
        return (self.workspace.config.note,)

    def run(self, x: "Tensor", topk_idx: "Tensor", topk_weights: "Tensor") -> "Tensor":
        """See System.run; only queues, so a fault shows in ``check``."""
        return self.workspace.run(x, topk_idx, topk_weights, self._zero_copy)

    def check(self) -> None:
        """Raise the fault that this rank recorded; waits for the GPU."""
        self.workspace.check()

    def phase_times(self) -> "PhaseTimes | None":
        """See Stamped; None without the option ``stamps``."""
        if not self.workspace.config.stamps:
            return None
        return mok_phase_times(self.workspace.stamps.numpy())

    def close(self) -> None:
        """Drop all memory and the kernel."""
        self._workspace = None

    @property
    def workspace(self) -> "MokWorkspace":
        """There is one between ``prepare`` and ``close``."""
        assert self._workspace is not None, "prepare() comes first"
        return self._workspace


def _sms(options: MokOptions, share: int) -> int:
    return share if options.num_sms == "auto" else options.num_sms


def _planned_sms(options: MokOptions) -> int:
    """For a plan, which cannot ask a GPU; ``prepare`` checks rings again for the SMs that it has.

    Rings given by hand may be meant for few SMs, and take what they take.
    """
    given = options.ring_tiles != "auto" or options.hidden_ring_tiles != "auto"
    return _sms(options, 1 if given else _SOME_SMS)
