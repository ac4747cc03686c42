"""What the plain PyTorch systems of the cuda fabric say to a cell, on machines made up here."""

import pytest

from mokbench import gpus, reach
from mokbench.errors import UnsupportedError
from mokbench.fabric import nccl
from mokbench.routing import RoutingSpec
from mokbench.systems import cuda_alltoall, gpu_support
from mokbench.systems.cuda_alltoall import Alltoall
from mokbench.systems.cuda_local import Local
from mokbench.workload import Cell, Dtype, Model, Regime, Workload

MODEL = Model("m", hidden=2880, intermediate=96, experts=24, top_k=8)


def cell(system, *, ranks=1, model=MODEL, dtype=Dtype.BF16, nodes=1, options=(), graph=False):
    work = Workload(model, ranks, 64, dtype, RoutingSpec(), nodes=nodes)
    return Cell("id", "cuda", system, options, work, Regime.ISOLATED, graph)


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Two GPUs, a compiler, NCCL 2.28."""
    for module in (gpu_support, reach):
        monkeypatch.setattr(module, "visible_gpus", lambda: 2)
    monkeypatch.setattr(gpu_support, "compile_reason", lambda: None)
    monkeypatch.setattr("mokbench.systems.cuda_alltoall.nccl_version", lambda: (2, 28))
    return monkeypatch


def test_fitting_cells_are_supported():
    assert Local.supports(cell("local", graph=True)) is None
    assert Alltoall.supports(cell("alltoall", ranks=2)) is None
    assert Alltoall.supports(cell("alltoall", ranks=8, nodes=4)) is None
    assert Local.workspace_bytes(cell("local")) > 64 * 8 * 2 * 2880 * 2
    assert Alltoall.workspace_bytes(cell("alltoall", ranks=2)) > 64 * 8 * 2 * 2880 * 2


@pytest.mark.parametrize(
    "refused, words",
    [
        (cell("local", ranks=2), "ranks: 1 only"),
        (cell("local", dtype=Dtype.FP32), "dtype: bf16"),
        (cell("local", model=Model("m", 100, 96, 8, 2)), "hidden is 100"),
        (cell("local", model=Model("m", 96, 100, 8, 2)), "intermediate is 100"),
        (cell("local", model=Model("m", 96, 96, 1024, 2)), "at most 1023 experts"),
        (cell("local", options=(("block_m", 128),)), "leave block_m out"),
        (cell("local", options=(("gemm", "ours"),)), "gemm: torch"),
        (cell("local", options=(("gemm_stages", 4),)), "leave them out"),
        (cell("alltoall", ranks=2, graph=True), "graph: false"),
        (cell("alltoall", ranks=4), "NCCL 2.30 or newer and this is 2.28"),
        (
            cell("alltoall", ranks=12, nodes=2),
            "every rank needs a GPU of its own, and 6 ranks a node are more than the 2",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_others_are_refused_with_what_helps(refused, words):
    system = Local if refused.system == "local" else Alltoall
    assert words in system.supports(refused)


def test_local_takes_our_gemm_where_it_fits(machine):
    ours = (("gemm", "ours"),)
    fitting = cell("local", model=Model("m", 2880, 128, 24, 8), options=ours)
    assert Local.supports(fitting) is None
    machine.setattr(gpu_support, "compile_reason", lambda: "no triton; compile: false")
    assert "compile: false" in Local.supports(fitting)


def test_newer_or_unknown_nccl_may_share_a_gpu(machine):
    for found in ((2, 30), (3, 0), None):
        machine.setattr("mokbench.systems.cuda_alltoall.nccl_version", lambda found=found: found)
        assert Alltoall.supports(cell("alltoall", ranks=4)) is None


def test_an_unknown_nccl_is_asked_before_ranks_share_a_gpu(monkeypatch):
    monkeypatch.setattr(nccl, "runtime_version", lambda: (2, 28, 9))
    with pytest.raises(UnsupportedError, match=r"NCCL 2\.30 or newer and this is 2\.28"):
        cuda_alltoall._require_shared_gpu()
    monkeypatch.setattr(nccl, "runtime_version", lambda: (2, 30, 4))
    monkeypatch.delenv(cuda_alltoall.MULTI_RANK, raising=False)
    with pytest.raises(UnsupportedError, match="NCCL_MULTI_RANK_GPU_ENABLE=1"):
        cuda_alltoall._require_shared_gpu()
    monkeypatch.setenv(cuda_alltoall.MULTI_RANK, "1")
    cuda_alltoall._require_shared_gpu()


def test_a_plan_can_be_made_where_there_is_no_gpu(machine):
    machine.setattr(gpu_support, "visible_gpus", lambda: 0)
    machine.setattr(gpu_support, "compile_reason", lambda: "no triton")
    assert Local.supports(cell("local")) is None
    assert Alltoall.supports(cell("alltoall", ranks=2)) is None


def test_without_a_compiler_there_is_a_way_on(machine):
    machine.setattr(gpu_support, "compile_reason", lambda: "no triton; compile: false")
    assert "compile: false" in Local.supports(cell("local"))
    assert Local.supports(cell("local", options=(("compile", False),))) is None


def test_what_torch_compile_lacks(monkeypatch):
    monkeypatch.undo()
    ask = gpu_support.compile_reason.__wrapped__
    monkeypatch.setattr(gpu_support, "find_spec", lambda name: None)
    assert "pip install triton" in ask()
    monkeypatch.setattr(gpu_support, "find_spec", lambda name: object())
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(gpu_support.shutil, "which", lambda name: None)
    assert "install gcc" in ask()


@pytest.mark.parametrize(
    "listed, expected",
    [(None, 4), ("0,2", 2), ("", 0), ("-1", 0), ("1,-1,2", 1), ("0,9,1", 1), ("GPU-a,GPU-b", 2)],
)
def test_visible_gpus_follow_cuda_visible_devices(monkeypatch, listed, expected):
    monkeypatch.setattr(gpus, "read_gpus", lambda: gpus.Gpus(count=4))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert gpus.visible_here.__wrapped__() == expected
