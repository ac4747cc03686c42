"""What a killed command leaves is removed when nobody of it lives any more, and not before."""

import os
import signal
import subprocess
import sys

import psutil
import pytest
from runs import gone, wait_until

from mokbench import child
from mokbench.fabric import segments
from mokbench.keeper import Keeper, remove
from mokbench.spawn import WorkerProcess, rendezvous_socket


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


def test_a_keeper_outlives_its_command_where_a_descendant_of_a_rank_does(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr("mokbench.keeper._END_DEADLINE_S", 0.3)
    folder = tmp_path / "folder"
    folder.mkdir()
    keeper = Keeper()
    keeper.remember(folder)
    descendant = subprocess.Popen(["sleep", "100"], pass_fds=(keeper.held,))
    keeper.close()
    assert folder.is_dir()
    assert f"{keeper._process.pid} waits for it" in capfd.readouterr().err
    descendant.kill()
    descendant.wait()
    assert keeper._process.wait(10) == 0
    assert not folder.exists()


def test_a_socket_of_a_number_that_another_process_has_by_now_stays(tmp_path):
    other = subprocess.Popen(["sleep", "100"])
    ended = subprocess.Popen(["true"])
    # Not reaped yet, as the ranks of a killed command may be where nobody reaps orphans.
    assert wait_until(lambda: psutil.Process(ended.pid).status() == psutil.STATUS_ZOMBIE)
    keeper = Keeper()
    for process in (other, ended):
        socket = tmp_path / f"symm_mem-{process.pid}"
        socket.touch()
        keeper.remember_socket(socket, process.pid)
    keeper.close()
    assert [path.name for path in tmp_path.iterdir()] == [f"symm_mem-{other.pid}"]
    other.kill()
    for process in (other, ended):
        process.wait()


def test_a_rank_that_ended_keeps_its_number_until_it_is_killed(tmp_path, monkeypatch):
    """Else the kill could hit the group of a stranger that has the number by then."""
    keeper = Keeper()
    monkeypatch.setattr(child, "command", lambda *_: ["sh", "-c", "sleep 100 & echo hm; exit 3"])
    rank = WorkerProcess({}, tmp_path / "log", dict(os.environ), keeper)
    assert wait_until(lambda: not rank.alive())
    (grandchild,) = [
        p for p in psutil.process_iter() if _group(p) == rank.pid and p.pid != rank.pid
    ]
    assert rank.describe() == "exit code 3; its log ends:\nhm"
    assert psutil.Process(rank.pid).status() == psutil.STATUS_ZOMBIE
    rank.kill()
    assert gone([grandchild])
    monkeypatch.setattr(os, "killpg", lambda *_: pytest.fail("the number is no more ours"))
    rank.kill()
    assert rank.describe().startswith("exit code 3")
    keeper.close()


def _group(process: psutil.Process) -> int | None:
    try:
        return os.getpgid(process.pid)
    except OSError:
        return None


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
