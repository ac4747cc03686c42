"""Dry runs that plan for GPUs which are not here, or for those that are."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from launch_stubs import BASE

from mokbench import cells, config
from mokbench.dry_run import print_plan
from mokbench.elsewhere import refusal_elsewhere
from mokbench.gpus import LEAST_CAPABILITY, Gpus, arch_of
from mokbench.systems.kernel_arch import planned_reason
from mokbench.workload import Cell

SYSTEMS = [
    "mok",
    {"push": {"gemm": ["ours", "torch"]}},
    {"deepep": {"gemm": ["ours", "torch"]}},
    {"local": {"gemm": ["ours", "torch"]}},
    "alltoall",
]


def cuda_cells(**changes: Any) -> tuple[config.Suite, list[Cell]]:
    made = BASE | {"fabric": "cuda", "systems": SYSTEMS, "measure": {"regimes": "isolated"}}
    suite = config.parse(yaml.safe_dump(made | changes))
    return suite, cells.expand(suite, "cuda")


def reasons(capability: tuple[int, int] | None) -> dict[str, str | None]:
    return {
        f"{cell.system} {cell.variant}".strip(): planned_reason(cell, capability)
        for cell in cuda_cells()[1]
    }


def test_names_of_architectures() -> None:
    assert [arch_of(c) for c in ((8, 0), (9, 0), (10, 3))] == ["sm_80", "sm_90a", "sm_103a"]
    assert LEAST_CAPABILITY == (9, 0)


@pytest.mark.parametrize("capability", [(9, 0), None])
def test_everything_is_for_hopper(capability: tuple[int, int] | None) -> None:
    assert set(reasons(capability).values()) == {None}


@pytest.mark.parametrize(("capability", "arch"), [((10, 0), "sm_100a"), ((10, 3), "sm_103a")])
def test_what_blackwell_cannot_run(capability: tuple[int, int], arch: str) -> None:
    gemm = f"our grouped GEMM is for sm_90a and the GPU is {arch}; set gemm: torch"
    mok = f"mok's kernel is for sm_90a and the GPU is {arch}, for which it has no path yet"
    found = reasons(capability)
    assert (found.pop("mok") or "").startswith(mok)
    assert found == {
        "push": gemm,
        "push gemm=torch": None,
        "deepep": gemm,
        "deepep gemm=torch": None,
        "local gemm=ours": gemm,
        "local": None,
        "alltoall": None,
    }


def test_older_gpus_run_nothing_of_the_cuda_fabric() -> None:
    expected = "fabric: cuda needs sm_90 or newer and the GPU is sm_80; use fabric: host"
    assert set(reasons((8, 0)).values()) == {expected}
    (cell, *_) = cells.expand(config.parse(yaml.safe_dump(BASE)), "host")
    assert planned_reason(cell, (8, 0)) is None


def printed(capsys: Any, monkeypatch: pytest.MonkeyPatch, gpus: Gpus, **cluster: Any) -> str:
    """The words of a dry run of mok and alltoall on two ranks of one node."""
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    # What this machine's torch.compile lacks is no reason of the GPUs made up here.
    monkeypatch.setattr("mokbench.systems.gpu_support.visible_gpus", lambda: 0)
    section = {"ranks_per_node": 2} | cluster
    suite, some = cuda_cells(systems=["mok", "alltoall"], ranks=2, cluster=section)
    print_plan(suite, some, "cuda", gpus)
    return " ".join(capsys.readouterr().out.split())


HERE = {"count": 2, "memory_bytes": 80 << 30}


def test_the_cluster_counts_where_no_gpu_is(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = printed(capsys, monkeypatch, Gpus(note="none"), gpu="GB300")
    assert found.count("unsupported:") == 1
    assert (
        "mok.r2.t16.balanced.bf16.isolated - - unsupported: mok's kernel is for sm_90a and the"
        in found
    )
    assert "sm_103a" in found
    assert "unsupported:" not in printed(capsys, monkeypatch, Gpus(note="none"), gpu="H100")
    assert "unsupported:" not in printed(capsys, monkeypatch, Gpus(note="none"))


def test_the_gpus_here_count_where_there_are_some(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hopper, blackwell = (Gpus(compute_capability=c, **HERE) for c in ((9, 0), (10, 0)))
    assert "unsupported:" not in printed(capsys, monkeypatch, hopper, gpu="GB300")
    assert "the GPU is sm_100a" in printed(capsys, monkeypatch, blackwell, gpu="H100")


def test_nodes_count_where_ranks_are_more_than_one_has(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = printed(capsys, monkeypatch, Gpus(note="none"), gpu="H100", ranks_per_node=1)
    assert "unsupported: mok works in its peers' memory" in found


def test_nvl72_says_that_mok_has_no_path_there() -> None:
    suite = config.load(Path(__file__).parents[1] / "configs" / "nvl72.yaml")
    assert suite.cluster is not None
    assert suite.cluster.capability == (10, 0)
    found = cells.expand(suite, "cuda")
    assert {cell.workload.ranks for cell in found} == {72}
    assert {cell.workload.model.experts % 72 for cell in found} == {0}
    refused = {cell.system for cell in found if planned_reason(cell, (10, 0))}
    # The other systems use torch's grouped GEMM there.
    assert refused == {"mok"}


@pytest.mark.parametrize("here", [0, 1])
@pytest.mark.parametrize(("gpu", "refused"), [("GB200", {"mok"}), ("B200", {"mok", "push"})])
def test_a_racks_nvlink_reaches_over_nodes(
    gpu: str, refused: set[str], here: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A GPU of the machine that plans is no reason.
    monkeypatch.setattr("mokbench.gpus.read_gpus", lambda: Gpus(count=here))
    suite = config.load(Path(__file__).parents[1] / "configs" / "nvl72.yaml")
    assert suite.cluster is not None
    there = suite.cluster.model_copy(update={"gpu": gpu})
    assert there.is_one_domain(72) == (gpu == "GB200")
    assert not there.is_one_domain(73)
    found = cells.expand(suite, "cuda")
    assert {cell.system for cell in found if refusal_elsewhere(cell, there)} == refused
