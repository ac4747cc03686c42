"""Formulas: imbalance, bytes, FLOPs, rates, roofline. docs/metrics.md derives each one.

Everything is a pure function of the routing, the workload and measured numbers: no clock, no I/O.
Bytes are bytes, times are seconds, rates are per second. A figure that has no meaning (nothing was
routed, nothing crosses a link) is None, never 0.
"""

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from mokbench.routing import Routing
    from mokbench.workload import Workload

Protocol = Literal["per_route", "per_rank"]

# Links that ranks do not share with anything else that this project measures.
_NO_LINK = ("none", "hbm")


@dataclass(frozen=True)
class Imbalance:
    """How unevenly routes fall; 1 (max/mean) or 0 (cv, gini, empty_experts) is perfectly even.

    All but ``empty_experts`` are None when nothing is routed.
    """

    expert_max_over_mean: float | None
    rank_max_over_mean: float | None
    pair_max_over_mean: float | None
    cv: float | None
    gini: float | None
    empty_experts: float


def expert_counts(routing: "Routing", experts: int) -> NDArray[np.int64]:
    """Unmasked routes of all ranks to each expert, int64 [experts]."""
    counts = np.zeros(experts, dtype=np.int64)
    for idx in routing.topk_idx:
        counts += np.bincount(idx[idx >= 0], minlength=experts)
    return counts


