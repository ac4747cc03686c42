"""One rank's share of a workload: routing, inputs, weights, and the truth to check against."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mokbench import reference
from mokbench.routing import Routing, generate
from mokbench.streams import streams_for
from mokbench.workload import Workload


@dataclass(frozen=True)
class Layer:
    """What every system gets for one workload on one rank, and the FP32 truth of its output.

    x [T, hidden], topk_idx [T, top_k] int32, topk_weights [T, top_k] float32; w13 and w2 are those
    of the rank's own experts, ``truth`` that of its own tokens over all ranks' experts. All tensors
    are on one device.
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
    def build(cls, workload: Workload, rank: int, device: torch.device | str = "cpu") -> "Layer":
        """Generate everything from the workload's seed on ``device``; no communication."""
        routing = generate(workload)
        streams = streams_for(device)
        per_rank = workload.model.experts // workload.ranks
        experts = range(rank * per_rank, (rank + 1) * per_rank)
        weights = reference.make_weights(workload, experts, streams)
        return cls(
            workload=workload,
            routing=routing,
            x=reference.make_inputs(workload, rank, streams).x,
            topk_idx=torch.tensor(routing.topk_idx[rank]).to(device),
            topk_weights=torch.tensor(routing.topk_weights[rank]).to(device),
            w13=weights.w13,
            w2=weights.w2,
            truth=reference.reference_truth(workload, routing, rank, streams),
        )

    @property
    def max_tokens(self) -> int:
        """Largest token count of any rank."""
        return max(self.routing.num_tokens)
