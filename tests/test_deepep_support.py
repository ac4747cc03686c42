"""What DeepEP is said to need: every refusal with what to do about it, on made-up machines."""

from pathlib import Path

import pytest

from mokbench import deep_ep_package, reach
from mokbench.deep_ep_package import DeepEpPackage, read
from mokbench.fabric.nccl import mapped_libraries, split_version
from mokbench.routing import RoutingSpec
from mokbench.systems import deepep_support as support
from mokbench.systems import gpu_support
from mokbench.systems.cuda_deepep import Deepep
from mokbench.workload import Cell, Dtype, Model, Regime, Workload

MODEL = Model("m", hidden=2048, intermediate=768, experts=128, top_k=8)
BOTH = DeepEpPackage("2.1.0", elastic=True, legacy=True)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """One GPU, deep_ep 2.1.0, NCCL 2.30.4, a toolkit and no NIC."""
    monkeypatch.setattr(support, "visible_gpus", lambda: 1)
    monkeypatch.setattr(gpu_support, "visible_gpus", lambda: 1)
    monkeypatch.setattr(reach, "visible_gpus", lambda: 1)
    monkeypatch.setattr(deep_ep_package, "find", lambda: BOTH)
    monkeypatch.setattr(support, "nccl_version", lambda: (2, 30, 4))
    monkeypatch.setattr(support, "_NICS", tmp_path / "infiniband")
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    for name in ("nvcc", "cuobjdump"):
        (home / "bin" / name).touch(mode=0o755)
    monkeypatch.setenv("CUDA_HOME", str(home))
    for name in ("LD_PRELOAD", "EP_JIT_NVCC_COMPILER"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def cell(ranks=2, model=MODEL, dtype=Dtype.BF16, graph=False, nodes=1, **options):
    work = Workload(model, ranks, 128, dtype, RoutingSpec(), nodes=nodes)
    return Cell("c", "cuda", "deepep", tuple(options.items()), work, Regime.ISOLATED, graph)


def sized(**sizes):
    return Model(**({"name": "m", **{k: v for k, v in vars(MODEL).items() if k != "name"}} | sizes))


def test_a_machine_with_everything_runs_it(machine):
    for ranks in (2, 4, 8):
        assert Deepep.supports(cell(ranks)) is None
    assert Deepep.supports(cell(graph=True)) is None
    assert Deepep.supports(cell(gemm="torch", cpu_sync=True, deterministic=True)) is None
    assert Deepep.supports(cell(dispatch_dtype="fp8", num_sms="best")) is None
    assert Deepep.supports(cell(api="normal", num_sms=24)) is None


@pytest.mark.parametrize(
    "refused, words",
    [
        (cell(ranks=1), "use 2 or more, or local"),
        (cell(dtype=Dtype.FP32), "not fp32; set dtype: bf16"),
        (cell(nodes=2), "names no InfiniBand or RoCE device; use one node, or alltoall"),
        (cell(nodes=2, api="normal"), "use one node, or api: elastic over several"),
        (cell(ranks=4, nodes=2), "2 ranks a node are more than the 1 GPUs here"),
        (cell(block_m=32), "leave it out, gemm_tile_rows"),
        (cell(gemm="torch", gemm_stages=3), "gemm_stages"),
        (cell(graph=True, cpu_sync=True), "cpu_sync waits on the CPU"),
        (cell(graph=True, deterministic=True), "deterministic: false or graph: false"),
        (cell(model=sized(hidden=2880)), "multiple of 256 and it is 2880"),
        (cell(model=sized(top_k=33)), "at most top_k 32, not 33"),
        (cell(model=sized(experts=1024)), "256 a rank, not 1024 and 512; use more ranks"),
        (cell(ranks=16, model=sized(experts=4096)), "at most 2048 experts"),
        (cell(ranks=3, model=sized(experts=126), api="normal"), "takes 2, 4, 8 ranks"),
        (cell(api="normal", num_sms=7), "make num_sms 7 even"),
        (cell(api="normal", deterministic=True), "leave it out with the legacy Buffer"),
        (cell(api="normal", dispatch_dtype="fp8", model=sized(hidden=2112)), "128 channels"),
        (cell(api="low_latency", model=sized(hidden=2304)), "not 2304; set api: elastic"),
        (cell(api="low_latency", model=sized(top_k=12)), "top_k 11, not 12; set api: elastic"),
        (cell(api="low_latency", num_sms=8), "num_sms cannot be chosen"),
        (cell(api="low_latency", cpu_sync=True), "cpu_sync cannot be chosen"),
        (cell(api="low_latency", dispatch_dtype="fp8"), "dispatch_dtype cannot be chosen"),
        (cell(api="low_latency"), "InfiniBand NIC with IBGDA"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_cells_are_refused_with_what_helps(machine, refused, words):
    assert words in Deepep.supports(refused)


def test_low_latency_runs_beside_a_nic(machine, tmp_path):
    (tmp_path / "infiniband/mlx5_0").mkdir(parents=True)
    assert Deepep.supports(cell(api="low_latency")) is None


def test_its_absence_is_told_with_where_to_get_it(machine):
    machine.setattr(deep_ep_package, "find", lambda: None)
    reason = Deepep.supports(cell())
    assert reason.startswith("deep_ep is not installed")
    assert "github.com/deepseek-ai/DeepEP" in reason


def test_an_old_nccl_is_told_with_both_versions(machine):
    machine.setattr(support, "nccl_version", lambda: (2, 28, 9))
    reason = Deepep.supports(cell())
    assert "NCCL 2.30.4 or newer and torch loads 2.28.9" in reason
    assert "pip install 'nvidia-nccl-cu13>=2.30.4'" in reason
    assert Deepep.supports(cell(api="normal")) is None


@pytest.mark.parametrize("found", [(2, 30, 4), (2, 31, 0), (3, 0, 0), None])
def test_newer_or_unknown_nccl_will_do(found):
    assert support.nccl_reason(found) is None


@pytest.mark.parametrize("found", [(2, 30, 3), (2, 28, 9), (1, 99, 9)])
def test_older_nccl_will_not(found):
    assert "2.30.4 or newer" in support.nccl_reason(found)


def test_a_preloaded_nccl_is_told_before_two_are_mapped(machine):
    machine.setenv("LD_PRELOAD", "/opt/libfoo.so:/opt/libnccl.so.2")
    assert "unset it and put the folder" in Deepep.supports(cell())


@pytest.mark.parametrize("missing", ["nvcc", "cuobjdump"])
def test_a_missing_compiler_is_named(machine, tmp_path, missing):
    (tmp_path / "cuda/bin" / missing).unlink()
    reason = Deepep.supports(cell())
    assert f"finds no {missing} in {tmp_path / 'cuda/bin'}" in reason
    assert "point CUDA_HOME at it" in reason


def test_the_compiler_is_looked_for_where_deepep_looks(tmp_path, monkeypatch):
    monkeypatch.setattr(support.shutil, "which", lambda name: str(tmp_path / "there/bin/nvcc"))
    assert f"in {tmp_path / 'there/bin'}" in support.compiler_reason({})
    assert "in /given/bin" in support.compiler_reason({"CUDA_PATH": "/given"})
    monkeypatch.setattr(support.shutil, "which", lambda name: None)
    assert support._cuda_home({}) == Path("/usr/local/cuda")
    own = tmp_path / "nvcc"
    own.touch(mode=0o755)
    told = support.compiler_reason({"CUDA_HOME": "/given", "EP_JIT_NVCC_COMPILER": str(own)})
    assert "finds no cuobjdump in /given/bin" in told


@pytest.mark.parametrize(
    "package, api, words",
    [
        (DeepEpPackage("1.2.1", False, True), "elastic", "deep_ep 1.2.1 has no ElasticBuffer"),
        (DeepEpPackage("3.0", True, False), "normal", "deep_ep 3.0 has no Buffer"),
        (DeepEpPackage(None, True, False), "low_latency", "of unknown version has no Buffer"),
    ],
)
def test_a_generation_that_is_not_there_is_told(machine, package, api, words):
    machine.setattr(deep_ep_package, "find", lambda: package)
    assert words in Deepep.supports(cell(api=api))


def test_a_plan_can_be_made_without_a_gpu(machine):
    machine.setattr(support, "visible_gpus", lambda: 0)
    machine.setattr(deep_ep_package, "find", lambda: None)
    assert Deepep.supports(cell()) is None
    assert "multiple of 256" in Deepep.supports(cell(model=sized(hidden=2880)))


@pytest.mark.parametrize(
    "tokens, capacity",
    [
        (0, 128),
        (1, 128),
        (128, 128),
        (129, 256),
        (1024, 1024),
        (1025, 2048),
        (4096, 4096),
        (5000, 5120),
    ],
)
def test_token_capacity(tokens, capacity):
    assert support.token_capacity(tokens) == capacity


def test_mapped_libraries_are_told_apart():
    maps = (
        "7f00-7f01 r-xp 0000 08:01 11 /a/nvidia/nccl/lib/libnccl.so.2\n"
        "7f01-7f02 r--p 1000 08:01 11 /a/nvidia/nccl/lib/libnccl.so.2\n"
        "7f02-7f03 r-xp 0000 08:01 12 /usr/lib/libc.so.6\n"
    )
    assert mapped_libraries(maps) == ["/a/nvidia/nccl/lib/libnccl.so.2"]
    assert support.mapped_reason(mapped_libraries(maps)) is None
    two = mapped_libraries(maps + "7f04-7f05 r-xp 0000 08:01 13 /b/libnccl.so.2.30.4\n")
    assert "/a/nvidia/nccl/lib/libnccl.so.2 and /b/libnccl.so.2.30.4" in support.mapped_reason(two)
    assert mapped_libraries("") == []


def test_nccl_version_numbers():
    assert split_version(23004) == (2, 30, 4)
    assert split_version(22809) == (2, 28, 9)


@pytest.mark.parametrize(
    "source, installed, found",
    [
        ("from .buffer import Buffer, EventOverlap", "1.2.1", DeepEpPackage("1.2.1", False, True)),
        (
            "from .legacy import Buffer\nfrom .elastic import ElasticBuffer\n__version__ = '2.1.0'",
            None,
            DeepEpPackage("2.1.0", True, True),
        ),
        ("# ElasticBuffer comes later\n", None, DeepEpPackage(None, False, False)),
        ("not python (", None, DeepEpPackage(None, False, False)),
    ],
)
def test_a_package_is_read_without_importing_it(source, installed, found):
    assert read(source, installed) == found


def test_generations_for_people():
    assert BOTH.generation == "second generation (ElasticBuffer)"
    assert DeepEpPackage("1", False, True).generation == "first generation (Buffer)"
    assert DeepEpPackage(None, False, False).generation == "of unknown generation"


def test_nothing_is_imported_to_ask(tmp_path, monkeypatch):
    package = tmp_path / "deep_ep"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')\nElasticBuffer = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert deep_ep_package.find() == DeepEpPackage(None, True, False)
