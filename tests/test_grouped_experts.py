"""The GPU systems' plain PyTorch parts on the CPU, against the FP32 truth."""

import pytest
import torch

from mokbench import reference
from mokbench.layer import Layer
from mokbench.routing_spec import RoutingSpec
from mokbench.systems.cuda_alltoall import Alltoall, _nccl_problem, destinations, sum_partials
from mokbench.systems.cuda_local import Local
from mokbench.systems.grouped_experts import weighted_experts
from mokbench.workload import Cell, Dtype, Model, Regime, Workload

SPECS = ["balanced", {"hot_expert": 0.9}, {"masked": 1.0}, {"masked": 0.4}, {"empty_experts": 3}]


def workload(spec, ranks=1, tokens=23, experts=8, top_k=3, dtype=Dtype.BF16):
    model = Model("tiny", 64, 32, experts, top_k)
    return Workload(model, ranks, tokens, dtype, RoutingSpec.model_validate(spec))


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("top_k", [1, 3])
def test_weighted_experts_is_the_layer(spec, top_k):
    layer = Layer.build(workload(spec, top_k=top_k), 0)
    y = weighted_experts(layer.x, layer.topk_idx, layer.topk_weights, layer.w13, layer.w2)
    assert y.dtype == torch.bfloat16
    assert reference.compare(y, layer.truth, Dtype.BF16).ok


def test_rows_that_the_gemm_leaves_unwritten_do_not_show():
    layer = Layer.build(workload({"masked": 0.4}), 0)
    arguments = (layer.x, layer.topk_idx, layer.topk_weights, layer.w13, layer.w2)
    whole = torch._grouped_mm

    def spoiled(rows, weights, ends):
        out = whole(rows, weights, ends)
        out[int(ends[-1]) :] = float("nan")
        return out

    expected = weighted_experts(*arguments)
    torch._grouped_mm = spoiled
    try:
        assert torch.equal(weighted_experts(*arguments), expected)
    finally:
        torch._grouped_mm = whole


@pytest.mark.parametrize(
    "spec", ["balanced", {"masked": 0.5}, {"masked": 1.0}, {"uneven": 1.0}, {"empty_ranks": 1}]
)
def test_alltoall_on_real_gloo_ranks_is_the_layer(spec, tmp_path):
    import torch.multiprocessing as mp

    ranks = 3
    work = workload(spec, ranks=ranks, experts=9, tokens=17)
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_rank, args=(work, str(tmp_path / "store"), queue), nprocs=ranks)
    sums = [queue.get() for _ in range(ranks)]
    assert reference.judge(sums, Dtype.BF16).ok


def _rank(rank, work, store, queue):
    import torch.distributed as dist

    torch.set_num_threads(1)
    file_store = dist.FileStore(store, work.ranks)
    dist.init_process_group("gloo", store=file_store, rank=rank, world_size=work.ranks)
    layer = Layer.build(work, rank)
    system = Alltoall()
    system._ranks, system._num_local = work.ranks, work.model.experts // work.ranks
    system._first_expert = rank * system._num_local
    system._w13, system._w2 = layer.w13, layer.w2
    system._experts, system._sum = weighted_experts, sum_partials

    def all_to_all(out, rows, recv, send):
        # gloo has no bf16; whole rows as bytes are the same rows.
        plain = rows.dtype != torch.bfloat16
        parts = (out, rows) if plain else (out.view(torch.uint8), rows.view(torch.uint8))
        dist.all_to_all_single(*parts, recv, send)

    system._all_to_all = all_to_all
    for _ in range(2):
        y = system.run(layer.x, layer.topk_idx, layer.topk_weights)
    queue.put(reference.error_sums(y, layer.truth))
    dist.barrier()
    dist.destroy_process_group()


def test_destinations_counts_rows_once_and_routes_each():
    topk_idx = torch.tensor([[0, 1, 5], [-1, 4, 2], [-1, -1, -1]], dtype=torch.int32)
    goes, counts = destinations(topk_idx, num_local=2, ranks=3)
    assert goes.tolist() == [[True, False, False], [False, True, False], [True, True, False]]
    assert counts.tolist() == [[1, 2], [1, 1], [2, 2]]


def test_partials_are_summed_in_rank_order():
    goes = torch.tensor([[True, False, True], [True, True, False]])
    partial = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    assert sum_partials(partial, goes).tolist() == [[5.0], [8.0], [2.0]]


@pytest.mark.parametrize("version, refused", [((2, 28), True), ((2, 30), False), ((3, 0), False)])
def test_ranks_that_share_a_gpu_need_a_new_nccl(version, refused):
    assert (_nccl_problem(version) is not None) == refused


@pytest.mark.parametrize("system", [Local, Alltoall])
def test_what_they_refuse_says_what_to_do(system, monkeypatch):
    monkeypatch.setattr(f"{system.__module__}.compiler_problem", lambda: None)

    def answer(work, options=(), graph=False):
        cell = Cell("c", "cuda", system.name, options, work, Regime.ISOLATED, graph)
        return system.supports(cell)

    assert answer(workload("balanced")) is None
    assert "dtype: bf16" in answer(workload("balanced", dtype=Dtype.FP32))
    assert "leave block_m out" in answer(workload("balanced"), (("block_m", 32),))
    odd = Workload(Model("odd", 60, 32, 8, 2), 1, 4, Dtype.BF16, RoutingSpec())
    assert "multiples of 8" in answer(odd)
    assert ("graph: false" in (answer(workload("balanced"), graph=True) or "")) == (
        system is Alltoall
    )
    monkeypatch.setattr(f"{system.__module__}.compiler_problem", lambda: "no compiler")
    assert answer(workload("balanced")) == "no compiler"
    assert answer(workload("balanced"), (("compile", False),)) is None
