"""mokbench launch: what it refuses, and that it submits when asked and only then."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from launch_stubs import BASE, Stubs, config, rendered, request

from mokbench import launch_command
from mokbench.errors import ConfigError, MokbenchError

HOSTS = {"torchrun": {"hosts": ["a", "b"]}, "k8s": {"image": "i", "claim": "c"}}
PROGRAMS = {"slurm": "sbatch", "torchrun": "ssh", "k8s": "kubectl"}


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stubs:
    """Recording stand-ins for all that submits, first on PATH."""
    made = Stubs(tmp_path)
    for name in PROGRAMS.values():
        made.program(name)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    return made


def stdin_of(stubs: Stubs, name: str) -> str:
    (path,) = stubs.records.glob(f"*-{name}.stdin")
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("launcher", PROGRAMS)
@pytest.mark.parametrize("asked", [{}, {"dry_run": True}, {"dry_run": True, "submit": True}])
def test_nothing_is_submitted_unless_asked(
    capsys: Any, stubs: Stubs, tmp_path: Path, launcher: str, asked: dict[str, bool]
) -> None:
    path = config(tmp_path, HOSTS)
    text = rendered(capsys, path, launcher, **asked)
    assert "4 ranks, 2 on each of 2 nodes" in text
    assert list(stubs.records.iterdir()) == []


@pytest.mark.parametrize(("launcher", "arguments"), [("slurm", []), ("k8s", ["create", "-f", "-"])])
def test_submitted_when_asked(
    capsys: Any, stubs: Stubs, tmp_path: Path, launcher: str, arguments: list[str]
) -> None:
    path = config(tmp_path, HOSTS)
    text = rendered(capsys, path, launcher)
    assert rendered(capsys, path, launcher, submit=True) == ""
    ((given, _),) = stubs.started(PROGRAMS[launcher])
    assert given == arguments
    assert stdin_of(stubs, PROGRAMS[launcher]) == text


def test_torchrun_is_started_on_every_host_when_asked(
    capsys: Any, stubs: Stubs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert rendered(capsys, config(tmp_path, HOSTS), "torchrun", submit=True) == ""
    started = [arguments for arguments, _ in stubs.started("ssh")]
    assert [arguments[:2] for arguments in started] == [["-tt", "a"], ["-tt", "b"]]
    assert all(f"cd {tmp_path}\n" in arguments[2] for arguments in started)


@pytest.mark.parametrize(
    ("launcher", "kind"), [("slurm", ConfigError), ("torchrun", MokbenchError)]
)
def test_a_failure_to_submit_is_told(
    capsys: Any, stubs: Stubs, tmp_path: Path, launcher: str, kind: type[Exception]
) -> None:
    stubs.program(PROGRAMS[launcher], "#!/bin/bash\nexit 7\n")
    with pytest.raises(MokbenchError, match="ended with exit code 7") as caught:
        rendered(capsys, config(tmp_path, HOSTS), launcher, submit=True)
    assert type(caught.value) is kind


def test_without_the_program_it_says_what_to_do(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="sbatch is not on PATH here: leave --submit out"):
        rendered(capsys, config(tmp_path), submit=True)


def refused(capsys: Any, *arguments: Any, **named: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        rendered(capsys, *arguments, **named)
    return caught.value.problems


def test_a_config_without_a_cluster(capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in BASE.items() if k != "cluster"}))
    (line,) = refused(capsys, path)
    assert "has no cluster section" in line
    assert "cluster: {ranks_per_node: 8}" in line


def test_ranks_that_no_cell_has(capsys: Any, tmp_path: Path) -> None:
    path = config(tmp_path, ranks=[2, 4, 8])
    (line,) = refused(capsys, path, nodes=3)
    assert "--nodes 3 of cluster.ranks_per_node 2 are 6 ranks, and no cell has that many; " in line
    assert line.endswith("there is 2, 4, 8")
    # What --only leaves counts.
    (line,) = refused(capsys, path, nodes=2, only=("ranks=2,8",))
    assert line.endswith("are 4 ranks, and no cell has that many; there is 2, 8")


@pytest.mark.parametrize(("ranks", "expected"), [(4, []), ([2, 4], ["--only", "ranks=4"])])
def test_only_where_the_config_has_other_ranks(
    capsys: Any, tmp_path: Path, ranks: Any, expected: list[str]
) -> None:
    last = rendered(capsys, config(tmp_path, ranks=ranks)).splitlines()[-1].split()
    found = last[last.index("--only") : last.index("--only") + 2] if "--only" in last else []
    assert found == expected


def test_cells_that_cannot_run_there_are_told(capsys: Any, tmp_path: Path) -> None:
    path = config(tmp_path, {"gpu": "B200", "ranks_per_node": 4}, fabric="cuda")
    changed = yaml.safe_load(path.read_text()) | {"systems": ["mok", "push", "alltoall"]}
    path.write_text(yaml.safe_dump(changed))
    launch_command.launch_command(request(path, nodes=1))
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "small: 2 of 6 cells can run on these 4 ranks"
    assert told[1].startswith("mok: 2 cells unsupported: mok's kernel is for sm_90a and the GPU is")
    assert told[2].startswith(
        "push: 2 cells unsupported: our grouped GEMM is for sm_90a and the GP"
    )
    first, *rest = refused(capsys, path, nodes=1, only=("system=mok",))
    assert first == "small: no cell of 2 can run there"
    assert "sm_100a" in rest[0]


def test_launchers_and_folders_are_given_once(capsys: Any, tmp_path: Path) -> None:
    path = config(tmp_path)
    assert refused(capsys, path, None) == ["name the launcher: --slurm, --torchrun or --k8s"]
    (line,) = refused(capsys, path, out=Path("a"), resume=Path("b"))
    assert line == "--out and --resume both name the run folder: give one of them"


@pytest.mark.parametrize("launcher", PROGRAMS)
def test_a_path_that_is_no_text(capsys: Any, tmp_path: Path, launcher: str) -> None:
    (line,) = refused(capsys, config(tmp_path, HOSTS), launcher, out=Path("a\udcff"))
    assert line == "'a\\udcff' is no UTF-8 text; give it another name"


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "mokbench", "launch", *arguments]


def test_the_command_line(tmp_path: Path) -> None:
    """Options reach the script, which alone goes to standard output."""
    path = config(tmp_path, ranks=[2, 4])
    only = ("--only", "regime=steady", "--out", "a b")
    done = subprocess.run(
        command("--slurm", str(path), "--nodes", "2", "--dry-run", *only),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    asked_for = f"launch --slurm {path} --nodes 2 --out 'a b' --only regime=steady"
    assert done.stdout.startswith(f"#!/usr/bin/env bash\n# mokbench {asked_for}\n")
    last = f"run {path} --out 'a b' --only regime=steady --only ranks=4\n"
    assert done.stdout.endswith(last)
    assert done.stderr == "small: 1 of 1 cells can run on these 4 ranks\n"


def test_ctrl_c_ends_every_host(stubs: Stubs, tmp_path: Path) -> None:
    """SIGTERM to the command alone: what it started must not outlive it."""
    stubs.program("ssh", '#!/bin/bash\necho $$ > "$RECORDS/$2.pid"\nexec sleep 60\n')
    path = config(tmp_path, HOSTS)
    process = subprocess.Popen(command("--torchrun", str(path), "--nodes", "2", "--submit"))
    pids = [stubs.records / f"{host}.pid" for host in ("a", "b")]
    deadline = time.monotonic() + 30
    while not all(pid.exists() and pid.read_text().strip() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 130
    assert [path.name for path in pids if Path(f"/proc/{path.read_text().strip()}").exists()] == []
