"""One rank's share of a workload: routing, inputs, weights, and the truth to check against."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mokbench import reference
from mokbench.routing import Routing, generate
from mokbench.workload import Workload


@dataclass(frozen=True)
class Layer:
    """What every system gets for one workload on one rank, and the FP32 truth of its output.

    x [T, hidden], topk_idx [T, top_k] int32, topk_weights [T, top_k] float32; w13 and w2 are those
    of the rank's own experts, ``truth`` that of its own tokens over all ranks' experts.
    """

    workload: Workload
    routing: Routing
    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    w13: Tensor
    w2: Tensor
    truth: reference.Truth

    @classmethod
    def build(cls, workload: Workload, rank: int, device: str = "cpu") -> "Layer":
        """Generate everything from the workload's seed; no communication."""
        routing = generate(workload)
        per_rank = workload.model.experts // workload.ranks
        weights = reference.make_weights(workload, range(rank * per_rank, (rank + 1) * per_rank))
        return cls(
            workload=workload,
            routing=routing,
            x=reference.make_inputs(workload, rank).x,
            topk_idx=torch.tensor(routing.topk_idx[rank]),
            topk_weights=torch.tensor(routing.topk_weights[rank]),
            w13=weights.w13,
            w2=weights.w2,
            truth=reference.reference_truth(workload, routing, rank),
        )

    @property
    def max_tokens(self) -> int:
        """Largest token count of any rank."""
        return max(self.routing.num_tokens)
