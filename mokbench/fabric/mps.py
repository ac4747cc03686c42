"""A private CUDA MPS daemon, so that several ranks can share one GPU and run at the same time.

Without MPS, processes of one GPU take turns of milliseconds, and ranks that wait for one another
would measure the scheduler. The daemon lives in a folder of its own and never outlives its owner:
a guard process holds it, and stops it when the owner's end of a pipe closes, however that ends.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from mokbench import child
from mokbench.errors import UnsupportedError
from mokbench.private_folder import private_folder

_CONTROL = "nvidia-cuda-mps-control"
_START_DEADLINE_S = 20.0
_QUIT_DEADLINE_S = 10.0
READY = "ready"


class MpsDaemon:
    """The owner's side; ``environment`` is for the ranks. Raises UnsupportedError on start."""

    def __init__(self) -> None:
        if shutil.which(_CONTROL) is None:
            raise UnsupportedError(
                f"several ranks on one GPU need CUDA MPS, and {_CONTROL} is not on the PATH; "
                "install the driver's MPS tools or use one GPU per rank"
            )
        self._folder = private_folder("mokbench-mps-", "pipe/control_privileged")
        self._guard = subprocess.Popen(
            child.command("mokbench.fabric.mps", str(self._folder)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=child.environment(),
        )
        assert self._guard.stdout is not None
        answer = self._guard.stdout.readline().strip()
        if answer != READY:
            self.stop()
            raise UnsupportedError(f"the CUDA MPS daemon does not start: {answer}")

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make a process a client of this daemon."""
        return client_environment(self._folder)

    def stop(self) -> None:
        """Close the guard's pipe and wait until the daemon is gone."""
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        try:
            self._guard.wait(timeout=2 * _QUIT_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def client_environment(folder: Path) -> dict[str, str]:
    """Where the daemon of ``folder`` has its pipes and logs."""
    return {
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
    }


def _control(folder: Path, *arguments: str, command: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [_CONTROL, *arguments],
        input=command,
        env=os.environ | client_environment(folder),
        capture_output=True,
        text=True,
        timeout=_QUIT_DEADLINE_S,
    )


def guard(folder: Path) -> int:
    """Hold a daemon until standard input closes; 0 when it was started and is gone again."""
    for name in ("pipe", "log"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    started = _control(folder, "-d")
    # An owner that was killed meanwhile reads no answer, and its daemon must end all the same.
    with contextlib.suppress(BrokenPipeError):
        print(READY if started.returncode == 0 else _failure(started), flush=True)
    if started.returncode != 0:
        return 1
    sys.stdin.read()
    _quit(folder)
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def _failure(done: subprocess.CompletedProcess[str]) -> str:
    text = (done.stderr or done.stdout).strip().replace("\n", " ")
    return f"{_CONTROL} -d: exit code {done.returncode}: {text}"


def _quit(folder: Path) -> None:
    """Ask the daemon to end; clients that are still there are ended first, by the server."""
    deadline = time.monotonic() + _QUIT_DEADLINE_S
    while time.monotonic() < deadline:
        try:
            if _control(folder, command="quit -t 1\n").returncode != 0:
                return
        except subprocess.TimeoutExpired:
            continue
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(guard(Path(sys.argv[1])))
