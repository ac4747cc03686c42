"""The two grouped GEMMs of the expert MLPs on a GPU: ours with SwiGLU fused, buffers made once."""

from typing import Any

import torch
from torch import Tensor

from mokbench import jit
from mokbench.errors import UnsupportedError
from mokbench.grouped_gemm import GroupedGemm, pack_gate_up
from mokbench.systems.gemm_choice import GemmChoice
from mokbench.systems.kernel_arch import gemm_arch_reason


class ExpertGemms:
    """x_rows [M, H] -> y_rows [M, H] for rows sorted by expert; rows behind the last are garbage.

    w13 [E, 2 I, H] (packed here, a copy) and w2 [E, H, I], BF16. ``num_sms`` is the grid. Where the
    choice is weighted, a row's hidden values are multiplied by its weight before they are rounded.
    Only queues; what a call returns is overwritten by the next.
    """

    def __init__(
        self, w13: Tensor, w2: Tensor, capacity: int, choice: GemmChoice, num_sms: int, arch: str
    ) -> None:
        if reason := gemm_arch_reason(arch):
            raise UnsupportedError(reason)
        self.notes = choice.notes
        jit.build_all(choice.kernels, arch)
        self._gate_up = GroupedGemm(pack_gate_up(w13), choice.gate_up, num_sms, arch)
        self._down = GroupedGemm(w2, choice.down, num_sms, arch)
        hidden, intermediate = w2.shape[1:]
        rows: dict[str, Any] = {"dtype": torch.bfloat16, "device": w2.device}
        self._activated = torch.zeros(capacity, intermediate, **rows)
        self._y_rows = torch.zeros(capacity, hidden, **rows)

    def __call__(
        self, x_rows: Tensor, row_ends: Tensor, row_weights: Tensor | None = None
    ) -> Tensor:
        """y_rows, at most ``capacity``; ``row_ends`` [E] int32, ``row_weights`` [M] FP32."""
        activated, y_rows = (t[: x_rows.shape[0]] for t in (self._activated, self._y_rows))
        self._gate_up(x_rows, row_ends, activated, row_weights)
        return self._down(activated, row_ends, y_rows)
