import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mokbench import metrics
from mokbench.errors import ConfigError, UnsupportedError
from mokbench.routing import Routing, RoutingSpec, check, generate, token_counts
from mokbench.workload import Dtype, Model, Workload


def workload(
    routing: object = "balanced",
    *,
    experts: int = 16,
    top_k: int = 4,
    ranks: int = 4,
    tokens: int = 64,
    seed: int = 0,
    placement: str = "contiguous",
    dtype: Dtype = Dtype.BF16,
    hidden: int = 64,
) -> Workload:
    return Workload(
        model=Model("test", hidden, 64, experts, top_k),
        ranks=ranks,
        tokens_per_rank=tokens,
        dtype=dtype,
        routing=RoutingSpec.model_validate(routing),
        placement=placement,
        seed=seed,
    )


def assert_valid(routing: Routing, work: Workload) -> None:
    assert len(routing.topk_idx) == len(routing.topk_weights) == work.ranks
    assert max(routing.num_tokens) <= work.tokens_per_rank
    for idx, weights in zip(routing.topk_idx, routing.topk_weights, strict=True):
        assert idx.dtype == np.int32
        assert weights.dtype == np.float32
        assert idx.shape == weights.shape
        assert idx.shape[1] == work.model.top_k
        for row, row_weights in zip(idx, weights, strict=True):
            live = row[row >= 0]
            assert len(set(live.tolist())) == len(live)
            assert live.max(initial=0) < work.model.experts
            assert row.min() >= -1
            assert (row_weights[row >= 0] > 0).all()
            assert (row_weights[row < 0] == 0).all()
            assert row_weights.sum() == pytest.approx(1.0 if len(live) else 0.0, abs=1e-6)


