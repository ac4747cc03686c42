"""The push kernels against the FP32 oracle of all ranks, over the awkward workloads; in a CUDA
graph; and with a rank that does not come."""

from dataclasses import replace

import pytest
import torch
from cuda_ranks import follows, run_ranks

from mokbench import reference
from mokbench.fabric.fault import FaultError
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
MANY = Model("many", 512, 256, 128, 8)
EXTREMES = [{}, {"hot_expert": 1.0}, {"hot_rank": 2.5}, {"uneven": 1.0}]


def workload(model, ranks, tokens, spec):
    routing = RoutingSpec.model_validate(spec or "balanced")
    return Workload(model, ranks, tokens, Dtype.BF16, routing)


def workloads(ranks):
    for model in MODELS:
        for tokens in (1, 37, 300):
            for spec in SPECS:
                if ranks == 1 and ("hot_rank" in spec or "empty_ranks" in spec):
                    continue
                yield workload(model, ranks, tokens, spec)
    for spec in EXTREMES:
        if spec.get("hot_rank", 1.0) <= ranks:
            yield workload(MANY, ranks, 300, spec)


def prepared(fabric, work, gemm="ours"):
    layer = Layer.build(work, fabric.rank, str(fabric.device))
    push = system_class("push", "cuda")()
    options, tokens = PushOptions(gemm=gemm), max(1, layer.max_tokens)
    push.prepare(Setup(work, options, fabric.rank, tokens, layer.w13, layer.w2, fabric))
    return push, layer, (layer.x, layer.topk_idx, layer.topk_weights)


def check_all(fabric):
    results = []
    runs = [("ours", work) for work in workloads(fabric.ranks)]
    runs += [("torch", work) for _, work in runs[::4]]
    for gemm, work in runs:
        push, layer, here = prepared(fabric, work, gemm)
        first = push.run(*here).clone()
        push.check()
        push.run(*here).fill_(float("nan"))
        again = push.run(*here)
        push.check()
        sums = reference.error_sums(first, layer.truth)
        parts = fabric.gather((sums, torch.equal(first, again)))
        accuracy = reference.judge([part for part, _ in parts], work.dtype)
        same = all(repeat for _, repeat in parts)
        name = f"{gemm} {work.model.name} t{work.tokens_per_rank} {work.routing.label}"
        push.close()
        results.append((name, accuracy.ok, accuracy.rel_error, same))
    return results


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_push_matches_the_oracle(ranks):
    answers = run_ranks(ranks, check_all, timeout_s=150)
    assert all(isinstance(answer, list) for answer in answers), answers
    bad = [row for row in answers[0] if not (row[1] and row[3])]
    print(f"ranks {ranks}: {len(answers[0])} workloads, worst {max(r[2] for r in answers[0]):.4f}")
    assert not bad


def replay_with_other_inputs(fabric):
    work = workload(MANY, fabric.ranks, 300, {})
    push, _, here = prepared(fabric, work)
    first = push.run(*here).clone()
    push.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = push.run(*here)
    other = Layer.build(replace(work, seed=1), fabric.rank, str(fabric.device))
    there = (other.x, other.topk_idx, other.topk_weights)
    second = push.run(*there).clone()
    push.check()
    passes = [(None, first), (there, second)]
    same = follows(graph, y, here, passes, push.check, torch.equal)
    return [*same, not torch.equal(first, second)]


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_graph_gives_the_same_bits_and_follows_its_inputs(ranks):
    answers = run_ranks(ranks, replay_with_other_inputs)
    assert all(isinstance(answer, list) and all(answer) for answer in answers), answers


def lose_rank_one(fabric):
    push, _, here = prepared(fabric, workload(MANY, fabric.ranks, 37, {}))
    first = push.run(*here).clone()
    push.check()
    record = None
    # Rank 1 stays away from two passes, the second of which finds the fault of the first.
    for _ in range(2 if fabric.rank != 1 else 0):
        push.run(*here)
        try:
            push.check()
        except FaultError as error:
            record = error.record
    push._prepared.reset()
    again = push.run(*here).clone()
    push.check()
    return record, torch.equal(first, again)


def test_a_rank_that_never_arrives_is_named_and_the_next_pass_is_right():
    answers = run_ranks(4, lose_rank_one, wait_bound_s=1.0)
    assert all(isinstance(answer, tuple) for answer in answers), answers
    assert all(same for _, same in answers)
    for rank, (record, _) in enumerate(answers):
        if rank == 1:
            assert record is None
            continue
        assert (record["rank"], record["late_rank"], record["site"]) == (rank, 1, "dispatched")
        assert 0.9 < record["waited_s"] < 5
