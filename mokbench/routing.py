"""Who sends which token to which experts: seeded routing, the same bytes on every rank.

A routing depends on the workload's seed, spec, experts, top_k, ranks, tokens_per_rank and placement
alone: not on the system, the dtype or the hidden size, so that whatever is compared is compared on
the same routes. ``Routing.digest`` tells whether two processes agree.

Each draw (token counts, popularity, routes, masks, weights) has a stream of its own, seeded by the
hash of what it depends on: adding a mask does not change the routes, and more tokens do not change
which experts are popular.
"""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mokbench import generators, placement, trace
from mokbench.errors import ConfigError, UnsupportedError
from mokbench.routing_spec import PRESETS, RoutingSpec

if TYPE_CHECKING:
    from mokbench.workload import Workload

__all__ = ["PRESETS", "Routing", "RoutingSpec", "check", "generate", "token_counts"]


@dataclass(frozen=True, eq=False)
class Routing:
    """Routes of all source ranks; the arrays are read-only.

    ``topk_idx[r]`` is int32 [T_r, K]: expert ids, -1 where masked, no expert twice in a row of it.
    ``topk_weights[r]`` is float32 [T_r, K]: positive, sums to 1 over the unmasked routes of a
    token, 0 where masked. Expert e lives on rank e // (experts / ranks), whatever the placement.
    ``trace_sha256`` identifies the trace layer the routes came from, empty without one.
    """

    topk_idx: tuple[NDArray[np.int32], ...]
    topk_weights: tuple[NDArray[np.float32], ...]
    trace_sha256: str = ""

    @property
    def num_tokens(self) -> tuple[int, ...]:
        """Tokens of each source rank."""
        return tuple(idx.shape[0] for idx in self.topk_idx)

    @property
    def num_routes(self) -> int:
        """Unmasked routes of all ranks: the rows that experts compute."""
        return sum(int((idx >= 0).sum()) for idx in self.topk_idx)

    def digest(self) -> str:
        """SHA-256 (hex) of every array's shape and little-endian bytes and of the trace's hash."""
        sha = hashlib.sha256(self.trace_sha256.encode())
        for idx, weights in zip(self.topk_idx, self.topk_weights, strict=True):
            sha.update(repr(idx.shape).encode())
            sha.update(idx.astype("<i4").tobytes())
            sha.update(weights.astype("<f4").tobytes())
        return sha.hexdigest()


def generate(workload: "Workload") -> Routing:
    """Routes of every rank, a pure function of the workload (and of the trace file's content).

    Raises UnsupportedError with ``check``'s reason, ConfigError for a bad trace or placement.
    """
    spec, model = workload.routing, workload.model
    if problem := placement.problem(workload.placement, workload.ranks, model.experts):
        raise ConfigError([f"placement: {problem}"])
    reason = check(
        spec,
        ranks=workload.ranks,
        experts=model.experts,
        top_k=model.top_k,
        tokens_per_rank=workload.tokens_per_rank,
    )
    if reason:
        raise UnsupportedError(f"routing {spec.label}: {reason}")
    counts = token_counts(workload)
    routes, weights, sha256 = _routes(workload, sum(counts))
    for array in (routes, weights):
        array.flags.writeable = False
    ends = np.cumsum(counts)[:-1]
    return Routing(tuple(np.split(routes, ends)), tuple(np.split(weights, ends)), sha256)


def token_counts(workload: "Workload") -> list[int]:
    """Tokens of each source rank, without generating their routes."""
    return generators.token_counts(
        _stream(workload, "counts"),
        workload.ranks,
        workload.tokens_per_rank,
        workload.routing.uneven,
        workload.routing.empty_ranks,
    )


