"""DeepEP's second generation: ElasticBuffer with its expanded layout, one row a route by expert.

Dispatch brings every row to its place among its experts' and its weight beside it, so that grouped
GEMMs follow without a permutation; combine adds a token's rows on their rank first, then across
ranks. DeepEP weighs nothing, so the weight is multiplied in behind SwiGLU.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mokbench.systems import Setup
from mokbench.systems.deepep_buffer import BufferExchange
from mokbench.systems.deepep_support import token_capacity
from mokbench.systems.expanded_experts import ExpandedExperts
from mokbench.systems.expanded_rows import ExpandedRows
from mokbench.systems.options import DeepepOptions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class ElasticExchange(BufferExchange):
    """One rank's buffer and passes; collective. Without CPU sync every call only queues work.

    ``group`` is an NCCL group that has connected. The buffer has the size that DeepEP itself asks
    for at this shape, and serves every pass until ``close``.
    """

    def __init__(
        self, deep_ep: Any, group: "ProcessGroup", setup: Setup, options: DeepepOptions
    ) -> None:
        model = setup.workload.model
        self._model, self._options = model, options
        self._capacity = token_capacity(max(1, setup.max_tokens))
        self._fp8 = options.dispatch_dtype == "fp8"
        self._buffer = deep_ep.ElasticBuffer(
            group,
            num_max_tokens_per_rank=self._capacity,
            hidden=model.hidden,
            num_topk=model.top_k,
            use_fp8_dispatch=self._fp8,
            deterministic=options.deterministic,
            # Over NVLink rows go straight to their rank; over a network once to each node.
            allow_hybrid_mode=not setup.fabric.maps_peers,
            explicitly_destroy=True,
        )
        most_rows = setup.workload.ranks * self._capacity
        most_rows *= min(model.top_k, setup.num_local_experts)
        self._rows = ExpandedRows(model.hidden, model.intermediate, setup.fabric, self._fp8)
        self._experts = ExpandedExperts(setup, options, most_rows, self._rows, weighted=True)
        self._x_rows: Tensor | None = None
        if self._fp8:
            like: dict[str, Any] = {"dtype": torch.bfloat16, "device": setup.fabric.device}
            self._x_rows = torch.zeros(most_rows, model.hidden, **like)
        self._received: Any = None
        self._weights: Tensor | None = None
        self._handle: Any = None
        self._y_rows: Tensor | None = None
        self._share = setup.fabric.num_sms
        # Its advice knows nothing of ranks that share a GPU.
        advice = int(self._buffer.get_theoretical_num_sms(model.experts, model.top_k))
        self.num_sms = self.advised_sms = min(advice, self._share)

    @property
    def notes(self) -> Sequence[str]:
        """What was made, and how the tiles of our grouped GEMM were chosen."""
        sync = "with" if self._options.cpu_sync else "without"
        return (
            f"ElasticBuffer of {self._buffer.num_bytes / 2**20:.0f} MiB for {self._capacity} "
            f"tokens a rank, expanded layout, {sync} CPU sync",
            *self._experts.notes,
        )

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> None:
        """Rows and weights to their experts' places; FP8 is quantised here."""
        sent = self._rows.quantize(x) if self._fp8 else x
        self._received, _, self._weights, self._handle, _ = self._buffer.dispatch(
            sent,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_experts=self._model.experts,
            num_max_tokens_per_rank=self._capacity,
            expert_alignment=1,
            num_sms=self.num_sms,
            # Nobody writes to topk_idx before combine.
            do_handle_copy=False,
            do_cpu_sync=self._options.cpu_sync,
            do_expand=True,
        )

    def compute(self) -> None:
        """Expert MLPs; FP8 rows become BF16 first, since our GEMMs multiply that."""
        # With groups that start at multiples of 1, this is each one's end.
        ends = self._handle.psum_num_recv_tokens_per_expert
        x_rows = self._received
        if self._x_rows is not None:
            values, scales = self._received
            x_rows = self._rows.dequantize(values, scales, ends, self._x_rows[: values.shape[0]])
        self._y_rows = self._experts(x_rows, ends, self._weights)

    def combine(self) -> Tensor:
        """y [T, H] in BF16."""
        y, _, _ = self._buffer.combine(self._y_rows, handle=self._handle, num_sms=self.num_sms)
        # Later work of this stream may have the memory.
        self._received = self._weights = self._handle = self._y_rows = None
        return y  # type: ignore[no-any-return]
