"""Seeded routes: expert popularity, K distinct experts per token, hot experts and hot ranks.

Every function takes its own ``numpy`` Generator and nothing global. Keys are float64: with float32
two keys tie often enough for the CPU's partition code to decide a route.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Floats = NDArray[np.float64]
Rng = np.random.Generator

_CHUNK_KEYS = 2**20  # keys held at once: 8 MiB, and as much again for their indices


def token_counts(
    rng: Rng, ranks: int, tokens_per_rank: int, uneven: float, empty_ranks: int
) -> list[int]:
    """Tokens of each source rank, at most ``tokens_per_rank``.

    ``empty_ranks`` ranks have none. The other n have round(T * (1 - uneven * j / (n - 1))) for
    j = 0 .. n - 1, in an order drawn by the seed; the first has T.
    """
    order = rng.permutation(ranks)
    full = ranks - empty_ranks
    counts = [0] * ranks
    for j, rank in enumerate(order[:full]):
        share = 1 - uneven * j / max(1, full - 1)
        counts[rank] = int(np.floor(tokens_per_rank * share + 0.5))
    return counts


def popularity(rng: Rng, generator: str, value: float, experts: int, empty: int) -> Floats:
    """Relative rate at which each expert is chosen, float64 [experts]; ``empty`` of them have 0.

    Rates are at least 1e-9 of the largest, so that K experts can always be found.
    """
    if generator == "lognormal":
        rates = np.exp(value * rng.standard_normal(experts))
    elif generator == "zipf":
        rates = np.arange(1, experts + 1, dtype=np.float64) ** -value
    elif generator == "dirichlet":
        rates = rng.standard_gamma(value, experts)
    else:
        rates = np.ones(experts)
    rates = np.asarray(rng.permutation(rates), dtype=np.float64)
    if not rates.max() > 0:
        rates[0] = 1.0
    clipped: Floats = np.maximum(rates / rates.max(), 1e-9)
    clipped[rng.permutation(experts)[:empty]] = 0.0
    return clipped


def weighted_choice(
    rng: Rng,
    rates: Floats,
    num_tokens: int,
    top_k: int,
    always: tuple[int, NDArray[np.bool_]] | None = None,
) -> Ids:
    """K distinct experts per token, int32 [num_tokens, top_k], drawn without replacement.

    Expert e finishes an exponential race at rate ``rates[e]`` and the first K win, which is the
    Gumbel top-k trick; a row is in order of finish. ``always`` = (expert, bool [num_tokens]) puts
    that expert into the rows that are true and keeps it out of the others.
    """
    mean_time = np.full(len(rates), np.inf)
    np.divide(1.0, rates, out=mean_time, where=rates > 0)
    routes = np.empty((num_tokens, top_k), dtype=np.int32)
    for rows in _chunks(num_tokens, len(rates)):
        times = rng.standard_exponential((rows.stop - rows.start, len(rates)))
        times += np.finfo(np.float64).tiny  # 0 * inf would be nan
        times *= mean_time
        if always is not None:
            expert, chosen = always
            times[:, expert] = np.where(chosen[rows], 0.0, np.inf)
        routes[rows] = _smallest(times, top_k)
    return routes


def hot_expert_routes(rng: Rng, rates: Floats, num_tokens: int, top_k: int, share: float) -> Ids:
    """Give round(share * num_tokens) tokens the hot expert; draw their other experts evenly."""
    hot = int(rng.choice(np.flatnonzero(rates > 0)))
    chosen = np.zeros(num_tokens, dtype=np.bool_)
    chosen[rng.permutation(num_tokens)[: int(np.floor(share * num_tokens + 0.5))]] = True
    return weighted_choice(rng, rates, num_tokens, top_k, (hot, chosen))


def hot_rank_routes(
    rng: Rng, live: NDArray[np.bool_], ranks: int, experts: int, ratio: float
) -> Ids:
    """Give the hot rank ``ratio`` times the mean: int32 [num_tokens, top_k], -1 if not live.

    The hot rank gets round(live routes * ratio / ranks) routes, every token giving it the floor or
    the ceiling of its own share. Experts are drawn evenly inside the hot rank and inside the rest;
    then routes move between the other ranks until none exceeds the hot one.
    """
    local = experts // ranks
    hot = int(rng.integers(ranks))
    num_live = live.sum(axis=1)
    shares = np.floor(np.cumsum(num_live) * (ratio / ranks) + 0.5).astype(np.int64)
    num_hot = np.diff(shares, prepend=0)
    hot_experts = np.arange(hot * local, (hot + 1) * local)
    rest = np.setdiff1d(np.arange(experts), hot_experts)
    routes = np.full(live.shape, -1, dtype=np.int32)
    for rows in _chunks(live.shape[0], experts):
        packed = _pick_from_both(rng, hot_experts, rest, num_hot[rows], num_live[rows])
        # Live positions first, in order, so that the packed ids land on them.
        width = packed.shape[1]
        positions = np.argsort(~live[rows], axis=1, kind="stable")[:, :width]
        np.put_along_axis(routes[rows], positions, packed, axis=1)
    _level_other_ranks(rng, routes, hot, ranks, local)
    return routes


def _pick_from_both(
    rng: Rng,
    hot_experts: NDArray[np.int64],
    rest: NDArray[np.int64],
    num_hot: NDArray[np.int64],
    num_live: NDArray[np.int64],
) -> Ids:
    """Per token ``num_hot`` of the hot experts and the rest of ``num_live``, shuffled, then -1."""
    width = int(num_live.max(initial=0))
    picks, valid = [], []
    for pool, wanted in ((hot_experts, num_hot), (rest, num_live - num_hot)):
        most = min(width, len(pool))
        times = rng.standard_exponential((len(num_hot), len(pool)))
        picks.append(pool[_smallest(times, most)])
        valid.append(np.arange(most) < wanted[:, None])
    ids, keep = np.concatenate(picks, axis=1), np.concatenate(valid, axis=1)
    order = np.where(keep, rng.random(ids.shape), np.inf).argsort(axis=1)[:, :width]
    ids = np.where(keep, ids, -1)
    return np.take_along_axis(ids, order, axis=1).astype(np.int32)


def _level_other_ranks(rng: Rng, routes: Ids, hot: int, ranks: int, local: int) -> None:
    """Move single routes, in place, until no other rank has more than the hot one."""
    flat = routes.reshape(-1)
    owner = np.where(flat < 0, -1, flat // local)
    loads = np.bincount(owner[owner >= 0], minlength=ranks)
    others = [rank for rank in range(ranks) if rank != hot]
    if not others:
        return
    most = max(int(loads[hot]), -(-int(loads[others].sum()) // len(others)))
    for rank in others:
        if loads[rank] <= most:
            continue
        for route in rng.permutation(np.flatnonzero(owner == rank)):
            if loads[rank] == most:
                break
            target = min((r for r in others if loads[r] < most), key=lambda r: loads[r])
            free = np.setdiff1d(
                np.arange(target * local, (target + 1) * local), routes[route // routes.shape[1]]
            )
            if free.size:
                flat[route] = rng.choice(free)
                loads[rank] -= 1
                loads[target] += 1


def live_routes(rng: Rng, num_tokens: int, top_k: int, masked: float) -> NDArray[np.bool_]:
    """Bool [num_tokens, top_k]: false on exactly round(masked * routes) random routes."""
    total = num_tokens * top_k
    live = np.ones(total, dtype=np.bool_)
    dropped = int(np.floor(masked * total + 0.5))
    if dropped:
        live[rng.permutation(total)[:dropped]] = False
    return live.reshape(num_tokens, top_k)


def router_weights(rng: Rng, num_tokens: int, top_k: int) -> NDArray[np.float32]:
    """Positive weights before normalisation, float32: a softmax's shape without its exp.

    Exponential variates are what exp(logit) is for Gumbel logits; 0.25 keeps the least of K away
    from 0. No exp: its last bit differs between CPUs.
    """
    return rng.standard_exponential((num_tokens, top_k), dtype=np.float32) + np.float32(0.25)


def _smallest(keys: Floats, count: int) -> NDArray[np.int64]:
    """Columns of each row's ``count`` smallest keys, in increasing order of key."""
    if count == 0 or keys.shape[0] == 0:
        return np.empty((keys.shape[0], count), dtype=np.int64)
    found = np.argpartition(keys, count - 1, axis=1)[:, :count]
    order = np.argsort(np.take_along_axis(keys, found, axis=1), axis=1, kind="stable")
    return np.take_along_axis(found, order, axis=1)


def _chunks(num_rows: int, row_keys: int) -> Iterator[slice]:
    step = max(1, _CHUNK_KEYS // row_keys)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))
