"""All-to-all over NCCL against the FP32 oracle of all ranks, over the awkward workloads."""

import pytest
import torch
from cuda_ranks import run_ranks

from mokbench import reference
from mokbench.errors import UnsupportedError
from mokbench.layer import Layer
from mokbench.routing import RoutingSpec
from mokbench.systems import Setup
from mokbench.systems.cuda_alltoall import Alltoall
from mokbench.systems.options import AlltoallOptions
from mokbench.workload import Cell, Dtype, Model, Regime, Workload

SPECS = [
    "balanced",
    {"hot_rank": 1.5},
    {"hot_expert": 0.9},
    {"masked": 1.0},
    {"masked": 0.3, "uneven": 1.0},
    {"empty_experts": 2, "empty_ranks": 1},
]
MODELS = [Model("odd", 2880, 128, 24, 8), Model("k1", 256, 128, 12, 1)]


def workloads(ranks):
    """Each workload, and whether to compile for it: one does, since every routing has its own."""
    for model in MODELS:
        for tokens in (1, 300):
            for spec in SPECS:
                if ranks == 1 and ("hot_rank" in spec or "empty_ranks" in spec):
                    continue
                routing = RoutingSpec.model_validate(spec)
                work = Workload(model, ranks, tokens, Dtype.BF16, routing)
                yield work, (model.name, tokens, spec) == ("odd", 300, "balanced")


def check_all(fabric):
    results = []
    for work, compiles in workloads(fabric.ranks):
        layer = Layer.build(work, fabric.rank, fabric.device)
        options = AlltoallOptions(compile=compiles)
        system = Alltoall()
        system.prepare(
            Setup(work, options, fabric.rank, layer.max_tokens, layer.w13, layer.w2, fabric)
        )
        arguments = (layer.x, layer.topk_idx, layer.topk_weights)
        first = system.run(*arguments).clone()
        system.run(*arguments).fill_(float("nan"))
        system.dispatch(*arguments)
        system.compute()
        again = system.combine()
        sums = reference.error_sums(first, layer.truth)
        parts = fabric.gather((sums, torch.equal(first, again)))
        system.close()
        accuracy = reference.judge([part for part, _ in parts], work.dtype)
        same = all(repeat for _, repeat in parts)
        name = f"{work.model.name} t{work.tokens_per_rank} {work.routing.label}"
        results.append((name, accuracy.ok, accuracy.rel_error, same))
    return results


def refusal(ranks):
    work = Workload(MODELS[0], ranks, 300, Dtype.BF16, RoutingSpec())
    return Alltoall.supports(Cell("gpu", "cuda", "alltoall", (), work, Regime.ISOLATED))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_alltoall_matches_the_oracle(ranks):
    if reason := refusal(ranks):
        assert "NCCL 2.30" in reason
        pytest.skip(reason)
    answers = run_ranks(ranks, check_all, timeout_s=150)
    assert all(isinstance(answer, list) for answer in answers), answers
    print(f"ranks {ranks}: {len(answers[0])} workloads, worst {max(r[2] for r in answers[0]):.4f}")
    assert not [row for row in answers[0] if not (row[1] and row[3])]


def prepare_refuses(fabric):
    layer = Layer.build(Workload(MODELS[1], 2, 1, Dtype.BF16, RoutingSpec()), fabric.rank)
    system = Alltoall()
    try:
        system.prepare(
            Setup(layer.workload, AlltoallOptions(), fabric.rank, 1, layer.w13, layer.w2, fabric)
        )
    except UnsupportedError as error:
        return str(error)
    finally:
        system.close()
    return "prepared"


def test_an_older_nccl_on_a_shared_gpu_is_refused_before_it_is_asked():
    if not refusal(2):
        pytest.skip("two ranks can run here")
    answers = run_ranks(2, prepare_refuses)
    assert all("NCCL 2.30 or newer" in answer for answer in answers), answers
