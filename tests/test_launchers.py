"""What mokbench says to launchers whose ranks it cannot run; test_joined.py has the others."""

import pytest
from fake_nvml import Box

from mokbench import command
from mokbench.errors import ConfigError, MokbenchError
from mokbench.joined import Launcher, run_joined

CONFIG = """\
fabric: cuda
ranks: [1, 8]
model: {hidden: 64, intermediate: 64, experts: 8, top_k: 2}
systems: [push]
tokens_per_rank: 4
"""


def launcher(name, nodes=1):
    return Launcher(name, 0, 8, nodes, "127.0.0.1", 1, False)


@pytest.mark.parametrize("name", ["srun", "torchrun"])
def test_ranks_that_see_too_few_gpus_are_told_what_to_do(tmp_path, monkeypatch, name):
    Box(gpus=8).install(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG, encoding="utf-8")
    request = command.Request(path, tmp_path / "run", None, False, (), False, True, False)
    with pytest.raises(ConfigError) as refused:
        command._run(request, launcher(name), None)
    text = str(refused.value)
    assert text.startswith(f"{name} started 8 ranks, and this one sees 1 GPU;")
    assert f"run mokbench without {name}" in text
    # One GPU bound to each task looks the same from within a task.
    assert ("--gpu-bind=none" in text) == (name == "srun")


@pytest.mark.parametrize("name", ["srun", "torchrun"])
def test_several_nodes_are_refused_on_every_fabric(name):
    with pytest.raises(MokbenchError, match="on the host and on the cuda fabric: use one node"):
        run_joined(launcher(name, nodes=2), lambda _: 0)
