"""The expert MLPs of one rank as plain PyTorch: sort, grouped GEMM, SwiGLU, grouped GEMM, sum.

What local and alltoall run on a GPU. Nothing in it waits for the device, and no atomic decides an
order, so it can be compiled, captured in a graph, and gives the same bits twice.
"""

import shutil
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# torch._grouped_mm needs rows of whole 16 bytes.
ROW_ELEMENTS = 8


def weighted_experts(
    x: "Tensor",
    topk_idx: "Tensor",
    topk_weights: "Tensor",
    w13: "Tensor",
    w2: "Tensor",
    first_expert: int = 0,
    num_routes: int | None = None,
) -> "Tensor":
    """Weighted sum over the local experts of each row: y [rows, H] in x's dtype.

    x [rows, H] BF16, topk_idx [rows, K] int32 (global ids, -1 masked), topk_weights [rows, K],
    w13 [E, 2I, H], w2 [E, H, I] of experts first_expert onwards. Routes elsewhere add nothing.
    ``num_routes``, where the caller knows it, is the number of local routes: no other is gathered.
    """
    import torch

    num_experts, top_k = w13.shape[0], topk_idx.shape[1]
    local = topk_idx.reshape(-1) - first_expert
    is_local = (local >= 0) & (local < num_experts)
    local = torch.where(is_local, local, num_experts)
    by_expert, order = torch.sort(local, stable=True)
    experts = torch.arange(num_experts, dtype=local.dtype, device=x.device)
    ends = torch.searchsorted(by_expert, experts, right=True).to(torch.int32)
    routes = order if num_routes is None else order[:num_routes]
    gate_up = torch._grouped_mm(x[routes // top_k], w13.transpose(1, 2), ends)
    gate, up = gate_up.chunk(2, dim=1)
    # SwiGLU in FP32, rounded once, as a kernel would do it in registers.
    hidden = (torch.nn.functional.silu(gate.float()) * up.float()).to(x.dtype)
    rows = torch._grouped_mm(hidden, w2.transpose(1, 2), ends)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=x.device)
    # Rows behind the last expert's are not written by the GEMM and may hold anything.
    picked = rows[torch.where(is_local, place, 0)].float() * topk_weights.reshape(-1, 1)
    picked = torch.where(is_local[:, None], picked, 0.0)
    return picked.view(-1, top_k, x.shape[1]).sum(dim=1).to(x.dtype)


def compiled(function: Any, **options: Any) -> Any:
    """``function`` under torch.compile; every new shape is compiled, none falls back to eager."""
    import torch
    from torch._dynamo import config

    # Past this limit torch would run the function uncompiled, with a warning nobody reads.
    config.recompile_limit = max(config.recompile_limit, 1024)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 4096)
    return torch.compile(function, fullgraph=True, **options)


@cache
def compiler_problem() -> str | None:
    """Why torch.compile cannot work for the GPU here, and what would help, or None."""
    if find_spec("triton") is None:
        return "torch.compile needs triton: pip install triton, or set compile: false"
    if not any(shutil.which(name) for name in ("gcc", "cc", "clang")):
        return "torch.compile needs a C compiler on the PATH (gcc or clang), or set compile: false"
    return None


def shape_problem(what: str, hidden: int, intermediate: int) -> str | None:
    """Why torch's grouped GEMM does not take a shape, or None."""
    if hidden % ROW_ELEMENTS == 0 and intermediate % ROW_ELEMENTS == 0:
        return None
    return (
        f"{what}: torch._grouped_mm needs hidden and intermediate in multiples of {ROW_ELEMENTS}, "
        f"found {hidden} and {intermediate}"
    )
