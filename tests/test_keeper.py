"""What a killed command leaves is removed when nobody of it lives any more, and not before."""

import os
import signal
import stat
import subprocess
import sys

import psutil
import pytest
from runs import gone, wait_until

from mokbench import child
from mokbench.fabric import segments
from mokbench.keeper import Keeper, remove
from mokbench.spawn import rendezvous_socket


def test_files_folders_and_segments_go_and_others_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "_SHM_FOLDER", tmp_path)
    for name in ("file", "mokbench-7-ab-0", "mokbench-7-ac-0", "kept"):
        (tmp_path / name).touch()
    (tmp_path / "folder\n\udce9").mkdir()
    (tmp_path / "folder\n\udce9" / "socket").touch()
    keeper = Keeper.__new__(Keeper)
    reader, keeper.held = os.pipe()
    keeper.remember(tmp_path / "file")
    keeper.remember(tmp_path / "folder\n\udce9")
    keeper.remember(tmp_path / "never made")
    keeper.remember_segments("7-ab")
    # The command was killed while it wrote this: a prefix of a path must not be taken for one.
    os.write(keeper.held, b'["path", "' + os.fsencode(tmp_path / "kept"))
    os.close(keeper.held)
    with os.fdopen(reader, "rb") as told:
        for line in told.readlines():
            remove(line)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "mokbench-7-ac-0"]


def test_nothing_is_removed_while_a_rank_lives(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    keeper = Keeper()
    keeper.remember(folder)
    rank = subprocess.Popen(["sleep", "100"], pass_fds=(keeper.held,))
    os.close(keeper.held)
    with pytest.raises(subprocess.TimeoutExpired):
        keeper._process.wait(0.5)
    assert folder.is_dir()
    rank.kill()
    assert keeper._process.wait(10) == 0
    assert not folder.exists()
    rank.wait()


def test_a_keeper_that_is_gone_disturbs_nobody(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.executable", "/bin/false")
    keeper = Keeper()
    keeper._process.wait()
    keeper.remember(tmp_path)
    keeper.close()
    assert tmp_path.is_dir()


def test_the_socket_of_a_rank_is_where_torch_makes_it():
    named = {"TMP": "/a", "TMPDIR": "/b", "TEMP": "/c"}
    assert str(rendezvous_socket(7, named)) == "/b/symm_mem-7"
    assert str(rendezvous_socket(7, {"TEMPDIR": "/d"})) == "/d/symm_mem-7"
    assert str(rendezvous_socket(7, {})) == "/tmp/symm_mem-7"


CONTROL = """#!/bin/sh
# "-d" starts a daemon; "quit" on standard input ends it, and fails once it is gone.
daemon={folder}/daemon
if [ "$1" = -d ]; then sleep 1; touch $daemon; exit 0; fi
if [ -e $daemon ]; then rm $daemon; touch {folder}/quit; exit 0; fi
exit 1
"""


def test_the_guard_of_an_owner_killed_during_the_start_still_ends_the_daemon(tmp_path):
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text(CONTROL.format(folder=tmp_path), encoding="utf-8")
    control.chmod(control.stat().st_mode | stat.S_IXUSR)
    folder = tmp_path / "private"
    folder.mkdir()
    guard = subprocess.Popen(
        child.command("mokbench.fabric.mps", str(folder)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child.environment() | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
    )
    assert wait_until((folder / "log").is_dir), "the guard is about to start the daemon"
    guard.stdin.close()
    guard.stdout.close()
    guard.wait(20)
    assert (tmp_path / "quit").exists()
    assert not (tmp_path / "daemon").exists()
    assert not folder.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part is Linux")
@pytest.mark.parametrize("told", [True, False], ids=["told", "not told"])
def test_a_rank_is_bound_to_its_launcher_before_it_imports_torch(tmp_path, told):
    """With a torch whose import holds the interpreter for ever."""
    (tmp_path / "torch.py").write_text(
        f"import ctypes, pathlib\npathlib.Path({str(tmp_path / 'imports')!r}).touch()\n"
        "ctypes.PyDLL(None).sleep(100)\n",
        encoding="utf-8",
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path), str(int(told))], stdout=subprocess.PIPE
    )
    rank = psutil.Process(int(launcher.stdout.readline()))
    if told:
        assert wait_until((tmp_path / "imports").exists)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    assert gone([rank], 5)


LAUNCHER = """
import os, subprocess, sys, time
from mokbench import child
environment = child.environment()
environment["PYTHONPATH"] = sys.argv[1] + os.pathsep + environment.get("PYTHONPATH", "")
rank = subprocess.Popen(
    child.command("mokbench.worker"), stdin=subprocess.PIPE, env=environment,
    stderr=subprocess.DEVNULL,
)
if int(sys.argv[2]):
    rank.stdin.write(b"{}\\n")
    rank.stdin.flush()
print(rank.pid, flush=True)
time.sleep(100)
"""
