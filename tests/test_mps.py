"""The private MPS daemon ends whatever becomes of its guard, its owner and its control program."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fake_nvml import Box
from runs import gone, wait_until

from mokbench import child
from mokbench.errors import UnsupportedError
from mokbench.fabric import mps
from mokbench.fabric.mps import MpsDaemon
from mokbench.keeper import Keeper

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="MPS is Linux only")

# "-d" starts a process that a quit ends. What is named in ``ways`` goes wrong on the way.
CONTROL = """#!/bin/sh
pipe=$CUDA_MPS_PIPE_DIRECTORY
ways={ways}
if [ "$1" = --daemon ]; then
    trap 'exit 0' TERM
    while [ -e $ways ]; do sleep 0.05; done
fi
if [ "$1" = -d ]; then
    [ -e $ways/slow ] && sleep 1
    [ -e $ways/refuse ] && {{ echo no room; exit 7; }}
    echo "${{CUDA_VISIBLE_DEVICES-unset}}" > $ways/devices
    [ -e $ways/stillborn ] && exit 0
    "$0" --daemon &
    echo $! > $pipe/pid
    [ -e $ways/stuck ] && sleep 100
    exit 0
fi
read -r question
if [ "$question" = get_server_list ]; then
    [ -e $ways/mute ] && sleep 100
    if [ -e $ways/late ]; then rm $ways/late; echo not yet; exit 1; fi
    [ -e $pipe/pid ] && exit 0
    echo Cannot find MPS control daemon process
    exit 1
