"""MPS processes of this machine, control daemons and servers, as /proc shows them; Linux only."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
QUIT_DEFAULT = f"echo quit | {CONTROL}"
# Names in /proc end after 15 bytes, so nvidia-cuda-mps-control and -server look alike.
_NAME = "nvidia-cuda-mps"
# Where a daemon and its clients meet when nobody names a folder.
DEFAULT_PIPE = "/tmp/nvidia-mps"
_POLL_S = 0.05


@dataclass(frozen=True)
class MpsProcess:
    """``pipe`` is the folder of its pipes; None where another user's is not to be read."""

    pid: int
    pipe: str | None


def mps_processes(proc: Path = Path("/proc")) -> Iterator[MpsProcess]:
    """All of them, whoever started them; ``proc`` is for tests."""
    for entry in proc.iterdir() if proc.is_dir() else ():
        if entry.name.isdecimal() and _read(entry / "comm").strip() == _NAME.encode():
            yield MpsProcess(int(entry.name), _pipe(entry))


def end_processes(pipe: Path, grace_s: float, kill_s: float) -> list[int]:
    """Wait ``grace_s`` for the processes of one pipe folder, then kill them; the pids still there.

    A process is held by a descriptor while it is looked at, so no other can take its place.
    """
    deadline = time.monotonic() + grace_s
    while (left := _of(pipe)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    deadline = time.monotonic() + kill_s
    while left and time.monotonic() < deadline:
        for pid in left:
            _kill(pid, pipe)
        time.sleep(_POLL_S)
        left = _of(pipe)
    return left


def _of(pipe: Path) -> list[int]:
    return [process.pid for process in mps_processes() if process.pipe == str(pipe)]


def _kill(pid: int, pipe: Path) -> None:
    try:
        held = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if pid in _of(pipe):
            signal.pidfd_send_signal(held, signal.SIGKILL)
    except OSError:
        pass  # it ended meanwhile; or it stays, and the caller says so
    finally:
        os.close(held)


def _pipe(entry: Path) -> str | None:
    """From its environment, which a zombie has no more."""
    variables = _read(entry / "environ").split(b"\0")
    if variables == [b""]:
        return None
    prefix = b"CUDA_MPS_PIPE_DIRECTORY="
    named = [each.removeprefix(prefix) for each in variables if each.startswith(prefix)]
    return os.fsdecode(named[0]) if named else DEFAULT_PIPE


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
