"""local and alltoall on a GPU against the FP32 oracle, over the awkward workloads."""

import pytest
import torch
from cuda_ranks import run_ranks

from mokbench import reference
from mokbench.layer import Layer
from mokbench.measure.gpu_timing import GpuTimer
from mokbench.routing_spec import RoutingSpec
from mokbench.systems import Setup, system_class
from mokbench.systems.options import SYSTEM_OPTIONS
from mokbench.workload import Dtype, Model, Workload

SPECS = ["balanced", {"hot_expert": 0.9}, {"masked": 1.0}, {"masked": 0.3}, {"empty_experts": 3}]
# One compilation a model and number of tokens, so there are few of them.
CASES = [
    (Model("small", 512, 256, 12, 3), (0, 1, 300)),
    (Model("odd", 2880, 128, 24, 8), (37,)),
    (Model("k1", 256, 128, 12, 1), (37,)),
]


def check_all(fabric, name):
    results = []
    for model, tokens in CASES:
        for count in tokens:
            for spec in SPECS:
                routing = RoutingSpec.model_validate(spec)
                work = Workload(model, fabric.ranks, count, Dtype.BF16, routing)
                results.append(
                    (f"{model.name} t{count} {routing.label}", *check(fabric, name, work))
                )
    return results


def check(fabric, name, work):
    """Whether it is right, its error, the same bits twice, and the same from a graph."""
    layer = Layer.build(work, fabric.rank, str(fabric.device))
    system = system_class(name, "cuda")()
    options = SYSTEM_OPTIONS[name]()
    tokens = max(1, layer.max_tokens)
    system.prepare(Setup(work, options, fabric.rank, tokens, layer.w13, layer.w2, fabric))

    def step():
        return system.run(layer.x, layer.topk_idx, layer.topk_weights)

    first = step().clone()
    again = step().clone()
    accuracy = reference.compare(first, layer.truth, Dtype.BF16)
    graphed = True
    if name == "local" and work.tokens_per_rank == 37:
        replay = GpuTimer(fabric).graphed(step)
        graphed = torch.equal(replay(), first)
    system.close()
    return accuracy.ok, accuracy.rel_error, torch.equal(first, again), graphed


def local(fabric):
    return check_all(fabric, "local")


def alltoall(fabric):
    return check_all(fabric, "alltoall")


@pytest.mark.parametrize("body", [local, alltoall])
def test_a_rank_alone_matches_the_oracle(body):
    (answers,) = run_ranks(1, body, timeout_s=150)
    assert isinstance(answers, list), answers
    print(f"{body.__name__}: {len(answers)} workloads, worst {max(a[2] for a in answers):.4f}")
    assert [a for a in answers if not (a[1] and a[3] and a[4])] == []


def inputs(fabric):
    work = Workload(Model("m", 512, 256, 12, 3), 4, 64, Dtype.BF16, RoutingSpec())
    device = str(fabric.device)
    other = reference.make_weights(work, range(5, 7), device)
    whole = reference.make_weights(work, range(12), device)
    sums = [float(t.double().sum()) for t in (other.w13, other.w2)]
    same = torch.equal(other.w13, whole.w13[5:7]) and torch.equal(other.w2, whole.w2[5:7])
    xs = [float(reference.make_inputs(work, r, device).x.double().sum()) for r in range(4)]
    return same, sums, xs


def test_every_rank_makes_the_same_bytes_on_its_device():
    first, second = run_ranks(2, inputs)
    assert not isinstance(first, str), first
    assert first[0]
    assert first == second
    assert len(set(first[2])) == 4, "ranks have different tokens"
