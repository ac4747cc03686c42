"""What the DeepEP adapter passes on, refuses and cleans up; on a recording fake, without a GPU.

Results and figures of the real package are tests/gpu/test_deepep.py's.
"""

import os
import sys

import pytest
import torch
from fake_deep_ep import Recorder

from mokbench.deep_ep_package import DeepEpPackage
from mokbench.errors import UnsupportedError
from mokbench.fabric import nccl
from mokbench.fabric.group import RankGroup
from mokbench.routing import RoutingSpec
from mokbench.systems import (
    Phased,
    Setup,
    TakesInt64,
    Tuned,
    cuda_deepep,
    cuda_deepep_elastic,
    cuda_deepep_legacy,
)
from mokbench.systems.cuda_deepep import Deepep, buffer_bytes
from mokbench.systems.cuda_deepep_legacy import compact_rows, spread_rows
from mokbench.systems.options import DeepepOptions
from mokbench.topology import RankPlace, Topology
from mokbench.workload import Cell, Dtype, Model, Regime, Workload

MODEL = Model("m", hidden=256, intermediate=128, experts=4, top_k=2)


class FakeRows:
    def __init__(self, hidden, intermediate, fabric, fp8):
        self.made_for = (hidden, intermediate, fp8)

    def quantize(self, x):
        return x.to(torch.float8_e4m3fn), torch.ones(x.shape[0], x.shape[1] // 128)

    def dequantize(self, values, scales, row_ends, out):
        return out.copy_(values.float())


class FakeExperts:
    """Twice its input, times the weight where there is one."""

    made = ()

    def __init__(self, setup, options, capacity, rows, weighted):
        self.notes = (f"capacity {capacity}, weighted {weighted}",)

    def __call__(self, x_rows, row_ends, weights):
        doubled = 2 * x_rows
        return doubled if weights is None else (doubled.float() * weights[:, None]).bfloat16()

    def close(self):
        pass


class FakeFabric:
    rank, ranks_per_gpu, num_sms, arch = 0, 2, 66, "sm_90a"
    device = torch.device("cpu")
    nccl_group = "the NCCL group"

    def __init__(self, problem=None, advice=None, nodes=(0, 0)):
        self._others = {type(None): problem, int: advice}
        places = [
            RankPlace(node=str(node), host="h", gpu=f"GPU-{i}") for i, node in enumerate(nodes)
        ]
        self.topology = Topology.from_ranks(places)
        self.maps_peers = self.topology.nodes == 1

    problems = RankGroup.problems

    def gather(self, value):
        """This rank's value and that of another, which has the same or what the test says."""
        other = self._others.get(type(value))
        return [value, value if other is None else other]


@pytest.fixture
def machine(monkeypatch):
    """A GPU machine with everything that DeepEP needs but DeepEP."""
    for module in (cuda_deepep_elastic, cuda_deepep_legacy):
        monkeypatch.setattr(module, "ExpandedRows", FakeRows)
        monkeypatch.setattr(module, "ExpandedExperts", FakeExperts)
    monkeypatch.setattr(cuda_deepep_legacy.parts, "compiled", lambda function: function)
    there = DeepEpPackage("9.9.9", elastic=True, legacy=True)
    monkeypatch.setattr(cuda_deepep.deep_ep_package, "find", lambda: there)
    monkeypatch.setattr(nccl, "mapped_libraries", lambda: ["/a/libnccl.so.2"])
    monkeypatch.setattr(nccl, "runtime_version", lambda: (2, 30, 4))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setenv("EP_DISABLE_GIN", "0")  # so that it is put back as it was
    monkeypatch.delenv("EP_DISABLE_GIN")
    return monkeypatch


def setup(fabric=None, tokens=100, model=MODEL, **options):
    work = Workload(model, 2, tokens, Dtype.BF16, RoutingSpec())
    w13 = torch.zeros(2, 2 * model.intermediate, model.hidden, dtype=torch.bfloat16)
    w2 = torch.zeros(2, model.hidden, model.intermediate, dtype=torch.bfloat16)
    return Setup(work, DeepepOptions(**options), 0, tokens, w13, w2, fabric or FakeFabric())


def prepared(machine, recorder, fabric=None, **options):
    machine.setitem(sys.modules, "deep_ep", recorder)
    system = Deepep()
    system.prepare(setup(fabric, **options))
    return system


def inputs(tokens=4):
    x = torch.ones(tokens, MODEL.hidden, dtype=torch.bfloat16)
    return x, torch.zeros(tokens, 2, dtype=torch.int64), torch.ones(tokens, 2)


def test_it_is_phased_tuned_and_takes_what_topk_gives(machine):
    system = prepared(machine, Recorder(), num_sms="best")
    for protocol in (Phased, Tuned, TakesInt64):
        assert isinstance(system, protocol)


def test_the_buffer_is_sized_by_deepep_for_the_rounded_tokens(machine):
    recorder = Recorder()
    prepared(machine, recorder, tokens=100)
    assert recorder.named("ElasticBuffer") == [
        {
            "group": "the NCCL group",
            "num_max_tokens_per_rank": 128,
            "hidden": 256,
            "num_topk": 2,
            "use_fp8_dispatch": False,
            "deterministic": False,
            "allow_hybrid_mode": False,
            "explicitly_destroy": True,
        }
    ]


def test_every_pass_is_expanded_and_combine_gets_its_handle(machine):
    recorder = Recorder(num_rows=8)
    system = prepared(machine, recorder, deterministic=True, cpu_sync=True)
    assert recorder.named("ElasticBuffer")[0]["deterministic"] is True
    recorder.calls.clear()
    x, topk_idx, topk_weights = inputs()
    y = system.run(x, topk_idx, topk_weights)
    assert y.shape == (4, 256)
    (dispatch,), (combine,) = recorder.named("dispatch"), recorder.named("combine")
    assert dispatch.pop("x") is x
    assert dispatch.pop("topk_idx") is topk_idx
    assert dispatch.pop("topk_weights") is topk_weights
    assert dispatch == {
        "num_experts": 4,
        "num_max_tokens_per_rank": 128,
        "expert_alignment": 1,
        "num_sms": 22,
        "do_handle_copy": False,
        "do_cpu_sync": True,
        "do_expand": True,
    }
    assert combine["y"].shape == (8, 256)
    assert combine["num_sms"] == 22
    assert combine["handle"].psum_num_recv_tokens_per_expert.tolist() == [8]


def test_fp8_rows_are_quantised_before_and_dequantised_behind_dispatch(machine):
    recorder = Recorder(num_rows=8)
    system = prepared(machine, recorder, dispatch_dtype="fp8")
    assert recorder.named("ElasticBuffer")[0]["use_fp8_dispatch"] is True
    recorder.calls.clear()
    system.run(*inputs())
    values, scales = recorder.named("dispatch")[0]["x"]
    assert (values.dtype, tuple(scales.shape)) == (torch.float8_e4m3fn, (4, 2))
    assert recorder.named("combine")[0]["y"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "asked, advice, runs, candidates",
    [
        ("auto", 22, 22, []),
        ("auto", 90, 66, []),  # the share of a rank of two on 132 SMs
        (12, 22, 12, []),
        ("best", 22, 22, [8, 16, 22, 24, 32, 64]),
        ("best", 90, 66, [8, 16, 24, 32, 64, 66]),
    ],
)
def test_num_sms(machine, asked, advice, runs, candidates):
    recorder = Recorder(advice=advice)
    system = prepared(machine, recorder, num_sms=asked)
    assert list(system.candidates) == candidates
    assert recorder.named("dispatch")[0]["num_sms"] == runs
    assert f"num_sms {runs}" in system.notes[0]
    assert "deep_ep 9.9.9" in system.notes[0]
    system.set_num_sms(10)
    recorder.calls.clear()
    system.run(*inputs())
    assert recorder.named("dispatch")[0]["num_sms"] == recorder.named("combine")[0]["num_sms"] == 10
    assert "num_sms 10" in system.notes[0]


def test_ranks_that_are_advised_differently_run_alike(machine):
    system = prepared(machine, Recorder(advice=22), fabric=FakeFabric(advice=4))
    assert "num_sms 4" in system.notes[0]


def test_more_sms_than_the_share_are_refused_before_anything_is_made(machine):
    recorder = Recorder()
    with pytest.raises(UnsupportedError, match=r"num_sms 67 is more than .* share .* 66 SMs"):
        prepared(machine, recorder, num_sms=67)
    assert recorder.calls == []


def test_gin_is_off_within_a_node_unless_the_user_says_otherwise(machine):
    prepared(machine, Recorder())
    assert os.environ["EP_DISABLE_GIN"] == "1"
    machine.setenv("EP_DISABLE_GIN", "0")
    prepared(machine, Recorder())
    assert os.environ["EP_DISABLE_GIN"] == "0"


def test_over_several_nodes_the_nics_are_used_and_a_token_crosses_once_to_a_node(machine):
    recorder = Recorder()
    prepared(machine, recorder, fabric=FakeFabric(nodes=(0, 1)))
    assert "EP_DISABLE_GIN" not in os.environ
    assert recorder.named("ElasticBuffer")[0]["allow_hybrid_mode"] is True
    within = Recorder()
    prepared(machine, within)
    assert within.named("ElasticBuffer")[0]["allow_hybrid_mode"] is False


def test_ranks_that_do_not_stand_node_by_node_are_refused(machine):
    recorder = Recorder()
    with pytest.raises(UnsupportedError, match=r"node by node.* on nodes \[0, 1, 0, 1\]"):
        prepared(machine, recorder, fabric=FakeFabric(nodes=(0, 1, 0, 1)))
    assert recorder.calls == []


def test_two_mapped_nccl_are_refused_with_both_names(machine):
    machine.setattr(nccl, "mapped_libraries", lambda: ["/a/libnccl.so.2", "/b/libnccl.so.2"])
    with pytest.raises(UnsupportedError, match=r"/a/libnccl\.so\.2 and /b/libnccl.*PYTHONPATH"):
        prepared(machine, Recorder())


def test_an_old_mapped_nccl_is_refused_whatever_the_package_says(machine):
    machine.setattr(nccl, "runtime_version", lambda: (2, 28, 9))
    with pytest.raises(UnsupportedError, match=r"NCCL 2\.30\.4 or newer and torch loads 2\.28\.9"):
        prepared(machine, Recorder())


def test_a_failed_import_is_unsupported_on_every_rank(machine):
    machine.setitem(sys.modules, "deep_ep", None)
    with pytest.raises(UnsupportedError, match=r"deep_ep does not import.*github\.com/deepseek-ai"):
        Deepep().prepare(setup())
    recorder = Recorder()
    with pytest.raises(UnsupportedError, match="another rank's trouble"):
        prepared(machine, recorder, fabric=FakeFabric(problem="another rank's trouble"))
    assert recorder.calls == []


def test_a_compile_error_of_the_first_pass_is_unsupported_with_its_first_line(machine):
    recorder = Recorder(fails="NVCC compilation failed\nlong log")
    with pytest.raises(
        UnsupportedError, match=r"first pass: rank 0: NVCC compilation failed; rank 1"
    ):
        prepared(machine, recorder)


def test_close_destroys_once_and_not_behind_a_failure(machine):
    recorder = Recorder()
    system = prepared(machine, recorder)
    system.close()
    system.close()
    assert len(recorder.named("destroy")) == 1
    other = Recorder()
    system = prepared(machine, other)
    with pytest.raises(RuntimeError, match="a peer died"):
        fail_and_close(system)
    assert other.named("destroy") == []


def fail_and_close(system):
    try:
        raise RuntimeError("a peer died")
    finally:
        system.close()


def test_normal_mode_passes_on_the_layout_and_sums_weighted_rows(machine):
    recorder = Recorder(num_rows=6)
    system = prepared(machine, recorder, api="normal", num_sms=24)
    (made,) = recorder.named("Buffer")
    assert made["positional"][1:] == (3000, 0)
    assert made["explicitly_destroy"] is True
    assert recorder.named("hint") == [{"hidden_bytes": 512, "ranks": 2}] * 2
    recorder.calls.clear()
    x, topk_idx, topk_weights = inputs()
    system.run(x, topk_idx, topk_weights)
    assert recorder.named("set_num_sms") == [{"num_sms": 24}]
    assert recorder.named("layout")[0] == {"topk_idx": topk_idx, "experts": 4}
    (dispatch,) = recorder.named("dispatch")
    wanted = {
        "num_tokens_per_rank": "per_rank",
        "is_token_in_rank": "is_in_rank",
        "num_tokens_per_expert": "per_expert",
        "num_worst_tokens": 2 * 128,
    }
    assert {name: dispatch[name] for name in wanted} == wanted
    (combine,) = recorder.named("combine")
    assert combine["handle"] == "handle"
    # Rows of ones, doubled by the one local expert each has, at weight 0.5.
    assert torch.equal(combine["y"], torch.ones(6, 256, dtype=torch.bfloat16))
    system.close()
    assert len(recorder.named("destroy")) == 1


def test_normal_mode_with_cpu_sync_asks_for_exact_rows(machine):
    recorder = Recorder()
    prepared(machine, recorder, api="normal", cpu_sync=True)
    assert recorder.named("dispatch")[0]["num_worst_tokens"] == 0
    assert recorder.named("set_num_sms")[0] == {"num_sms": 20}


def test_low_latency_mode_weighs_in_combine(machine):
    recorder = Recorder()
    system = prepared(machine, recorder, api="low_latency", tokens=128)
    assert recorder.named("rdma_hint") == [{"tokens": 128, "hidden": 256, "ranks": 2, "experts": 4}]
    (made,) = recorder.named("Buffer")
    assert made["positional"][1:] == (0, 5000)
    assert (made["low_latency_mode"], made["num_qps_per_rank"]) == (True, 2)
    recorder.calls.clear()
    x, topk_idx, topk_weights = inputs()
    system.run(x, topk_idx, topk_weights)
    (dispatch,), (combine,) = (
        recorder.named("low_latency_dispatch"),
        recorder.named("low_latency_combine"),
    )
    assert (dispatch["tokens"], dispatch["experts"], dispatch["use_fp8"]) == (128, 4, False)
    assert combine["topk_idx"] is topk_idx
    assert combine["topk_weights"] is topk_weights
    assert combine["y"].shape == (2, 256, 256)
    assert combine["y"][0, 0, 0] == 2.0
    assert combine["y"][1, 1, 0] == 4.0
    assert not combine["y"][0, 1:].any()
    assert not combine["y"][1, 2:].any()


def test_rows_leave_their_slots_by_expert_and_return():
    padded = torch.arange(3 * 4 * 2, dtype=torch.float32).view(3, 4, 2)
    counts = torch.tensor([2, 0, 3], dtype=torch.int32)
    rows, ends, places = compact_rows(padded, counts, 7)
    assert ends.tolist() == [2, 2, 5]
    assert torch.equal(rows[:5], torch.cat([padded[0, :2], padded[2, :3]]))
    assert places.tolist() == [0, 1, 8, 9, 10, 12, 12]
    back = spread_rows(rows, places, 3, 4)
    wanted = torch.zeros_like(padded)
    wanted[0, :2], wanted[2, :3] = padded[0, :2], padded[2, :3]
    assert torch.equal(back, wanted)


def test_the_plan_knows_the_buffers_size():
    """904 MiB is what DeepEP's own formula gives for 8 ranks of 8192 tokens at H 7168, k 8."""
    model = Model("m", 7168, 2048, 256, 8)
    work = Workload(model, 8, 8192, Dtype.BF16, RoutingSpec())
    cell = Cell("c", "cuda", "deepep", (), work, Regime.ISOLATED)
    assert buffer_bytes(cell) == 904 << 20
    small = Workload(Model("s", 4096, 1536, 128, 8), 8, 1024, Dtype.BF16, RoutingSpec())
    assert buffer_bytes(Cell("c", "cuda", "deepep", (), small, Regime.ISOLATED)) == 66 << 20


def test_exact_rows_need_less_memory_than_the_worst_case():
    work = Workload(Model("s", 4096, 1536, 128, 8), 4, 4096, Dtype.BF16, RoutingSpec())
    cells = [
        Cell("c", "cuda", "deepep", options, work, Regime.ISOLATED)
        for options in ((), (("cpu_sync", True),), (("dispatch_dtype", "fp8"),))
    ]
    plain, exact, fp8 = map(Deepep.workspace_bytes, cells)
    assert exact < plain < fp8
    rows = 4 * 4096 * 8
    assert plain - exact == 2 * 4096 * (rows - 4096 * 8)


def test_the_first_generation_is_taken_where_it_is_the_only_one(machine):
    machine.setattr(
        cuda_deepep.deep_ep_package,
        "find",
        lambda: DeepEpPackage("1.2.1", elastic=False, legacy=True),
    )
    recorder = Recorder()
    prepared(machine, recorder)
    assert recorder.named("Buffer")
    assert not recorder.named("ElasticBuffer")
