"""The MoK and push protocols between real processes, against an independent oracle."""

import os

import numpy as np
import pytest
from protocol_ranks import Pool, assert_right, batches, oracle, ranks, to_float, weights_of

from mokbench.twin import load_twin

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
PROTOCOLS = ["mok", "push"]
COUNTERS = {
    "mok": [
        "entry",
        "returned",
        "schedule",
        "ring_ready",
        "ring_free",
        "hidden_ready",
        "hidden_free",
    ],
    "push": ["dispatched", "combined"],
}


@pytest.fixture(scope="module")
def pool():
    made = Pool()
    yield made
    made.close()


def shape_of(num_ranks, **changes):
    shape = {
        "num_ranks": num_ranks,
        "num_experts": 2 * num_ranks,
        "top_k": 2,
        "max_tokens": 24,
        "hidden": 32,
        "intermediate": 16,
        "element_bytes": 4,
        "block_m": 8,
        "ring_tiles": 2,
        "hidden_ring_tiles": 2,
    }
    return {**shape, **changes}


def check_passes(case, shape, *passes):
    for batch_of, outputs in zip(passes, case.run(*passes), strict=True):
        for batch, y in zip(batch_of, outputs, strict=True):
            assert_right(shape, batch, y)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_passes_in_a_row_match_oracle(pool, protocol, num_ranks):
    """Every pass has other tokens, counts and routes; every step may be delayed."""
    shape = shape_of(num_ranks, top_k=min(3, 2 * num_ranks))
    rng = np.random.default_rng(num_ranks)
    passes = [
        batches(shape, seed, [int(t) for t in rng.integers(0, 25, num_ranks)], masked=0.2)
        for seed in range(6)
    ]
    with ranks(pool, protocol, shape, max_delay_us=200.0, delay_seed=num_ranks) as case:
        check_passes(case, shape, *passes)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_bf16(pool, protocol):
    shape = shape_of(4, element_bytes=2, top_k=4, num_experts=16)
    with ranks(pool, protocol, shape) as case:
        check_passes(case, shape, *(batches(shape, seed, [24, 5, 24, 17]) for seed in range(3)))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("top_k", [1, 5, 16])
def test_top_k(pool, protocol, top_k):
    """Up to a token that goes to every expert of every rank."""
    shape = shape_of(4, num_experts=16, top_k=top_k)
    with ranks(pool, protocol, shape) as case:
        check_passes(case, shape, batches(shape, 1, [24, 1, 13, 24]))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("tokens", [[0, 24, 3], [0, 0, 1], [0, 0, 0]], ids=str)
def test_ranks_without_tokens(pool, protocol, tokens):
    shape = shape_of(3)
    with ranks(pool, protocol, shape) as case:
        check_passes(case, shape, batches(shape, 1, tokens), batches(shape, 2, tokens[::-1]))


def routed(shape, seed, to):
    """Batches whose route k of each token goes to expert ``to(rank, token, k)``."""
    made = batches(shape, seed, [shape["max_tokens"]] * shape["num_ranks"])
    for rank, batch in enumerate(made):
        for token, k in np.ndindex(batch.idx.shape):
            batch.idx[token, k] = to(rank, token, k)
    return made


