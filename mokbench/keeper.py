"""A process that removes what a killed command leaves, once the command and its ranks are gone.

All of them hold the write end of its pipe, the ranks by inheritance, and let go of it however they
end. So nobody has to clean up while it dies, and nothing is removed that a rank may make anew.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from mokbench import child
from mokbench.fabric import mps, segments

# Longer than it usually takes: the last who held the pipe may leave a moment after it was killed.
_END_DEADLINE_S = 5.0
_GONE_S = 0.5


class Keeper:
    """The command's side. A keeper that ends early removes nothing and disturbs nobody."""

    def __init__(self) -> None:
        reader, self.held = os.pipe()
        self._process = subprocess.Popen(
            child.command("mokbench.keeper"),
            stdin=reader,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=child.environment(),
            # Ctrl-C and a kill of the command's group are not for it.
            start_new_session=True,
        )
        os.close(reader)

    def remember(self, path: Path) -> None:
        """A file or folder to remove; only the command may call this, one line at a time."""
        self._tell("path", str(path))

    def remember_segments(self, token: str) -> None:
        """Segments to remove, see fabric/segments.py."""
        self._tell("segments", token)

    def remember_socket(self, path: Path, pid: int) -> None:
        """A file named after a process: to remove unless that number is somebody's by then."""
        self._tell(f"socket {pid}", str(path))

    def remember_mps(self, folder: Path) -> None:
        """The folder of an MPS daemon, which ends before its folder goes; see fabric/mps.py."""
        self._tell("mps", str(folder))

    def _tell(self, kind: str, name: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self.held, json.dumps([kind, name]).encode() + b"\n")

    def close(self) -> None:
        """Let it remove all it was told, and wait until it did; the ranks must be gone.

        Where something that a rank started still holds the pipe, it stays and removes later.
        """
        os.close(self.held)
        try:
            self._process.wait(timeout=_END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            left = f"a process that a rank started still runs; {self._process.pid} waits for it"
            print(f"{left} and removes what it may use", file=sys.stderr)


def remove(line: bytes) -> None:
    """What one line of ``Keeper`` names; nothing if the command was killed within the line."""
    if not line.endswith(b"\n"):
        return
    kind, name = json.loads(line)
    if kind == "segments":
        segments.remove(name)
    elif kind.startswith("socket ") and not _ends(int(kind.split()[1])):
        return
    elif kind == "mps":
        mps.end(Path(name))
    elif Path(name).is_dir():
        shutil.rmtree(name, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            Path(name).unlink()


def _ends(pid: int) -> bool:
    """Whether nobody has this number; a process lets go of its pipe a moment before it is gone."""
    deadline = time.monotonic() + _GONE_S
    while (runs := segments.is_alive(pid)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not runs


def main() -> None:
    """Wait until nobody holds the pipe any more, then remove."""
    for line in sys.stdin.buffer.readlines():
        remove(line)


if __name__ == "__main__":
    main()
