import math
from typing import Any

import numpy as np
import pytest
import torch

from mokbench import reference
from mokbench.reference import ErrorSums, Truth
from mokbench.routing import Routing, RoutingSpec, generate
from mokbench.streams import HOST, DeviceStreams, Streams
from mokbench.workload import Dtype, Model, Workload


def workload(
    routing: object = "balanced",
    *,
    dtype: Dtype = Dtype.BF16,
    model: Model | None = None,
    ranks: int = 4,
    tokens: int = 9,
    seed: int = 0,
) -> Workload:
    return Workload(
        model=model or Model("tiny", hidden=64, intermediate=32, experts=8, top_k=3),
        ranks=ranks,
        tokens_per_rank=tokens,
        dtype=dtype,
        routing=RoutingSpec.model_validate(routing),
        seed=seed,
    )


def float64(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    return tensor.double().numpy()


def looped(
    work: Workload, routing: Routing, rank: int, streams: Streams = HOST
) -> tuple[np.ndarray, np.ndarray]:
    """y and the sum of |terms| token by token, route by route, in float64."""
    model = work.model
    x = float64(reference.make_inputs(work, rank, streams).x)
    weights = reference.make_weights(work, range(model.experts), streams)
    y, terms = np.zeros_like(x), np.zeros_like(x)
    for t, row in enumerate(routing.topk_idx[rank]):
        for k, expert in enumerate(row):
            if expert < 0:
                continue
            w13, w2 = float64(weights.w13[expert]), float64(weights.w2[expert])
            gate, up = w13[: model.intermediate] @ x[t], w13[model.intermediate :] @ x[t]
            hidden = gate / (1 + np.exp(-gate)) * up
            weight = float(routing.topk_weights[rank][t, k])
            y[t] += weight * (w2 @ hidden)
            terms[t] += weight * (np.abs(w2) @ np.abs(hidden))
    return y, terms


@pytest.mark.parametrize("dtype", list(Dtype))
@pytest.mark.parametrize(
    "spec", ["balanced", "extreme", {"masked": 0.5, "uneven": 1.0}, {"empty_ranks": 2}], ids=str
)
def test_truth_is_the_layer_computed_in_loops(spec: object, dtype: Dtype) -> None:
    work = workload(spec, dtype=dtype)
    routing = generate(work)
    for rank in range(work.ranks):
        truth = reference.reference_truth(work, routing, rank)
        y, terms = looped(work, routing, rank)
        assert truth.y.dtype == torch.float32
        assert truth.y.shape == (routing.num_tokens[rank], 64)
        np.testing.assert_allclose(truth.y.numpy(), y, atol=2e-6)
        np.testing.assert_allclose(truth.terms.numpy(), terms, atol=2e-6)
        assert torch.equal(reference.reference_output(work, routing, rank), truth.y)


def test_weights_are_the_same_whoever_asks() -> None:
    work = workload()
    whole = reference.make_weights(work, range(8))
    part = reference.make_weights(work, range(2, 5))
    assert torch.equal(whole.w13[2:5], part.w13)
    assert torch.equal(whole.w2[2:5], part.w2)
    assert part.w13.shape == (3, 64, 64)
    assert part.w2.shape == (3, 64, 32)
    assert part.w13.dtype == torch.bfloat16
    assert not torch.equal(whole.w13[0], whole.w13[1])
    assert not torch.equal(whole.w13, reference.make_weights(workload(seed=1), range(8)).w13)


def test_inputs_differ_by_rank_and_grow_by_appending() -> None:
    few = [reference.make_inputs(workload(tokens=5), rank).x for rank in range(2)]
    many = reference.make_inputs(workload(tokens=9), 0).x
    assert few[0].shape == (5, 64)
    assert torch.equal(many[:5], few[0])
    assert not torch.equal(few[0], few[1])
    assert reference.make_inputs(workload({"uneven": 1.0}, tokens=9), 0).x.shape[0] in (0, 3, 6, 9)


def test_scales_are_as_stated_and_outputs_of_order_one() -> None:
    work = workload(dtype=Dtype.FP32, model=Model("m", 512, 256, 4, 2), ranks=1, tokens=200)
    x = reference.make_inputs(work, 0).x
    weights = reference.make_weights(work, range(4))
    assert x.mean().item() == pytest.approx(0, abs=0.02)
    assert x.std().item() == pytest.approx(1, rel=0.02)
    assert weights.w13.std().item() == pytest.approx(1 / math.sqrt(512), rel=0.01)
    assert weights.w2.std().item() == pytest.approx(1 / math.sqrt(256), rel=0.01)
    assert weights.w13.mean().item() == pytest.approx(0, abs=1e-3)
    y = reference.reference_output(work, generate(work), 0)
    assert 0.1 < y.square().mean().sqrt().item() < 1


PHILOX = DeviceStreams(torch.device("cpu"))


def test_a_devices_own_streams_give_the_same_bytes_whoever_asks() -> None:
    work = workload()
    whole = reference.make_weights(work, range(8), PHILOX)
    part = reference.make_weights(work, range(2, 5), PHILOX)
    assert torch.equal(whole.w13[2:5], part.w13)
    assert torch.equal(whole.w2[2:5], part.w2)
    assert not torch.equal(whole.w13[0], whole.w13[1])
    assert not torch.equal(whole.w13, reference.make_weights(work, range(8)).w13)
    assert not torch.equal(
        reference.make_inputs(work, 0, PHILOX).x, reference.make_inputs(work, 1, PHILOX).x
    )


def test_a_devices_own_streams_have_the_stated_scales() -> None:
    work = workload(dtype=Dtype.FP32, model=Model("m", 512, 256, 4, 2), ranks=1, tokens=200)
    x = reference.make_inputs(work, 0, PHILOX).x
    weights = reference.make_weights(work, range(4), PHILOX)
    assert x.mean().item() == pytest.approx(0, abs=0.02)
    assert x.std().item() == pytest.approx(1, rel=0.02)
    assert weights.w13.std().item() == pytest.approx(1 / math.sqrt(512), rel=0.01)
    assert weights.w2.std().item() == pytest.approx(1 / math.sqrt(256), rel=0.01)
    assert weights.w13.abs().max().item() <= math.sqrt(3 / 512)


def test_truth_of_a_devices_own_streams() -> None:
    work = workload({"masked": 0.5, "uneven": 1.0})
    routing = generate(work)
    for rank in range(work.ranks):
        truth = reference.reference_truth(work, routing, rank, PHILOX)
        y, terms = looped(work, routing, rank, PHILOX)
        np.testing.assert_allclose(truth.y.numpy(), y, atol=2e-6)
        np.testing.assert_allclose(truth.terms.numpy(), terms, atol=2e-6)


def test_the_truth_restores_the_matmul_precision() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        work = workload()
        reference.reference_truth(work, generate(work), 0)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def truth_of(*rows: list[float]) -> Truth:
    y = torch.tensor(rows)
    return Truth(y, y.abs() * 2)


def test_figures_by_hand() -> None:
    truth = truth_of([3.0, 4.0], [0.0, 12.0])
    y = truth.y + torch.tensor([[0.3, 0.4], [0.0, 0.0]])
    found = reference.compare(y, truth, Dtype.BF16)
    assert found.rel_error == pytest.approx(0.5 / 13)
    assert found.max_token_error == pytest.approx(0.5 / 5)
    assert found.max_error_over_terms == pytest.approx(0.05)
    assert (found.nan_count, found.tolerance, found.ok) == (0, 8e-3, False)


def test_ranks_are_joined_by_their_sums() -> None:
    parts = [ErrorSums(9.0, 100.0, 0.3, 0.1, 0), ErrorSums(16.0, 525.0, 0.2, 0.4, 0)]
    found = reference.judge(parts, Dtype.FP32)
    assert found.rel_error == pytest.approx(5 / 25)
    assert (found.max_token_error, found.max_error_over_terms) == (0.3, 0.4)
    assert found.tolerance == 1e-5


@pytest.mark.parametrize("dtype, good, bad", [("bf16", 7e-3, 9e-3), ("fp32", 9e-6, 1.2e-5)])
def test_tolerances(dtype: str, good: float, bad: float) -> None:
    truth = truth_of([1.0, 2.0], [2.0, 4.0])
    assert reference.compare(truth.y * (1 + good), truth, Dtype(dtype)).ok
    assert not reference.compare(truth.y * (1 + bad), truth, Dtype(dtype)).ok


def test_bf16_rounding_alone_passes() -> None:
    work = workload(tokens=50)
    routing = generate(work)
    truth = reference.reference_truth(work, routing, 0)
    found = reference.compare(truth.y.bfloat16(), truth, Dtype.BF16)
    assert found.ok
    assert 5e-4 < found.rel_error < 3e-3


def test_one_wrong_token_among_many_fails() -> None:
    y = torch.randn(40_000, 8, generator=torch.Generator().manual_seed(0))
    truth = Truth(y, y.abs())
    wrong = y.clone()
    wrong[12_345] = y[12_346]
    found = reference.compare(wrong, truth, Dtype.BF16)
    assert found.rel_error < found.tolerance
    assert found.max_token_error > 0.5
    assert not found.ok


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_never_pass(value: float) -> None:
    truth = truth_of([1.0, 2.0], [3.0, 4.0])
    y = truth.y.clone()
    y[1, 0] = value
    found = reference.compare(y, truth, Dtype.BF16)
    assert not found.ok
    assert found.nan_count == math.isnan(value)
    assert math.isinf(found.rel_error) == math.isinf(value)


def test_all_nan_does_not_pass_as_no_error() -> None:
    truth = truth_of([1.0, 2.0])
    found = reference.compare(torch.full((1, 2), math.nan), truth, Dtype.FP32)
    assert (found.nan_count, found.ok) == (2, False)


def test_a_reference_of_zeros_allows_zeros_only() -> None:
    zeros = Truth(torch.zeros(2, 3), torch.zeros(2, 3))
    exact = reference.compare(torch.zeros(2, 3), zeros, Dtype.BF16)
    assert (exact.rel_error, exact.max_error_over_terms, exact.ok) == (0.0, 0.0, True)
    off = reference.compare(torch.full((2, 3), 1e-30), zeros, Dtype.BF16)
    assert (off.rel_error, off.ok) == (math.inf, False)


def test_a_masked_token_must_be_zero_beside_others() -> None:
    truth = truth_of([0.0, 0.0], [3.0, 4.0])
    y = truth.y.clone()
    y[0, 0] = 1e-6
    found = reference.compare(y, truth, Dtype.BF16)
    assert found.rel_error < 1e-6
    assert not found.ok


def test_no_tokens() -> None:
    empty = Truth(torch.zeros(0, 64), torch.zeros(0, 64))
    assert reference.error_sums(torch.zeros(0, 64), empty) == ErrorSums(0, 0, 0, 0, 0)
    assert reference.compare(torch.zeros(0, 64), empty, Dtype.BF16).ok


def test_another_shape_is_an_error_not_a_broadcast() -> None:
    truth = truth_of([1.0, 2.0], [1.0, 2.0])
    with pytest.raises(ValueError, match=r"output is \(1, 2\), the reference \(2, 2\)"):
        reference.error_sums(torch.tensor([[1.0, 2.0]]), truth)