SPECS = [
    "balanced",
    "typical",
    "skewed",
    "extreme",
    {"dirichlet": 0.05},
    {"zipf": 5, "empty_experts": 4},
    {"hot_expert": 0.5, "masked": 0.3},
    {"hot_rank": 2.5},
    {"hot_rank": 1.5, "masked": 0.25, "uneven": 0.5, "empty_ranks": 1},
    {"lognormal": 5, "empty_ranks": 3},
    {"masked": 1.0},
    {"uneven": 1.0},
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_generator_gives_valid_routes(spec: object) -> None:
    work = workload(spec)
    assert_valid(generate(work), work)


@pytest.mark.parametrize(
    "experts, top_k, ranks", [(1, 1, 1), (16, 16, 2), (8, 8, 8), (1024, 16, 8)]
)
@pytest.mark.parametrize("spec", ["balanced", "extreme", {"hot_rank": 1.0}], ids=str)
def test_extreme_shapes(spec: object, experts: int, top_k: int, ranks: int) -> None:
    work = workload(spec, experts=experts, top_k=top_k, ranks=ranks, tokens=3)
    assert_valid(generate(work), work)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_check_agrees_with_generate(data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from([1, 2, 3, 4]))
    name, values = data.draw(
        st.sampled_from(
            [
                ("hot_rank", st.floats(1, 5)),
                ("hot_expert", st.floats(0.01, 1)),
                ("zipf", st.floats(0.01, 5)),
                ("dirichlet", st.floats(0.01, 10)),
            ]
        )
    )
    empty = 0 if name == "hot_rank" else data.draw(st.integers(0, 4))
    spec = {
        name: data.draw(values),
        "masked": data.draw(st.floats(0, 1)),
        "uneven": data.draw(st.floats(0, 1)),
        "empty_ranks": data.draw(st.integers(0, 2)),
        "empty_experts": empty,
    }
    work = workload(
        spec,
        experts=ranks * data.draw(st.integers(1, 4)),
        top_k=data.draw(st.integers(1, 6)),
        ranks=ranks,
        tokens=data.draw(st.integers(1, 9)),
    )
    model = work.model
    reason = check(
        work.routing,
        ranks=ranks,
        experts=model.experts,
        top_k=model.top_k,
        tokens_per_rank=work.tokens_per_rank,
    )
    if reason is None:
        routing = generate(work)
        assert_valid(routing, work)
        counts = metrics.expert_counts(routing, model.experts)
        assert (counts == 0).sum() >= empty
    else:
        with pytest.raises(UnsupportedError, match="routing"):
            generate(work)


def test_same_workload_same_bytes_in_another_process() -> None:
    script = (
        "from mokbench.routing import *; from mokbench.workload import *\n"
        "for s in ('extreme', {'hot_rank': 2.0, 'masked': 0.1}):\n"
        "    print(generate(Workload(Model('m', 64, 64, 16, 4), 4, 64, Dtype.BF16,"
        " RoutingSpec.model_validate(s))).digest())"
    )
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    here = [generate(workload(s)).digest() for s in ("extreme", {"hot_rank": 2.0, "masked": 0.1})]
    assert out.stdout.split() == here


def test_routes_depend_on_the_seed_and_not_on_dtype_or_hidden() -> None:
    base = generate(workload("extreme")).digest()
    assert generate(workload("extreme", dtype=Dtype.FP32, hidden=128)).digest() == base
    assert generate(workload({"zipf": 0.65})).digest() == base  # the preset is only a label
    assert generate(workload("extreme", seed=1)).digest() != base
    assert generate(workload("skewed")).digest() != base


def test_mask_leaves_the_other_routes_alone() -> None:
    plain = np.concatenate(generate(workload("skewed")).topk_idx)
    masked = np.concatenate(generate(workload({"preset": "skewed", "masked": 0.3})).topk_idx)
    assert (masked < 0).sum() == round(0.3 * masked.size)
    assert np.array_equal(masked[masked >= 0], plain[masked >= 0])


def test_popular_experts_stay_popular_with_more_tokens() -> None:
    few = metrics.expert_counts(generate(workload("extreme", tokens=128)), 16)
    many = metrics.expert_counts(generate(workload("extreme", tokens=512)), 16)
    assert few.argmax() == many.argmax()


def test_arrays_are_read_only() -> None:
    routing = generate(workload())
    with pytest.raises(ValueError, match="read-only"):
        routing.topk_idx[0][0, 0] = 1


def test_digest_sees_every_part() -> None:
    idx, weights = np.array([[0, 1]], np.int32), np.array([[0.5, 0.5]], np.float32)
    base = Routing((idx, idx), (weights, weights))
    assert Routing((idx, idx), (weights, weights)).digest() == base.digest()
    moved = Routing((np.concatenate([idx, idx]), idx[:0]), (np.tile(weights, (2, 1)), weights[:0]))
    other_weights = Routing((idx, idx), (weights, weights[:, ::-1] * np.float32(1.5)))
    other_trace = Routing((idx, idx), (weights, weights), "abc")
    assert len({r.digest() for r in (base, moved, other_weights, other_trace)}) == 4


def rank_loads(routing: Routing, work: Workload) -> NDArray[np.int64]:
    loads: NDArray[np.int64] = metrics.route_matrix(routing, work.model.experts, work.ranks).sum(
        axis=0
    )
    return loads


@pytest.mark.parametrize("ratio", [1.0, 1.5, 2.5, 4.0])
@pytest.mark.parametrize("tokens", [1, 7, 128])
@pytest.mark.parametrize("extra", [{}, {"masked": 0.2}, {"uneven": 0.7}], ids=str)
def test_hot_rank_hits_its_ratio(ratio: float, tokens: int, extra: dict[str, float]) -> None:
    work = workload({"hot_rank": ratio, **extra}, experts=32, top_k=8, tokens=tokens)
    routing = generate(work)
    loads = rank_loads(routing, work)
    hot = math.floor(routing.num_routes * ratio / 4 + 0.5)
    assert max(hot, math.ceil((routing.num_routes - hot) / 3)) == loads.max()
    assert hot in loads


def test_hot_rank_splits_every_token_alike() -> None:
    work = workload({"hot_rank": 2.5}, experts=32, top_k=8, tokens=100)
    routing = generate(work)
    hot = rank_loads(routing, work).argmax()
    per_token = np.concatenate([(idx // 8 == hot).sum(axis=1) for idx in routing.topk_idx])
    assert set(per_token) == {5}  # 8 * 2.5 / 4


def test_hot_rank_keeps_its_ratio_under_every_placement() -> None:
    work = workload({"hot_rank": 2.5}, experts=32, top_k=8, placement="round_robin")
    assert metrics.imbalance(generate(work), 32, 4).rank_max_over_mean == pytest.approx(2.5)


def test_hot_expert_gets_its_share_of_tokens() -> None:
    work = workload({"hot_expert": 0.7}, tokens=100)
    counts = metrics.expert_counts(generate(work), 16)
    assert counts.max() == 280  # of 400 tokens
    rest = np.sort(counts)[:-1]
    assert rest.max() / rest.mean() < 1.4


def test_empty_experts_and_ranks() -> None:
    work = workload({"zipf": 1.0, "empty_experts": 6, "empty_ranks": 2}, tokens=500)
    routing = generate(work)
    assert (metrics.expert_counts(routing, 16) == 0).sum() == 6
    assert sorted(routing.num_tokens) == [0, 0, 500, 500]


def test_uneven_token_counts_follow_their_formula() -> None:
    work = workload({"uneven": 0.6}, tokens=100)
    assert sorted(token_counts(work)) == [40, 60, 80, 100]
    assert list(generate(work).num_tokens) == token_counts(work)
    assert sorted(token_counts(workload({"uneven": 1.0, "empty_ranks": 1}, tokens=10))) == [
        0,
        0,
        5,
        10,
    ]


def test_round_robin_moves_expert_e_to_rank_e_mod_ranks() -> None:
    plain = np.concatenate(generate(workload("extreme")).topk_idx)
    moved = np.concatenate(generate(workload("extreme", placement="round_robin")).topk_idx)
    assert np.array_equal(moved // 4, plain % 4)
    assert np.array_equal(moved % 4, plain // 4)


def test_round_robin_leaves_masked_routes_masked() -> None:
    plain = np.concatenate(generate(workload({"masked": 0.5})).topk_idx)
    moved = np.concatenate(generate(workload({"masked": 0.5}, placement="round_robin")).topk_idx)
    assert np.array_equal(moved < 0, plain < 0)


def test_unknown_placement_is_an_error_that_lists_the_allowed_ones() -> None:
    with pytest.raises(ConfigError, match="'scattered'; allowed: contiguous, round_robin"):
        generate(workload(placement="scattered"))


@pytest.mark.parametrize(
    "spec, shape, reason",
    [
        ({"hot_rank": 2.5}, {"ranks": 2}, "more than 2, the most that 2 ranks with 8 experts"),
        ({"hot_rank": 2.5}, {"top_k": 8}, "more than 2, the most that 4 ranks with 4 experts"),
        ({"hot_expert": 0.1}, {}, "less than 0.25, the share of tokens that any of 16 experts"),
        ({"empty_experts": 13}, {}, r"top_k 4 is more than the 3 experts .*\(13 of 16 are empty\)"),
        ("balanced", {"top_k": 17}, "top_k 17 is more than the 16 experts"),
        ("balanced", {"ranks": 3}, "16 experts cannot be split evenly over 3 ranks"),
        ("balanced", {"tokens": 0}, "no rank has a token"),
        ({"empty_ranks": 4}, {}, "no rank has a token: .* empty_ranks 4 of 4"),
    ],
    ids=str,
)
def test_impossible_routes_say_why(spec: object, shape: dict[str, int], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        generate(workload(spec, **shape))  # type: ignore[arg-type]