def route_matrix(routing: "Routing", experts: int, ranks: int) -> NDArray[np.int64]:
    """Unmasked routes from source rank (row) to expert's rank (column), int64 [ranks, ranks]."""
    local = experts // ranks
    rows = [np.bincount(idx[idx >= 0] // local, minlength=ranks) for idx in routing.topk_idx]
    return np.stack(rows).astype(np.int64)


def token_matrix(routing: "Routing", experts: int, ranks: int) -> NDArray[np.int64]:
    """Tokens of source rank (row) with an unmasked expert on rank (column), int64.

    A token with several experts on a rank counts once. ``ranks`` may be those of the experts or
    the nodes that hold them.
    """
    local = experts // ranks
    pairs = np.zeros((len(routing.topk_idx), ranks), dtype=np.int64)
    for source, idx in enumerate(routing.topk_idx):
        visits = np.zeros((idx.shape[0], ranks), dtype=np.bool_)
        token, k = np.nonzero(idx >= 0)
        visits[token, idx[token, k] // local] = True
        pairs[source] = visits.sum(axis=0)
    return pairs


def imbalance(routing: "Routing", experts: int, ranks: int) -> Imbalance:
    """Imbalance of experts, of ranks (as destinations) and of (source, destination) pairs.

    With c the routes per expert, sorted, and n experts: cv = std(c) / mean(c) (population),
    gini = sum_i (2i - n - 1) c_i / (n * sum(c)) for i = 1 .. n. All n experts count, empty or not;
    all ranks * ranks pairs count, a rank's routes to itself too.
    """
    counts = expert_counts(routing, experts)
    empty = float((counts == 0).mean())
    if not counts.any():
        return Imbalance(None, None, None, None, None, empty)
    matrix = route_matrix(routing, experts, ranks)
    ordered = np.sort(counts)
    signs = 2 * np.arange(1, experts + 1) - experts - 1
    return Imbalance(
        expert_max_over_mean=_max_over_mean(counts),
        rank_max_over_mean=_max_over_mean(matrix.sum(axis=0)),
        pair_max_over_mean=_max_over_mean(matrix),
        cv=float(counts.std() / counts.mean()),
        gini=float(signs @ ordered / (experts * ordered.sum())),
        empty_experts=empty,
    )


def _max_over_mean(counts: NDArray[np.int64]) -> float:
    return float(counts.max() / counts.mean())


@dataclass(frozen=True)
class WireFormat:
    """How a row of hidden elements travels: element size and, for scaled formats, its scales.

    FP8 with one FP32 scale per 128 elements is WireFormat(1, scale_bytes=4, scale_block=128).
    """

    element_bytes: float
    scale_bytes: int = 0
    scale_block: int = 0

    def row_bytes(self, hidden: int) -> int:
        """Bytes of one row of ``hidden`` elements with its scales."""
        scales = -(-hidden // self.scale_block) * self.scale_bytes if self.scale_block else 0
        return int(np.ceil(hidden * self.element_bytes)) + scales


FP8 = WireFormat(1, scale_bytes=4, scale_block=128)


@dataclass(frozen=True)
class Traffic:
    """Payload bytes of one layer pass between ranks, summed over them.

    Rows that stay on their rank, routing ids, weights, counts and flags are not in it.
    """

    dispatch_useful: int
    dispatch_wire: int
    combine_useful: int
    combine_wire: int

    @property
    def useful_bytes(self) -> int:
        """Each (token, rank) pair once, each way."""
        return self.dispatch_useful + self.combine_useful

    @property
    def wire_bytes(self) -> int:
        """What the protocol moves, each way."""
        return self.dispatch_wire + self.combine_wire

    @property
    def redundancy(self) -> float | None:
        """Wire bytes per useful byte; None when nothing crosses."""
        return self.wire_bytes / self.useful_bytes if self.useful_bytes else None


def traffic(
    routing: "Routing",
    workload: "Workload",
    protocol: Protocol | None,
    *,
    combine_protocol: Protocol | None = None,
    dispatch: WireFormat | None = None,
    combine: WireFormat | None = None,
) -> Traffic:
    """Bytes between ranks of one pass under a protocol.

    "per_route" moves one row per (token, expert), "per_rank" one per (token, rank); None moves
    nothing on the wire. ``combine_protocol`` defaults to ``protocol``, formats to the dtype.
    """
    model, ranks = workload.model, workload.ranks
    plain = WireFormat(workload.dtype.num_bytes)
    dispatch_row = (dispatch or plain).row_bytes(model.hidden)
    combine_row = (combine or plain).row_bytes(model.hidden)
    rows = {
        "per_route": _crossing(route_matrix(routing, model.experts, ranks)),
        "per_rank": _crossing(token_matrix(routing, model.experts, ranks)),
        None: 0,
    }
    return Traffic(
        dispatch_useful=rows["per_rank"] * dispatch_row,
        dispatch_wire=rows[protocol] * dispatch_row,
        combine_useful=rows["per_rank"] * combine_row,
        combine_wire=rows[combine_protocol or protocol] * combine_row,
    )


def traffic_by_protocol(routing: "Routing", workload: "Workload") -> dict[str, dict[str, int]]:
    """Traffic of each protocol that a row may name; ``per_rank.fp8`` dispatches in FP8."""
    return {
        "per_route": asdict(traffic(routing, workload, "per_route")),
        "per_rank": asdict(traffic(routing, workload, "per_rank")),
        "per_rank.fp8": asdict(traffic(routing, workload, "per_rank", dispatch=FP8)),
    }


def traffic_to_all(per_rank: Traffic, workload: "Workload", num_tokens: int) -> Traffic:
    """Bytes of a system that sends everything everywhere: ``num_tokens`` are those of all ranks.

    Each token goes to every other rank, and a sum comes back from each; useful is unchanged.
    """
    row_bytes = WireFormat(workload.dtype.num_bytes).row_bytes(workload.model.hidden)
    wire = num_tokens * (workload.ranks - 1) * row_bytes
    return replace(per_rank, dispatch_wire=wire, combine_wire=wire)


def _crossing(matrix: NDArray[np.int64]) -> int:
    return int(matrix.sum() - np.trace(matrix))


def layer_flops(routing: "Routing", workload: "Workload") -> int:
    """6 * M * H * I over all ranks: three matmuls of 2 * H * I on each of M unmasked routes."""
    model = workload.model
    return 6 * routing.num_routes * model.hidden * model.intermediate


def tflops_per_gpu(flops: float, seconds: float, gpus: int) -> float:
    """TFLOP/s of one GPU (on the host fabric: of one rank); ``flops`` are of all ranks."""
    return flops / seconds / gpus / 1e12


def tokens_per_s(num_tokens: int, seconds: float) -> float:
    """Tokens of all ranks (``sum(routing.num_tokens)``) over the time of one layer pass."""
    return num_tokens / seconds


@dataclass(frozen=True)
class Rates:
    """What one rank reached in the same run: matmul FLOP/s, bytes/s read, bytes/s from a peer.

    Ranks that share a machine or a GPU are measured at once. None: not measured, bounds nothing.
    """

    matmul_flops: float | None
    read_bytes: float | None
    peer_bytes: float | None


@dataclass(frozen=True)
class Roofline:
    """Least time of a pass, in seconds, by each resource of the rank that needs it longest."""

    compute_s: float | None
    memory_s: float | None
    link_s: float | None

    @property
    def seconds(self) -> float | None:
        """The largest of the three that are known."""
        return max((s for s in (self.compute_s, self.memory_s, self.link_s) if s), default=None)

    @property
    def bound(self) -> str | None:
        """The resource that sets it: compute, memory or link."""
        named = {"compute": self.compute_s, "memory": self.memory_s, "link": self.link_s}
        known = {name: s for name, s in named.items() if s}
        return max(known, key=lambda name: known[name], default=None)


def roofline(
    routing: "Routing", workload: "Workload", rates: Rates, ranks_per_gpu: int = 1
) -> Roofline:
    """Lower bound on one pass: no GPU can end before its rows, bytes and link traffic are done.

    ``rates`` are those of one rank while all run. Ranks that share a GPU are summed, since one that
    has less to do leaves its SMs and bandwidth to the others. Per rank: 6 * M_r * H * I FLOPs;
    weights of its experts that have rows, its x and its y, once; the useful bytes of the busier
    direction of its link, which works both ways at once.
    """
    model, ranks, size = workload.model, workload.ranks, workload.dtype.num_bytes
    rows = route_matrix(routing, model.experts, ranks).sum(axis=0)
    matmul = 6 * rows * model.hidden * model.intermediate
    used = (expert_counts(routing, model.experts) > 0).reshape(ranks, -1).sum(axis=1)
    weights = used * (3 * model.hidden * model.intermediate * size)
    activations = np.asarray(routing.num_tokens) * (2 * model.hidden * size)
    pairs = token_matrix(routing, model.experts, ranks)
    pairs = pairs - np.diag(np.diag(pairs))
    # A rank receives its experts' rows and its tokens' sums; it sends as many of each.
    link = (pairs.sum(axis=0) + pairs.sum(axis=1)) * (model.hidden * size)

    def least_time(amounts: NDArray[np.int64], rate: float | None) -> float | None:
        by_gpu = np.add.reduceat(amounts, range(0, ranks, ranks_per_gpu))
        return float(by_gpu.max() / ranks_per_gpu / rate) if rate else None

    return Roofline(
        compute_s=least_time(matmul, rates.matmul_flops),
        memory_s=least_time(weights + activations, rates.read_bytes),
        link_s=least_time(link, rates.peer_bytes),
    )


def mma_utilization(tflops: float, flops_per_cycle: int, clock_mhz: float) -> float:
    """Cycles that the tensor cores need for a GPU's FLOPs, over the cycles that the step took.

    Unlike a share of a peak in TFLOP/s, it does not move with the clock.
    """
    return tflops * 1e12 / (flops_per_cycle * clock_mhz * 1e6)


def utilization(
    num_bytes: float, seconds: float, peer_bytes_per_s: float, ranks: int, link: str
) -> float | None:
    """Share of the measured peer-copy rate that a rank's bytes reach, averaged over ranks.

    Useful bytes give link_utilization, wire bytes wire_utilization. None where ranks have no link
    of their own (``link`` none or hbm).
    """
    if link in _NO_LINK or ranks < 2:
        return None
    return num_bytes / ranks / seconds / peer_bytes_per_s
