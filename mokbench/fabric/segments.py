"""Names of shared-memory segments, and the removal of those a killed run left behind.

A segment's name exists only while its ranks attach to it (milliseconds). A run that is killed with
SIGKILL just then leaves the name to its keeper (mokbench/keeper.py), or else to the next run.
"""

import contextlib
import os
import secrets
from pathlib import Path

SHM_PREFIX = "mokbench-"
# Where Linux shows POSIX shared memory; elsewhere names cannot be listed and nothing is swept.
_SHM_FOLDER = Path("/dev/shm")
_PROC = Path("/proc/self")


def new_token() -> str:
    """Token for one command's segments: its process id tells later runs whether it is alive."""
    return f"{os.getpid()}-{secrets.token_hex(4)}"


def remove(token: str) -> None:
    """Remove what is left of this command's segments."""
    for path in _SHM_FOLDER.glob(f"{SHM_PREFIX}{token}-*"):
        path.unlink(missing_ok=True)


def remove_stale() -> None:
    """Remove segments whose command is no longer alive."""
    for path in _SHM_FOLDER.glob(f"{SHM_PREFIX}*-*-*"):
        pid = path.name.removeprefix(SHM_PREFIX).split("-")[0]
        if pid.isdigit() and not is_alive(int(pid)):
            # Another user's, or no segment at all.
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def is_alive(pid: int) -> bool:
    """Whether a process of this number runs; one that ended and is not reaped yet does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    try:
        # The name before it may hold anything, brackets too.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:1] != [b"Z"]
    except OSError:  # it ended just now, or there is no such folder here
        return not _PROC.is_dir()
