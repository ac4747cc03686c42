"""The expert MLPs on rows that are sorted by expert, one a route: our grouped GEMM, or torch's."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mokbench.systems import Setup
from mokbench.systems.cuda_local import require_fast_kernels
from mokbench.systems.expanded_rows import ExpandedRows
from mokbench.systems.expert_gemms import ExpertGemms
from mokbench.systems.gemm_choice import choose
from mokbench.systems.options import GemmOptions
from mokbench.systems.torch_gemms import TorchGemmLimit


class ExpandedExperts:
    """y_rows [M, H] of x_rows [M, H], each hidden row multiplied by its weight; only queues.

    ``capacity`` bounds M. ``weighted`` false: callers weigh themselves. What a call returns is
    overwritten by the next; rows behind the last end are garbage.
    """

    def __init__(
        self, setup: Setup, options: GemmOptions, capacity: int, rows: ExpandedRows, weighted: bool
    ) -> None:
        self.notes: Sequence[str] = ()
        self._rows, self._limit = rows, None
        self._ones: Tensor | None = None
        model, fabric = setup.workload.model, setup.fabric
        if options.gemm == "ours":
            choice = choose(setup.workload, options, fabric.num_sms)
            choice = choice.weighted if weighted else choice
            self._ours: ExpertGemms | None = ExpertGemms(
                setup.w13, setup.w2, capacity, choice, fabric.num_sms, fabric.arch
            )
            self.notes = choice.notes
            return
        require_fast_kernels()
        self._ours = None
        self._limit = TorchGemmLimit(fabric)
        like: dict[str, Any] = {"device": fabric.device}
        self._activated = torch.zeros(capacity, model.intermediate, dtype=torch.bfloat16, **like)
        if not weighted:
            self._ones = torch.ones(capacity, dtype=torch.float32, **like)
        self._weights = [w.transpose(1, 2) for w in (setup.w13, setup.w2)]

    def __call__(self, x_rows: Tensor, row_ends: Tensor, weights: Tensor | None) -> Tensor:
        """``row_ends`` [E] int32 on the device, ``weights`` [M] FP32 where weighted."""
        num_rows = x_rows.shape[0]
        if num_rows == 0:
            return torch.empty_like(x_rows)
        if self._ours is not None:
            return self._ours(x_rows, row_ends, weights)
        weights = self._ones[:num_rows] if weights is None and self._ones is not None else weights
        assert weights is not None, "weighted experts need weights"
        w13_t, w2_t = self._weights
        gate_up = torch._grouped_mm(x_rows, w13_t, row_ends)
        activated = self._activated[:num_rows]
        self._rows.swiglu(gate_up, weights, row_ends, activated)
        return torch._grouped_mm(activated, w2_t, row_ends)

    def close(self) -> None:
        """Give torch's GEMMs all SMs again."""
        if self._limit is not None:
            self._limit.lift()
            self._limit = None
