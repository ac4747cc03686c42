"""The one matmul of all host systems: SwiGLU experts, a tile of rows at a time, through torch.

mok, push, alltoall and local call the same two functions with the same tile height, so their matmul
is the same. They differ in communication and in threads: mok runs its two GEMMs at the same time,
in a thread each, the others one after the other in the caller's.
"""

import torch
from torch import Tensor


class ExpertMlp:
    """Expert MLPs of one rank: ``hidden = silu(x Wg^T) * (x Wu^T)``, then ``y = hidden W2^T``.

    w13 [E, 2I, H] holds the gate rows, then the up rows; w2 is [E, H, I]. Tiles have at most
    ``block_m`` rows. Sums are FP32 inside torch; gate, up and hidden are rounded to the weights'
    dtype, as a system that stores them between two GEMMs does.
    """

    def __init__(self, w13: Tensor, w2: Tensor, block_m: int) -> None:
        self.block_m = block_m
        self.intermediate = w2.shape[2]
        self._w13_t = [w.t() for w in w13]
        self._w2_t = [w.t() for w in w2]
        self._gate_up = torch.empty(block_m, w13.shape[1], dtype=w13.dtype)

    def gemm1(self, expert: int, x: Tensor, hidden: Tensor) -> None:
        """Hidden activations [rows, I] of x [rows, H], rows <= block_m."""
        gate_up = self._gate_up[: x.shape[0]]
        torch.mm(x, self._w13_t[expert], out=gate_up)
        # SwiGLU in FP32: the GPU kernels do it in registers before they round.
        gate, up = gate_up.float().chunk(2, dim=1)
        hidden.copy_(torch.nn.functional.silu(gate).mul_(up))

    def gemm2(self, expert: int, hidden: Tensor, y: Tensor) -> None:
        """Expert outputs y [rows, H] of hidden [rows, I]."""
        torch.mm(hidden, self._w2_t[expert], out=y)

    def run(self, expert: int, x: Tensor, y: Tensor) -> None:
        """Both GEMMs over any number of rows of one expert, tile by tile."""
        hidden = torch.empty(self.block_m, self.intermediate, dtype=x.dtype)
        for start in range(0, x.shape[0], self.block_m):
            rows = min(self.block_m, x.shape[0] - start)
            self.gemm1(expert, x[start : start + rows], hidden[:rows])
            self.gemm2(expert, hidden[:rows], y[start : start + rows])


def sort_by_expert(
    topk_idx: Tensor, first_expert: int, num_experts: int
) -> tuple[Tensor, list[int]]:
    """Flat route indices of experts [first, first + num), expert by expert, and rows per expert.

    topk_idx is [rows, K]; a route's flat index is row * K + k. Stable: within an expert routes
    keep their order, so the same routing always gives the same rows.
    """
    flat = topk_idx.reshape(-1).long() - first_expert
    here = torch.nonzero((flat >= 0) & (flat < num_experts)).squeeze(1)
    experts = flat[here]
    order = torch.argsort(experts, stable=True)
    counts = torch.bincount(experts, minlength=num_experts)
    return here[order], counts.tolist()


def run_experts(
    mlp: ExpertMlp,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    first_expert: int,
    num_experts: int,
) -> Tensor:
    """Weighted sum over the local experts of each row: y [rows, H] in x's dtype.

    Routes to experts elsewhere, and masked ones, add nothing. The sum runs in fixed k order in
    FP32, so it does not depend on the order in which experts ran.
    """
    num_rows, top_k = topk_idx.shape
    routes, counts = sort_by_expert(topk_idx, first_expert, num_experts)
    x_rows = x[torch.div(routes, top_k, rounding_mode="floor")]
    y_rows = torch.empty_like(x_rows)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            mlp.run(expert, x_rows[start : start + count], y_rows[start : start + count])
            start += count
    y_slots = x.new_zeros(num_rows * top_k, x.shape[1])
    y_slots[routes] = y_rows
    y = torch.zeros(num_rows, x.shape[1], dtype=torch.float32)
    for k, slots in enumerate(y_slots.view(num_rows, top_k, x.shape[1]).unbind(1)):
        y.addcmul_(slots.float(), topk_weights[:, k : k + 1])
    return y.to(x.dtype)