fi
[ -e $ways/deaf ] && sleep 100
if [ -e $ways/busy ]; then rm $ways/busy; sleep 100; fi
kill $(cat $pipe/pid) 2>/dev/null
"""


@pytest.fixture
def scratch(monkeypatch) -> Iterator[Path]:
    """Where temporary folders go; pytest's own has too long a path for the daemon's sockets."""
    with tempfile.TemporaryDirectory(prefix="s-") as folder:
        monkeypatch.setattr("tempfile.tempdir", folder)
        yield Path(folder)


@pytest.fixture
def ways(tmp_path, scratch, monkeypatch) -> Iterator[Path]:
    """A fake control program first on the PATH; a file made here changes what it does.

    Its daemons end with this folder, so that a test that fails leaves none.
    """
    control = tmp_path / "bin" / "nvidia-cuda-mps-control"
    control.parent.mkdir()
    control.write_text(CONTROL.format(ways=tmp_path / "ways"), encoding="utf-8")
    control.chmod(0o755)
    (tmp_path / "ways").mkdir()
    monkeypatch.setenv("PATH", f"{control.parent}{os.pathsep}{os.environ['PATH']}")
    yield tmp_path / "ways"
    shutil.rmtree(tmp_path / "ways")


@pytest.fixture
def short(monkeypatch) -> None:
    """Deadlines for tests, here and in the guard, which is another process."""
    deadlines = {"_START_DEADLINE_S": 1.0, "_QUIT_DEADLINE_S": 2.0, "_ONE_QUIT_DEADLINE_S": 0.5}
    ours = {"_GRACE_S": 0.5, "_END_DEADLINE_S": 8.0, "_GUARD_DEADLINE_S": 12.0}
    for name, seconds in {**deadlines, **ours}.items():
        monkeypatch.setattr(mps, name, seconds)
    settings = "".join(f"mps.{name} = {seconds}\n" for name, seconds in deadlines.items())
    program = f"import sys\nfrom pathlib import Path\nfrom mokbench.fabric import mps\n{settings}"
    program += "sys.exit(mps.guard(Path(sys.argv[1])))\n"
    monkeypatch.setattr(
        child, "command", lambda _module, *names: [sys.executable, "-P", "-c", program, *names]
    )


def daemon_of(folder: Path) -> psutil.Process:
    return psutil.Process(int((folder / "pipe" / "pid").read_text()))


def test_a_daemon_that_quits_leaves_nothing(ways):
    daemon = MpsDaemon()
    folder, process = daemon._folder, daemon_of(daemon._folder)
    assert daemon.environment["CUDA_MPS_PIPE_DIRECTORY"] == str(folder / "pipe")
    daemon.stop()
    assert daemon._guard.returncode == 0
    assert gone([process])
    assert not folder.exists()
    daemon.stop()


# The server numbers anew what it was given; a client that keeps our numbers finds no GPU.
@pytest.mark.parametrize(
    "ours, clients",
    [
        (None, None),
        ("1", "0"),
        ("0", "0"),
        ("2,0", "0,1"),
        ("GPU-ab", "0"),
        ("GPU-3, GPU-1", "0,1"),
        ("MIG-7c", "0"),
        ("1,9,0", "0"),
    ],
)
def test_clients_count_the_gpus_that_the_daemon_was_given(ways, monkeypatch, ours, clients):
    Box(gpus=4).install(monkeypatch)
    if ours is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ours)
    daemon = MpsDaemon()
    try:
        assert (ways / "devices").read_text().strip() == (ours or "unset")
        assert daemon.environment.get("CUDA_VISIBLE_DEVICES") == clients
    finally:
        daemon.stop()


def test_a_guard_that_was_killed_leaves_the_daemon_to_its_owner(ways):
    daemon = MpsDaemon()
    folder, process = daemon._folder, daemon_of(daemon._folder)
    daemon._guard.kill()
    daemon._guard.wait()
    assert process.is_running()
    daemon.stop()
    assert gone([process])
    assert not folder.exists()


def test_a_daemon_that_answers_no_quit_is_killed(ways, short):
    daemon = MpsDaemon()
    folder, process = daemon._folder, daemon_of(daemon._folder)
    (ways / "deaf").touch()
    daemon.stop()
    assert gone([process])
    assert not folder.exists()


def test_one_quit_that_hangs_leaves_time_for_the_next(ways, short, monkeypatch):
    monkeypatch.setattr(mps, "end_processes", lambda *_: [])
    daemon = MpsDaemon()
    process = daemon_of(daemon._folder)
    daemon._guard.kill()
    (ways / "busy").touch()
    daemon.stop()
    assert gone([process])


def test_a_start_that_does_not_return_is_said_and_ended(ways, short, scratch):
    (ways / "stuck").touch()
    with pytest.raises(UnsupportedError, match="-d: did not return within 1 s"):
        MpsDaemon()
    assert list(scratch.iterdir()) == []
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(ways.parent) in _line(p)]


def _line(process: psutil.Process) -> str:
    return " ".join(process.info["cmdline"] or [])


def test_a_start_that_fails_says_what_the_control_program_said(ways, scratch):
    (ways / "refuse").touch()
    with pytest.raises(UnsupportedError, match="-d: exit code 7: no room"):
        MpsDaemon()
    assert list(scratch.iterdir()) == []


# What "-d" says is about the fork alone: the daemon itself may be gone, or hang.
@pytest.mark.parametrize(
    "way, why",
    [("stillborn", "Cannot find MPS control daemon process"), ("mute", "a question hung")],
)
def test_a_daemon_that_does_not_answer_has_not_started(ways, short, scratch, way, why):
    (ways / way).touch()
    with pytest.raises(UnsupportedError, match=f"CUDA MPS daemon .*get_server_list .*: .*{why}"):
        MpsDaemon()
    assert list(scratch.iterdir()) == []
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(ways.parent) in _line(p)]


def test_a_daemon_that_answers_the_second_question_has_started(ways):
    (ways / "late").touch()
    daemon = MpsDaemon()
    process = daemon_of(daemon._folder)
    assert not (ways / "late").exists()
    assert process.is_running()
    daemon.stop()
    assert gone([process])


def test_a_guard_that_never_answers_is_said_and_ended(ways, scratch, monkeypatch):
    monkeypatch.setattr(mps, "_GUARD_DEADLINE_S", 0.5)
    monkeypatch.setattr(child, "command", lambda *_: ["sleep", "61.5"])
    with pytest.raises(UnsupportedError, match=r"its guard did not answer within 0\.5 s"):
        MpsDaemon()
    assert list(scratch.iterdir()) == []
    assert not [p for p in psutil.process_iter(["cmdline"]) if _line(p) == "sleep 61.5"]


def test_a_guard_that_dies_before_it_answers_is_said(ways, scratch, monkeypatch):
    monkeypatch.setattr(child, "command", lambda *_: ["sh", "-c", "exit 3"])
    with pytest.raises(UnsupportedError, match="its guard ended with exit code 3"):
        MpsDaemon()
    assert list(scratch.iterdir()) == []


def test_a_daemon_that_cannot_be_ended_keeps_its_folder_and_is_named(
    ways, tmp_path, monkeypatch, capfd
):
    (tmp_path / "pipe").mkdir()
    monkeypatch.setattr(mps, "_may_run", lambda _: False)
    monkeypatch.setattr(mps, "end_processes", lambda *_: [41, 42])
    mps.end(tmp_path)
    assert (tmp_path / "pipe").is_dir()
    assert f"processes 41, 42 of {tmp_path}" in capfd.readouterr().err


def test_a_keeper_ends_what_a_killed_command_and_a_killed_guard_left(ways):
    keeper = Keeper()
    daemon = MpsDaemon(keeper.remember_mps)
    folder, process = daemon._folder, daemon_of(daemon._folder)
    daemon._guard.kill()
    daemon._guard.wait()
    keeper.close()
    assert gone([process])
    assert not folder.exists()


def test_the_guard_of_an_owner_killed_during_the_start_still_ends_the_daemon(ways, tmp_path):
    (ways / "slow").touch()
    folder = tmp_path / "private"
    folder.mkdir()
    guard = subprocess.Popen(
        child.command("mokbench.fabric.mps", str(folder)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child.environment(),
    )
    assert wait_until((folder / "log").is_dir), "the guard is about to start the daemon"
    guard.stdin.close()
    guard.stdout.close()
    assert guard.wait(20) == 0
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(ways.parent) in _line(p)]
    assert not folder.exists()


def test_ctrl_c_while_the_daemon_starts_ends_it(ways, scratch):
    (ways / "slow").touch()
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(scratch)],
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=child.environment(),
    )
    assert wait_until(lambda: list(scratch.glob("*/log")))
    owner.send_signal(signal.SIGINT)
    owner.wait(20)
    assert list(scratch.iterdir()) == []


OWNER = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from mokbench.fabric.mps import MpsDaemon
MpsDaemon()
"""
