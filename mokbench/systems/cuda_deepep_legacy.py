"""DeepEP's first generation: Buffer in normal mode and in low-latency mode, on one node.

Written against docs/legacy.md of DeepEP 2.1.0. Neither leaves rows where a grouped GEMM wants them:
normal mode brings each token once to a rank, low-latency mode pads every expert's rows to the most
there can be. The permutation around the GEMMs therefore belongs to compute.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mokbench.systems import Setup
from mokbench.systems import grouped_experts as parts
from mokbench.systems.deepep_buffer import BufferExchange
from mokbench.systems.deepep_support import token_capacity
from mokbench.systems.expanded_experts import ExpandedExperts
from mokbench.systems.expanded_rows import ExpandedRows
from mokbench.systems.options import DeepepOptions

_ADVISED_SMS = 20  # Buffer's own default


class NormalExchange(BufferExchange):
    """Buffer's normal mode over the memory of this node's GPUs; a token goes once to a rank."""

    def __init__(self, deep_ep: Any, setup: Setup, options: DeepepOptions) -> None:
        work, model, fabric = setup.workload, setup.workload.model, setup.fabric
        self._deep_ep, self._model, self._options = deep_ep, model, options
        self._num_local = setup.num_local_experts
        self._worst_tokens = work.ranks * token_capacity(max(1, setup.max_tokens))
        kinds = deep_ep.Buffer
        configs = (kinds.get_dispatch_config(work.ranks), kinds.get_combine_config(work.ranks))
        num_bytes = max(c.get_nvl_buffer_size_hint(2 * model.hidden, work.ranks) for c in configs)
        # Only objects are exchanged among the ranks, so the fabric's own group will do.
        group = torch.distributed.group.WORLD
        self._buffer = kinds(group, num_bytes, 0, explicitly_destroy=True)
        self._num_bytes = num_bytes
        self._share = fabric.num_sms
        self.num_sms = self.advised_sms = min(_ADVISED_SMS, self._share) // 2 * 2
        self._most_rows = self._worst_tokens * min(model.top_k, self._num_local)
        fp8 = options.dispatch_dtype == "fp8"
        self._rows = ExpandedRows(model.hidden, model.intermediate, fabric, fp8)
        self._experts = ExpandedExperts(setup, options, self._most_rows, self._rows, weighted=False)
        self._gather = parts.compiled(parts.gather_rows)
        self._sum = parts.compiled(parts.sum_slots)

    @property
    def notes(self) -> Sequence[str]:
        """What was made, and how the tiles of our grouped GEMM were chosen."""
        sync = "with" if self._options.cpu_sync else "without"
        size = f"{self._num_bytes / 2**20:.0f} MiB"
        return (f"legacy Buffer of {size}, normal mode, {sync} CPU sync", *self._experts.notes)

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> None:
        """Layout, then tokens with ids and weights; rows behind the received ones have no id."""
        self._deep_ep.Buffer.set_num_sms(self.num_sms)
        sent = x if self._options.dispatch_dtype == "bf16" else self._rows.quantize(x)
        per_rank, _, per_expert, is_in_rank, _ = self._buffer.get_dispatch_layout(
            topk_idx, self._model.experts
        )
        self._received, self._ids, self._weights, _, self._handle, _ = self._buffer.dispatch(
            sent,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            num_worst_tokens=0 if self._options.cpu_sync else self._worst_tokens,
        )

    def compute(self) -> None:
        """Rows to their experts, the MLPs, and a weighted sum for each received token."""
        x = self._received
        if isinstance(x, tuple):
            values, scales = x
            like: dict[str, Any] = {"dtype": torch.bfloat16, "device": values.device}
            x = self._rows.dequantize(values, scales, None, torch.empty(values.shape, **like))
        if x.shape[0] == 0:
            self._y = x
            return
        num_rows = x.shape[0] * min(self._model.top_k, self._num_local)
        ids = self._ids.int()
        x_rows, ends, slots = self._gather(x, ids, 0, self._num_local, num_rows)
        y_rows = self._experts(x_rows, ends, None)
        self._y = self._sum(y_rows, slots, ends[-1], self._weights)

    def combine(self) -> Tensor:
        """y [T, H]: sums of the ranks' partial sums."""
        y, _, _ = self._buffer.combine(self._y, self._handle)
        return y  # type: ignore[no-any-return]


