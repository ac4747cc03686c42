"""The push kernels against the FP32 oracle of all ranks, over the awkward workloads."""

import pytest
import torch
from cuda_ranks import run_ranks

from mokbench import reference
from mokbench.layer import Layer
from mokbench.routing import RoutingSpec
from mokbench.systems import Setup, system_class
from mokbench.systems.options import PushOptions
from mokbench.workload import Dtype, Model, Workload

SPECS = [
    {},
    {"hot_rank": 1.5},
    {"masked": 1.0},
    {"masked": 0.3, "uneven": 1.0},
    {"empty_experts": 2, "empty_ranks": 1},
]
MODELS = [
    Model("small", 512, 256, 12, 3),
    Model("odd", 2880, 128, 24, 8),
    Model("k1", 256, 128, 12, 1),
]


def workloads(ranks):
    for model in MODELS:
        for tokens in (1, 37, 300):
            for spec in SPECS:
                if ranks == 1 and ("hot_rank" in spec or "empty_ranks" in spec):
                    continue
                routing = RoutingSpec.model_validate(spec or "balanced")
                yield Workload(model, ranks, tokens, Dtype.BF16, routing)


def check_all(fabric):
    results = []
    for work in workloads(fabric.ranks):
        layer = Layer.build(work, fabric.rank, str(fabric.device))
        here = (layer.x, layer.topk_idx, layer.topk_weights)
        push = system_class("push", "cuda")()
        options, tokens = PushOptions(), max(1, layer.max_tokens)
        push.prepare(Setup(work, options, fabric.rank, tokens, layer.w13, layer.w2, fabric))
        first = push.run(*here).clone()
        push.check()
        push.run(*here).fill_(float("nan"))
        again = push.run(*here)
        push.check()
        sums = reference.error_sums(first, layer.truth)
        parts = fabric.gather((sums, torch.equal(first, again)))
        accuracy = reference.judge([part for part, _ in parts], work.dtype)
        same = all(repeat for _, repeat in parts)
        name = f"{work.model.name} t{work.tokens_per_rank} {work.routing.label}"
        results.append((name, accuracy.ok, accuracy.rel_error, same))
    return results


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_push_matches_the_oracle(ranks):
    answers = run_ranks(ranks, check_all, timeout_s=150)
    assert all(isinstance(answer, list) for answer in answers), answers
    bad = [row for row in answers[0] if not (row[1] and row[3])]
    print(f"ranks {ranks}: {len(answers[0])} workloads, worst {max(r[2] for r in answers[0]):.4f}")
    assert not bad