ROUTINGS = {
    "one_expert": (1, lambda rank, token, k: 5),
    "own_rank": (2, lambda rank, token, k: 2 * rank + k),
    "next_rank": (2, lambda rank, token, k: (2 * rank + 2 + k) % 6),
    "empty_experts": (2, lambda rank, token, k: 4 * k),
    "all_masked": (2, lambda rank, token, k: -1),
    "masked_rank": (2, lambda rank, token, k: -1 if rank == 1 else k),
    "masked_tokens": (2, lambda rank, token, k: -1 if token % 3 else k + 3),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", ROUTINGS)
def test_uneven_routings(pool, protocol, name):
    top_k, to = ROUTINGS[name]
    shape = shape_of(3, top_k=top_k)
    passes = [routed(shape, seed, to) for seed in range(2)]
    # An even pass between, so that ranks with and without rows change places.
    with ranks(pool, protocol, shape, max_delay_us=100.0) as case:
        check_passes(case, shape, passes[0], batches(shape, 9, [24] * 3), passes[1])


def test_token_without_routes_gives_zero(pool):
    shape = shape_of(2)
    batch_of = batches(shape, 3, [4, 4])
    batch_of[0].idx[1] = -1
    for protocol in PROTOCOLS:
        with ranks(pool, protocol, shape) as case:
            y = case.run(batch_of)[0][0]
            assert np.array_equal(y[1], np.zeros(32, np.float32))
            assert np.abs(y[0]).max() > 0


@pytest.mark.parametrize("workers", [1, 3])
def test_smallest_ring(pool, workers):
    """One tile of one row in each ring: every row waits for the one before."""
    shape = shape_of(4, block_m=1, ring_tiles=1, hidden_ring_tiles=1, pull_workers=workers)
    passes = [batches(shape, seed, [12, 0, 24, 7]) for seed in range(3)]
    with ranks(pool, "mok", shape, max_delay_us=50.0, delay_seed=workers) as case:
        check_passes(case, shape, *passes)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_counters_wrap(pool, protocol):
    """All counters start just below 2^32; ring sizes do not divide it."""
    shape = shape_of(3, ring_tiles=3, hidden_ring_tiles=3, block_m=3, pull_workers=2)
    start = 2**32 - 3
    passes = [batches(shape, seed, [24, 11, 20]) for seed in range(8)]
    with ranks(pool, protocol, shape, initial_epoch=start, max_delay_us=50.0) as case:
        check_passes(case, shape, *passes)
        counters = read_counters(case, protocol, shape)
        for name, values in counters.items():
            assert all(value < start for value in values), name
        assert set(counters["entry" if protocol == "mok" else "dispatched"]) == {5}


def read_counters(case, protocol, shape):
    """Field -> values of its counters, over all ranks."""
    twin = load_twin()
    config = twin.TwinConfig(**shape)
    fields = twin.layout(protocol, config)
    segment = twin.segment_bytes(protocol, config)
    words = case.memory().view(np.uint32)
    return {
        name: [
            int(words[(rank * segment + at) // 4])
            for rank in range(case.count)
            for at in range(fields[name][0], sum(fields[name]), 128)
        ]
        for name in COUNTERS[protocol]
    }


def test_bitwise_repeat_over_rings_workers_and_delays(pool):
    """Placement and sums do not depend on who was faster."""
    shape = shape_of(4, top_k=4, element_bytes=2)
    batch_of = batches(shape, 5, [24, 9, 24, 16])
    seen = set()
    for ring, hidden_ring, workers, delay in [(1, 1, 1, 0.0), (4, 2, 1, 100.0), (5, 3, 4, 100.0)]:
        changed = {
            **shape,
            "ring_tiles": ring,
            "hidden_ring_tiles": hidden_ring,
            "pull_workers": workers,
        }
        with ranks(pool, "mok", changed, max_delay_us=delay, delay_seed=ring) as case:
            for outputs in case.run(batch_of, batch_of):
                seen.add(b"".join(y.tobytes() for y in outputs))
    assert len(seen) == 1


def test_push_repeats_bit_for_bit(pool):
    shape = shape_of(4, top_k=4, element_bytes=2)
    batch_of = batches(shape, 5, [24, 9, 24, 16])
    with ranks(pool, "push", shape, max_delay_us=100.0) as case:
        first, second = case.run(batch_of, batch_of)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_push_phases_apart(pool):
    shape = shape_of(3)
    batch_of = batches(shape, 1, [24, 0, 5])
    with ranks(pool, "push", shape) as case:
        for _ in range(2):
            for batch, outcome in zip(
                batch_of, case.each("phases", [(b,) for b in batch_of]), strict=True
            ):
                assert outcome.message == ""
                assert_right(shape, batch, outcome.value)
        [early, *_] = case.all("call", "compute")
        assert (early.error, "out of order" in early.message) == ("RuntimeError", True)


def test_stats_count_copied_rows(pool):
    """MoK moves one row per route each way; push one per (token, rank), then sorts per route."""
    shape = shape_of(2, num_experts=8, top_k=3)
    batch_of = batches(shape, 4, [24, 10], masked=0.3)
    routes = sum(int((b.idx >= 0).sum()) for b in batch_of)
    pairs = sum(len({e // 4 for e in row if e >= 0}) for b in batch_of for row in b.idx.tolist())
    row_bytes = 32 * 4
    with ranks(pool, "mok", shape) as case:
        case.run(batch_of)
        sums = total_stats(case)
        assert (sums["pull_bytes"], sums["push_bytes"]) == (routes * row_bytes, routes * row_bytes)
        assert sums["pull_copy_s"] > 0
        assert total_stats(case)["pull_bytes"] == 0
    with ranks(pool, "push", shape) as case:
        case.run(batch_of)
        sums = total_stats(case)
        assert (sums["push_bytes"], sums["sort_bytes"]) == (pairs * row_bytes, routes * row_bytes)


def total_stats(case):
    stats = [o.value for o in case.all("call", "stats")]
    return {name: sum(s[name] for s in stats) for name in stats[0]}


def test_no_cpu_burnt_between_passes(pool):
    shape = shape_of(2)
    with ranks(pool, "mok", shape) as case:
        case.run(batches(shape, 1, [24, 24]))
        assert all(o.value < 0.03 for o in case.all("idle_cpu", 0.3))


def test_oracle_by_hand():
    """One token, one expert, the oracle itself, step by step in float64."""
    shape = shape_of(1, num_experts=1, top_k=1, max_tokens=1, hidden=8, intermediate=8)
    [batch] = batches(shape, 0, [1])
    w13, w2 = weights_of(shape)
    x = to_float(batch.x)[0].astype(np.float64)
    gate, up = w13[0, :8].astype(np.float64) @ x, w13[0, 8:].astype(np.float64) @ x
    want = batch.weights[0, 0] * (w2[0].astype(np.float64) @ (gate / (1 + np.exp(-gate)) * up))
    assert np.allclose(oracle(shape, batch)[0], want, rtol=1e-5)
