"""What push says about cells on the cuda fabric, and that its segment holds the layout."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from mokbench import twin
from mokbench.gemm_config import GemmConfig
from mokbench.routing import RoutingSpec
from mokbench.systems import Checked, Phased, Setup, cuda_push_workspace, system_class
from mokbench.systems.cuda_push import Push, PushShape
from mokbench.systems.gemm_choice import choose
from mokbench.systems.options import PushOptions
from mokbench.workload import Cell, Dtype, Model, Regime, Workload

MODEL = Model("m", 2880, 256, 24, 4)


def cell(fabric="cuda", options=(), model=MODEL, dtype=Dtype.BF16, nodes=1, ranks=4):
    routing = RoutingSpec.model_validate("balanced")
    work = Workload(model, ranks, 64, dtype, routing, nodes=nodes)
    return Cell("id", fabric, "push", options, work, Regime.ISOLATED, graph=fabric == "cuda")


def test_it_has_phases_and_a_check():
    assert system_class("push", "cuda") is Push
    assert isinstance(Push(), Phased)
    assert isinstance(Push(), Checked)


def test_supported_with_a_graph_and_with_num_sms():
    assert Push.supports(cell()) is None
    assert Push.supports(cell(options=(("num_sms", 8),))) is None
    assert Push.supports(cell(options=(("gemm", "torch"),))) is None
    assert Push.supports(cell(options=(("gemm_tile_rows", 128), ("gemm_stages", 3)))) is None


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"dtype": Dtype.FP32}, "dtype: bf16"),
        ({"nodes": 2}, "one node"),
        ({"options": (("block_m", 128),)}, "block_m"),
        ({"model": Model("m", 2884, 256, 24, 4)}, "hidden"),
        ({"model": Model("m", 2888, 256, 24, 4)}, "hidden 2888"),
        ({"model": Model("m", 2880, 96, 24, 4)}, "gemm: torch"),
        ({"options": (("gemm_tile_rows", 128), ("gemm_stages", 9))}, "stages is 9"),
        ({"options": (("gemm", "torch"), ("gemm_stages", 4))}, "leave them out"),
        ({"model": Model("m", 2880, 250, 24, 4)}, "intermediate"),
        ({"model": Model("m", 64, 64, 1024, 8), "ranks": 1}, "more ranks"),
        ({"model": Model("m", 64, 64, 64, 17)}, "top_k"),
    ],
)
def test_what_it_cannot_is_refused_with_what_would_help(changes, words):
    assert words in (Push.supports(cell(**changes)) or "")


def test_rows_that_torch_takes_and_ours_does_not():
    odd = Model("m", 2888, 256, 24, 4)
    assert Push.supports(cell(model=odd, options=(("gemm", "torch"),))) is None


@pytest.mark.parametrize(
    "option, word", [(("num_sms", 8), "num_sms"), (("gemm", "torch"), "cuda fabric")]
)
def test_what_only_a_gpu_has_is_refused_on_the_host(option, word):
    found = system_class("push").supports(cell("host", options=(option,)))
    assert word in (found or "")


def test_the_plan_counts_what_each_gemm_holds():
    ours, torchs = (
        Push.workspace_bytes(cell(options=(("gemm", gemm),))) for gemm in ("ours", "torch")
    )
    rows, packed = 4 * 64 * 4, 2 * 2 * 6 * 256 * 2880
    assert ours - torchs == packed - rows * 2 * 256 * 2


def test_the_choice_of_tiles_is_written_down():
    work = cell().workload
    auto = choose(work, PushOptions(), 132)
    assert (auto.gate_up.swiglu, auto.down.swiglu) == (True, False)
    assert auto.notes[0].startswith("gate_up GEMM: tiles of 32 rows, 5 stages, groups of 8; model")
    given = choose(work, PushOptions(gemm_tile_rows=128, gemm_stages=3, gemm_group_tiles=2), 132)
    assert given.down == GemmConfig(128, 3, 2)
    assert given.gate_up == GemmConfig(128, 3, 2, swiglu=True)


@pytest.mark.parametrize("ranks, tokens", [(1, 1), (4, 4096), (8, 37)])
def test_the_segment_holds_the_layout(ranks, tokens):
    shape = PushShape(MODEL, ranks, tokens)
    sizes = {"hidden": 2880, "intermediate": 256, "num_experts": 24, "top_k": 4, "element_bytes": 2}
    try:
        config = twin.load_twin().TwinConfig(num_ranks=ranks, max_tokens=tokens, **sizes)
    except twin.UnsupportedError as error:
        pytest.skip(str(error))
    needed = twin.segment_bytes("push", config)
    assert needed <= shape.segment_bytes < needed + (1 << 18)


@pytest.mark.parametrize(
    ("gemm", "ranks_per_gpu", "carved"),
    [
        ("torch", 4, [99, None]),
        ("torch", 1, []),
        ("ours", 4, []),
    ],
)
def test_torchs_gemms_are_held_to_the_ranks_share(monkeypatch, gemm, ranks_per_gpu, carved):
    import torch

    calls = []
    monkeypatch.setattr(torch._C, "_set_sm_carveout_experimental", calls.append, raising=False)
    there = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: there)
    monkeypatch.setattr(cuda_push_workspace, "PushWorkspace", lambda *arguments: object())
    share = 132 // ranks_per_gpu
    fabric = SimpleNamespace(num_sms=share, ranks_per_gpu=ranks_per_gpu, device=0)
    work = Workload(Model("m", 2048, 768, 128, 8), 4, 64, Dtype.BF16, RoutingSpec())
    system = Push()
    system.prepare(Setup(work, PushOptions(gemm=gemm), 0, 64, None, None, fabric))
    assert calls == carved[:1]
    system.close()
    assert calls == carved