class LowLatencyExchange(BufferExchange):
    """Buffer's low-latency mode: a slot for every (expert, source, token), weighted combine."""

    num_sms = advised_sms = 0

    def __init__(self, deep_ep: Any, setup: Setup, options: DeepepOptions) -> None:
        work, model = setup.workload, setup.workload.model
        self._model = model
        self._capacity = token_capacity(max(1, setup.max_tokens))
        self._slots = self._capacity * work.ranks
        num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(
            self._capacity, model.hidden, work.ranks, model.experts
        )
        self._num_bytes = num_bytes
        self._buffer = deep_ep.Buffer(
            torch.distributed.group.WORLD,
            0,
            num_bytes,
            low_latency_mode=True,
            num_qps_per_rank=setup.num_local_experts,
            explicitly_destroy=True,
        )
        self._most_rows = self._slots * min(model.top_k, setup.num_local_experts)
        rows = ExpandedRows(model.hidden, model.intermediate, setup.fabric, fp8=False)
        self._experts = ExpandedExperts(setup, options, self._most_rows, rows, weighted=False)
        self._compact = parts.compiled(compact_rows)
        self._spread = parts.compiled(spread_rows)

    @property
    def candidates(self) -> Sequence[int]:
        """Low-latency kernels take the SMs they want."""
        return ()

    @property
    def notes(self) -> Sequence[str]:
        """What was made, and how the tiles of our grouped GEMM were chosen."""
        size = f"{self._num_bytes / 2**20:.0f} MiB"
        return (f"legacy Buffer of {size}, low-latency mode, BF16 dispatch", *self._experts.notes)

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> None:
        """Tokens to the slots of their experts, in BF16."""
        self._topk_idx, self._topk_weights = topk_idx, topk_weights
        self._received, self._counts, self._handle, _, _ = self._buffer.low_latency_dispatch(
            x, topk_idx, self._capacity, self._model.experts, use_fp8=False
        )

    def compute(self) -> None:
        """Slots that hold a row, close together; the MLPs; back to the slots."""
        x_rows, ends, places = self._compact(self._received, self._counts, self._most_rows)
        y_rows = self._experts(x_rows, ends, None)
        self._y = self._spread(y_rows, places, self._received.shape[0], self._slots)

    def combine(self) -> Tensor:
        """y [T, H]; DeepEP weighs and adds."""
        y, _, _ = self._buffer.low_latency_combine(
            self._y, self._topk_idx, self._topk_weights, self._handle
        )
        return y  # type: ignore[no-any-return]


def compact_rows(padded: Tensor, counts: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [num_rows, H] of padded [E, S, H] by expert, each one's end, each row's slot e * S + s.

    counts [E] int32 are the rows of each expert, which lie first in its slots. Rows behind the last
    end are copies of some slot; their place is E * S, one behind the last slot.
    """
    experts, slots, hidden = padded.shape
    ends = counts.cumsum(0, dtype=torch.int32)
    rows = torch.arange(num_rows, dtype=torch.int32, device=padded.device)
    expert = torch.searchsorted(ends, rows, right=True).clamp(max=experts - 1)
    within = rows - (ends - counts)[expert]
    places = torch.where(rows < ends[-1], expert * slots + within, experts * slots)
    taken = padded.view(experts * slots, hidden)[places.clamp(max=experts * slots - 1)]
    return taken, ends, places


def spread_rows(rows: Tensor, places: Tensor, experts: int, slots: int) -> Tensor:
    """The inverse of ``compact_rows``: padded [E, S, H]; slots without a row are zero."""
    padded = rows.new_zeros(experts * slots + 1, rows.shape[1])
    padded[places] = rows
    return padded[:-1].view(experts, slots, rows.shape[1])
