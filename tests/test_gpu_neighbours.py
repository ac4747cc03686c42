"""Other MPS daemons and compute modes: refused or said before a run starts."""

import sys

import pytest
from click.testing import CliRunner
from fake_nvml import Box

from mokbench import gpu_neighbours
from mokbench.cli import main
from mokbench.errors import ConfigError
from mokbench.fabric.mps_processes import MpsProcess, end_processes, mps_processes
from mokbench.gpu_neighbours import neighbours, refuse_mps_variables
from mokbench.gpus import Gpus, read_gpus


@pytest.mark.parametrize(
    "name", ["CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_NEW_LIMIT"]
)
def test_inherited_mps_variables_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name}=50: .* unset {name}$"):
        refuse_mps_variables({"HOME": "/", name: "50"})


def test_where_logs_go_changes_no_figure():
    refuse_mps_variables({"CUDA_MPS_LOG_DIRECTORY": "/log", "CUDA_VISIBLE_DEVICES": "1"})


CONFIG = """\
fabric: {fabric}
ranks: 1
model: {{hidden: 64, intermediate: 64, experts: 8, top_k: 2}}
systems: [local]
tokens_per_rank: 4
"""


def test_a_run_is_refused_before_it_starts(tmp_path, monkeypatch):
    Box(gpus=2).install(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "25")
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG.format(fabric="cuda"), encoding="utf-8")
    out = tmp_path / "run"
    done = CliRunner().invoke(main, ["run", str(path), "--out", str(out)])
    assert done.exit_code == 2, done.output
    assert "unset CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" in done.output
    assert not out.exists()


def test_neighbours_are_said(monkeypatch):
    running = [MpsProcess(41, "/tmp/nvidia-mps"), MpsProcess(42, None), MpsProcess(43, "/mine")]
    monkeypatch.setattr(gpu_neighbours, "mps_processes", lambda: running)
    lines = list(neighbours(Gpus(count=2, compute_modes=(0, 3))))
    assert "serves /tmp/nvidia-mps (processes 41, 42)" in lines[0]
    assert lines[1].startswith("GPU 1 is in compute mode exclusive process: ")
    assert len(lines) == 2


def test_a_machine_to_itself_has_nothing_to_say(monkeypatch):
    monkeypatch.setattr(gpu_neighbours, "mps_processes", lambda: [MpsProcess(43, "/mine")])
    assert list(neighbours(Gpus(count=2, compute_modes=(0, 0)))) == []
    Box(gpus=2, compute_mode=3).install(monkeypatch)
    assert read_gpus().compute_modes == (3, 3)


def test_mps_processes_are_found_by_name_and_folder(tmp_path):
    def process(pid, name, *variables):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "comm").write_text(name + "\n", encoding="utf-8")
        text = "".join(f"{variable}\0" for variable in variables)
        (tmp_path / str(pid) / "environ").write_text(text, encoding="utf-8")

    process(1, "init")
    process(2, "nvidia-cuda-mps", "A=b", "CUDA_MPS_PIPE_DIRECTORY=/p", "C=d")
    process(3, "nvidia-cuda-mps", "A=b")
    process(4, "nvidia-cuda-mps")
    process(5, "python", "CUDA_MPS_PIPE_DIRECTORY=/p")
    (tmp_path / "self").mkdir()
    found = sorted(mps_processes(tmp_path), key=lambda each: each.pid)
    assert found == [MpsProcess(2, "/p"), MpsProcess(3, "/tmp/nvidia-mps"), MpsProcess(4, None)]
    assert list(mps_processes(tmp_path / "none")) == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_process_of_another_name_is_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert end_processes(tmp_path, 0.0, 0.1) == []
