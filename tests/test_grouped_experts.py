"""The device-agnostic parts of the cuda fabric's plain PyTorch systems, on CPU tensors."""

import threading
from types import SimpleNamespace

import pytest
import torch

from mokbench import reference
from mokbench.fabric import nccl
from mokbench.layer import Layer
from mokbench.routing import RoutingSpec
from mokbench.systems import Setup, cuda_alltoall, cuda_local, grouped_experts
from mokbench.systems.options import AlltoallOptions, LocalOptions
from mokbench.workload import Dtype, Model, Workload

MODELS = [
    Model("odd", 96, 48, 12, 8),
    Model("k1", 64, 32, 12, 1),
    Model("k16", 64, 32, 36, 16),
]
SPECS = ["balanced", {"hot_expert": 0.9}, {"empty_experts": 2, "masked": 0.4}, {"masked": 1.0}]
EXCHANGE_SPECS = [*SPECS, {"hot_rank": 1.5}, {"uneven": 1.0, "masked": 0.3, "empty_ranks": 1}]


def workload(model, spec, *, ranks=1, tokens=37):
    return Workload(model, ranks, tokens, Dtype.BF16, RoutingSpec.model_validate(spec))


@pytest.fixture(autouse=True)
def any_device(monkeypatch):
    monkeypatch.setattr(cuda_local, "require_fast_kernels", lambda: None)
    monkeypatch.setattr(cuda_alltoall, "require_fast_kernels", lambda: None)


@pytest.fixture
def poisoned_tails(monkeypatch):
    """grouped_mm writes no row beyond the last group's end; make what lies there visible."""
    grouped_mm = torch._grouped_mm

    def poisoned(rows, weights, ends):
        assert ends.dtype == torch.int32
        out = grouped_mm(rows, weights, ends)
        out[int(ends[-1]) :] = float("nan")
        return out

    monkeypatch.setattr(torch, "_grouped_mm", poisoned)


def setup_of(layer, rank, options):
    fabric = SimpleNamespace(rank=rank, ranks=layer.workload.ranks, ranks_per_gpu=1)
    return Setup(layer.workload, options, rank, layer.max_tokens, layer.w13, layer.w2, fabric)


@pytest.mark.parametrize("num_routes", [0, 1, 600, 5000])
def test_routes_are_sorted_by_expert_and_stable(num_routes):
    generator = torch.Generator().manual_seed(0)
    topk_idx = torch.randint(-1, 12, (num_routes, 1), generator=generator, dtype=torch.int32)
    order, ends = grouped_experts.sort_routes(topk_idx, 3, 5)
    wanted = [(e, i) for i, e in enumerate(topk_idx.flatten().tolist()) if 3 <= e < 8]
    assert order[: len(wanted)].tolist() == [i for _, i in sorted(wanted)]
    counts = [sum(e == expert for e, _ in wanted) for expert in range(3, 8)]
    assert ends.tolist() == torch.tensor(counts).cumsum(0).tolist()
    places = grouped_experts.inverse(order)
    assert places[order].tolist() == list(range(num_routes))


@pytest.mark.usefixtures("poisoned_tails")
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_local_matches_the_truth(model, spec):
    layer = Layer.build(workload(model, spec), 0)
    local = cuda_local.Local()
    local.prepare(setup_of(layer, 0, LocalOptions(compile=False)))
    for rows in (layer.x.shape[0], 1, 0):
        y = local.run(layer.x[:rows], layer.topk_idx[:rows], layer.topk_weights[:rows])
        truth = reference.Truth(layer.truth.y[:rows], layer.truth.terms[:rows])
        accuracy = reference.compare(y, truth, Dtype.BF16)
        assert accuracy.ok, accuracy
        assert y.dtype == torch.bfloat16
    local.close()


@pytest.mark.slow
def test_compiled_is_one_graph_with_the_same_result():
    layer = Layer.build(workload(MODELS[0], {"masked": 0.3}), 0)
    local = cuda_local.Local()
    local.prepare(setup_of(layer, 0, LocalOptions()))
    y = local.run(layer.x, layer.topk_idx, layer.topk_weights)
    assert reference.compare(y, layer.truth, Dtype.BF16).ok
    assert torch.equal(y, local.run(layer.x, layer.topk_idx, layer.topk_weights))
    local.close()


class ThreadExchange:
    """all_to_all_single among threads: what each rank sends is laid out, then picked up."""

    def __init__(self, ranks):
        self.barrier = threading.Barrier(ranks, timeout=20)
        self.rank = threading.local()
        self.sent = [[]] * ranks

    def __call__(self, out, rows, recv=None, send=None, group=None):
        me, ranks = self.rank.value, len(self.sent)
        parts = rows.split(send or [len(rows) // ranks] * ranks)
        self.sent[me] = [part.clone() for part in parts]
        self.barrier.wait()
        received = [parts[me] for parts in self.sent]
        if recv is not None:
            assert [len(part) for part in received] == recv
        out.copy_(torch.cat(received))
        self.barrier.wait()


def run_alltoall(work, exchange):
    layers = [Layer.build(work, rank) for rank in range(work.ranks)]
    outputs = [None] * work.ranks

    def rank_body(rank):
        exchange.rank.value = rank
        layer = layers[rank]
        system = cuda_alltoall.Alltoall()
        system.prepare(setup_of(layer, rank, AlltoallOptions(compile=False)))
        arguments = (layer.x, layer.topk_idx, layer.topk_weights)
        first = system.run(*arguments).clone()
        system.dispatch(*arguments)
        system.compute()
        outputs[rank] = (first, system.combine())
        system.close()

    threads = [threading.Thread(target=rank_body, args=(rank,)) for rank in range(work.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return layers, outputs


@pytest.mark.usefixtures("poisoned_tails")
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("spec", EXCHANGE_SPECS, ids=str)
def test_alltoall_matches_the_truth_of_all_ranks(monkeypatch, ranks, model, spec):
    if ranks == 1 and isinstance(spec, dict) and {"hot_rank", "empty_ranks"} & set(spec):
        pytest.skip("needs several ranks")
    exchange = ThreadExchange(ranks)
    monkeypatch.setattr(torch.distributed, "all_to_all_single", exchange)
    monkeypatch.setattr(nccl, "connect", lambda fabric: None)
    for tokens in (1, 29):
        layers, outputs = run_alltoall(workload(model, spec, ranks=ranks, tokens=tokens), exchange)
        assert None not in outputs
        sums = [
            reference.error_sums(y, layer.truth)
            for layer, (y, _) in zip(layers, outputs, strict=True)
        ]
        accuracy = reference.judge(sums, Dtype.BF16)
        assert accuracy.ok, accuracy
        assert all(torch.equal(first, again) for first, again in outputs)


def test_each_token_goes_to_a_rank_once():
    topk_idx = torch.tensor([[0, 1, 5], [-1, -1, -1], [4, -1, 5]], dtype=torch.int32)
    order, counts = cuda_alltoall.plan_sends(topk_idx, 3, 2)
    assert counts.tolist() == [[1, 2], [0, 0], [2, 3]]
    assert order[:3].tolist() == [0, 6, 8]