def check(
    spec: RoutingSpec, *, ranks: int, experts: int, top_k: int, tokens_per_rank: int
) -> str | None:
    """Why these routes cannot exist, or None. Cheap: reads no trace."""
    filled = experts - spec.empty_experts
    if experts % ranks:
        return f"{experts} experts cannot be split evenly over {ranks} ranks"
    if top_k > filled:
        less = f" ({spec.empty_experts} of {experts} are empty)" if spec.empty_experts else ""
        return f"top_k {top_k} is more than the {filled} experts with routes{less}"
    if tokens_per_rank < 1 or spec.empty_ranks >= ranks:
        return (
            f"no rank has a token: tokens_per_rank {tokens_per_rank}, empty_ranks "
            f"{spec.empty_ranks} of {ranks}"
        )
    if spec.generator == "hot_rank":
        assert spec.value is not None
        most = min(float(ranks), experts / top_k)
        if spec.value > most * (1 + 1e-9):
            return (
                f"hot_rank {spec.value:g} is more than {most:g}, the most that {ranks} ranks with "
                f"{experts // ranks} experts each allow at top_k {top_k}: "
                "min(ranks, experts / top_k)"
            )
    if spec.generator == "hot_expert":
        assert spec.value is not None
        least = top_k / filled
        if spec.value < least * (1 - 1e-9):
            return (
                f"hot_expert {spec.value:g} is less than {least:g}, the share of tokens that any "
                f"of {filled} experts gets at top_k {top_k}"
            )
    return None


def _routes(workload: "Workload", total: int) -> tuple[NDArray[np.int32], NDArray[np.float32], str]:
    """Ids and weights of all ranks' tokens, rank after rank, and the trace layer's hash."""
    spec, model = workload.routing, workload.model
    live = generators.live_routes(_stream(workload, "mask"), total, model.top_k, spec.masked)
    weights = generators.router_weights(_stream(workload, "weights"), total, model.top_k)
    sha256 = ""
    if spec.trace is not None:
        layer = trace.read(spec.trace, spec.layer or 0, model.experts, model.top_k)
        tokens = np.arange(total) % len(layer.topk_idx)
        routes, sha256 = layer.topk_idx[tokens], layer.sha256
        if layer.topk_weights is not None:
            weights = layer.topk_weights[tokens]
    else:
        routes = _draw(workload, live)
    routes = np.where(live, routes, np.int32(-1))
    weights = _normalised(weights, routes >= 0)
    if spec.generator != "hot_rank":
        # hot_rank chooses ranks itself; renaming its experts would cool the hot rank.
        new_ids = placement.new_ids(workload.placement, workload.ranks, model.experts)
        routes = np.append(new_ids, np.int32(-1))[routes]
    return routes, weights, sha256


def _draw(workload: "Workload", live: NDArray[np.bool_]) -> NDArray[np.int32]:
    spec, model = workload.routing, workload.model
    rng, value = _stream(workload, "routes"), spec.value or 0.0
    num_tokens = live.shape[0]
    if spec.generator == "hot_rank":
        return generators.hot_rank_routes(rng, live, workload.ranks, model.experts, value)
    rates = generators.popularity(
        _seeded("popularity", workload.seed, model.experts),
        spec.generator,
        value,
        model.experts,
        spec.empty_experts,
    )
    if spec.generator == "hot_expert":
        return generators.hot_expert_routes(rng, rates, num_tokens, model.top_k, value)
    return generators.weighted_choice(rng, rates, num_tokens, model.top_k)


def _normalised(weights: NDArray[np.float32], live: NDArray[np.bool_]) -> NDArray[np.float32]:
    weights = np.where(live, weights, np.float32(0))
    total = weights.sum(axis=1, keepdims=True, dtype=np.float64)
    total[total == 0] = 1.0
    shares: NDArray[np.float32] = (weights / total).astype(np.float32)
    return shares


def _stream(workload: "Workload", purpose: str) -> np.random.Generator:
    model = workload.model
    return _seeded(
        purpose,
        workload.seed,
        model.experts,
        model.top_k,
        workload.ranks,
        workload.tokens_per_rank,
    )


def _seeded(*content: str | int) -> np.random.Generator:
    digest = hashlib.sha256(repr(content).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))
