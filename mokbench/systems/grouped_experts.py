"""The expert MLPs of the cuda fabric's plain PyTorch systems: torch._grouped_mm, no CPU sync.

Every function is a pure function of tensors with shapes known beforehand, so that torch.compile
fuses what lies between the GEMMs and a CUDA graph can hold it. Nothing adds atomically: the same
inputs give the same bits.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])

# Kernels that gather rows do their index arithmetic once a row instead of once an element when
# their tiles have two dimensions; the first pass tries out which tile is best. Every index is in
# range by construction, so the checks, a barrier each, are left out.
_INDUCTOR: dict[str, Any] = {
    "triton.prefer_nd_tiling": True,
    "max_autotune_pointwise": True,
    "assert_indirect_indexing": False,
}

# From here on torch sorts by radix, whose passes are over a key's bytes: int16 halves them.
_RADIX_SORT_KEYS = 4096
_MAX_SHAPES = 1 << 14


def compiled(function: Function) -> Function:
    """``function`` under torch.compile, once for each set of shapes, without graph breaks."""
    # A handful of small kernels: a pool of compiler processes starts slower than they compile, and
    # each rank would have its own, which a killed run could leave behind.
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    inductor.compile_threads = 1
    # Past these limits torch would run the function as it is written, without an error; a sweep
    # has more shapes than the few that are the default.
    dynamo.recompile_limit = max(dynamo.recompile_limit, _MAX_SHAPES)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, _MAX_SHAPES)
    built = torch.compile(function, dynamic=False, fullgraph=True, options=_INDUCTOR)
    return cast(Function, built)


def as_written(function: Function) -> Function:
    """``function`` itself, where compiling is not wanted."""
    return function


def sort_routes(topk_idx: Tensor, first_expert: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """Flat routes, those of experts [first, first + num) ahead by expert; each expert's end, int32.

    A route's flat index is row * K + k. Stable: within an expert routes keep their order. Masked
    routes and those of other experts follow the last end.
    """
    local = topk_idx.reshape(-1) - first_expert
    keys = torch.where((local >= 0) & (local < num_experts), local, num_experts)
    if keys.numel() > _RADIX_SORT_KEYS:
        keys = keys.to(torch.int16)
    keys, order = torch.sort(keys, stable=True)
    experts = torch.arange(num_experts, dtype=torch.int32, device=keys.device)
    return order, torch.searchsorted(keys.int(), experts, right=True, out_int32=True)


def inverse(order: Tensor) -> Tensor:
    """Where each entry of a permutation went, int32: entry order[i] is at i."""
    places = torch.arange(order.numel(), dtype=torch.int32, device=order.device)
    return torch.empty_like(places).scatter_(0, order, places)


def sum_slots(
    rows: Tensor, slots: Tensor, num_live: Tensor | int, weights: Tensor | None
) -> Tensor:
    """y[t] = sum over j of weights[t, j] * rows[slots[t, j]], FP32 in order of j, in rows' dtype.

    Slots from ``num_live`` on add nothing, whatever lies there. Compiled, it is one kernel that
    reads each live row once; the terms are never stored.
    """
    is_live = slots < num_live
    # int64: a slot times the row size may pass 2^31.
    slots = slots.clamp(max=rows.shape[0] - 1).long()
    y = torch.zeros(slots.shape[0], rows.shape[1], dtype=torch.float32, device=rows.device)
    for j in range(slots.shape[1]):
        term = rows[slots[:, j]].float()
        if weights is not None:
            term = term * weights[:, j, None]
        y = y + torch.where(is_live[:, j, None], term, 0.0)
    return y.to(rows.dtype)


def gather_rows(
    x: Tensor, topk_idx: Tensor, first_expert: int, num_experts: int, num_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """x's rows by local expert [num_rows, H]; each expert's end, int32; each route's place [T, K].

    ``num_rows`` bounds the routes to these experts, at least 1.
    """
    order, ends = sort_routes(topk_idx, first_expert, num_experts)
    x_rows = x[order[:num_rows] // topk_idx.shape[1]]
    return x_rows, ends, inverse(order).view_as(topk_idx)


def expert_layer(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    first_expert: int,
    num_rows: int,
) -> Tensor:
    """Weighted sum over the local experts of each row of x: y [rows, H] in x's dtype.

    ``num_rows`` as for ``gather_rows``; GEMM rows beyond the real ones are neither computed nor
    read. gate, up and hidden are rounded to x's dtype between the GEMMs.
    """
    x_rows, ends, slots = gather_rows(x, topk_idx, first_expert, w13.shape[0], num_rows)
    gate, up = torch._grouped_mm(x_rows, w13.transpose(1, 2), ends).chunk(2, dim=1)
    hidden = (torch.nn.functional.silu(gate.float()) * up.float()).to(x.dtype)
    y_rows = torch._grouped_mm(hidden, w2.transpose(1, 2), ends)
    return sum_slots(y_rows, slots, ends[-1], topk_weights)
