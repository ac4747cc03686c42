"""All-to-all over NCCL against the FP32 oracle of all ranks, over the awkward workloads."""

import pytest
import torch
from cuda_ranks import run_ranks

from mokbench import reference
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


def workloads(model, ranks):
    for tokens in (1, 300):
        for spec in SPECS:
            if ranks == 1 and ("hot_rank" in spec or "empty_ranks" in spec):
                continue
            yield Workload(model, ranks, tokens, Dtype.BF16, RoutingSpec.model_validate(spec))


def check(system, layer, fabric):
    """Name, verdict, error and whether a second run gave the same bits, over all ranks."""
    arguments = (layer.x, layer.topk_idx, layer.topk_weights)
    first = system.run(*arguments).clone()
    system.run(*arguments).fill_(float("nan"))
    system.dispatch(*arguments)
    system.compute()
    again = system.combine()
    sums = reference.error_sums(first, layer.truth)
    parts = fabric.gather((sums, torch.equal(first, again)))
    accuracy = reference.judge([part for part, _ in parts], Dtype.BF16)
    work = layer.workload
    name = f"{work.model.name} t{work.tokens_per_rank} {work.routing.label}"
    return name, accuracy.ok, accuracy.rel_error, all(repeat for _, repeat in parts)


def check_all(fabric):
    """One connection a model: its weights are the same for every routing."""
    results = []
    for model, compiles in [(MODELS[0], False), (MODELS[1], False), (MODELS[0], True)]:
        layers = [
            Layer.build(work, fabric.rank, fabric.device) for work in workloads(model, fabric.ranks)
        ]
        if compiles:  # every routing has its own shapes, so one balanced workload stands for all
            layers = [layer for layer in layers if layer.workload.tokens_per_rank == 300][:1]
        work, options = layers[0].workload, AlltoallOptions(compile=compiles)
        system = Alltoall()
        system.prepare(Setup(work, options, fabric.rank, 300, layers[0].w13, layers[0].w2, fabric))
        results += [check(system, layer, fabric) for layer in layers]
        system.close()
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
