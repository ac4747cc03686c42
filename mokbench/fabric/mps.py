"""A private CUDA MPS daemon, so that several ranks can share one GPU and run at the same time.

Without MPS, processes of one GPU take turns of milliseconds, and ranks that wait for one another
would measure the scheduler. The daemon lives in a folder of its own and never outlives its owner:
a guard process holds it, and ends it when the owner's end of a pipe closes, however that ends. A
guard that dies leaves it to the owner, and where both die it is for mokbench/keeper.py.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

from mokbench import child
from mokbench.errors import UnsupportedError
from mokbench.fabric.mps_processes import CONTROL, end_processes
from mokbench.gpus import read_gpus
from mokbench.private_folder import private_folder

# From "-d" to the daemon's first answer; one question that hangs must leave time for others.
_START_DEADLINE_S = 20.0
_ONE_QUESTION_DEADLINE_S = 5.0
# The guard's own start on a busy machine comes on top.
_GUARD_DEADLINE_S = _START_DEADLINE_S + 20.0
# All attempts to quit; one that hangs must leave time for others.
_QUIT_DEADLINE_S = 10.0
_ONE_QUIT_DEADLINE_S = 3.0
# A daemon that said it quits may take a moment; one that is killed hardly any.
_GRACE_S = 2.0
_KILL_DEADLINE_S = 5.0
_END_DEADLINE_S = _QUIT_DEADLINE_S + _ONE_QUIT_DEADLINE_S + _GRACE_S + _KILL_DEADLINE_S
READY = "ready"
# Harmless, and answered also while the daemon has no server yet.
_QUESTION = "get_server_list"


def require_control() -> None:
    """Raise UnsupportedError where the driver's MPS tools are missing."""
    if shutil.which(CONTROL) is None:
        raise UnsupportedError(
            f"several ranks on one GPU need CUDA MPS, and {CONTROL} is not on the PATH; "
            "install the driver's MPS tools or use one GPU per rank"
        )


class MpsDaemon:
    """The owner's side; ``environment`` is for the ranks. Raises UnsupportedError on start.

    ``remember`` is told the folder before anything is started in it, see Keeper.remember_mps.
    """

    def __init__(self, remember: Callable[[Path], None] = lambda _: None) -> None:
        require_control()
        self._folder = private_folder("mokbench-mps-", "pipe/control_privileged")
        remember(self._folder)
        self._guard = subprocess.Popen(
            child.command("mokbench.fabric.mps", str(self._folder)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=child.environment(),
        )
        try:
            answer = self._answer()
        except BaseException:  # Ctrl-C: nobody has this object yet, so nobody else stops it
            self.stop()
            raise
        if answer != READY:
            self.stop()
            why = answer or f"its guard ended with exit code {self._guard.returncode}"
            raise UnsupportedError(f"the CUDA MPS daemon does not start: {why}")

    def _answer(self) -> str:
        """What the guard says of the start; empty when it ended instead."""
        assert self._guard.stdout is not None
        if not wait([self._guard.stdout.fileno()], _GUARD_DEADLINE_S):
            self._guard.kill()
            return f"its guard did not answer within {_GUARD_DEADLINE_S:g} s"
        return self._guard.stdout.readline().strip()

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make a process a client of this daemon."""
        return client_environment(self._folder) | client_devices()

    def stop(self) -> None:
        """Close the guard's pipe and see the daemon gone, whatever became of the guard."""
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        try:
            self._guard.wait(timeout=_START_DEADLINE_S + _END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        end(self._folder)


def client_environment(folder: Path) -> dict[str, str]:
    """Where the daemon of ``folder`` has its pipes and logs."""
    return {
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
    }


def client_devices() -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of the clients of a daemon that inherited ours; nothing where unset.

    The server numbers the GPUs it was given anew, from 0 on, and to clients those numbers count:
    NVIDIA's MPS guide, CUDA_VISIBLE_DEVICES. Unset would not do, since torch counts with NVML.
    """
    chosen = read_gpus().chosen()
    if chosen is None:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(len(chosen))))}


def end(folder: Path) -> None:
    """Quit the daemon of ``folder``, else kill it; the folder goes when nothing of it runs.

    Clients that are still there are ended first, by the server. For whoever comes last: where
    another one did it already, nothing happens.
    """
    if not folder.exists():
        return
    deadline = time.monotonic() + _QUIT_DEADLINE_S
    while time.monotonic() < deadline and _may_run(folder):
        time.sleep(0.2)
    left = end_processes(folder / "pipe", _GRACE_S, _KILL_DEADLINE_S)
    if left:
        # Without its folder nobody could reach it any more.
        pids = ", ".join(map(str, left))
        print(f"an MPS daemon cannot be ended: processes {pids} of {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def _may_run(folder: Path) -> bool:
    """Ask the daemon to end; False when there is none to ask."""
    try:
        return _control(folder, _ONE_QUIT_DEADLINE_S, command="quit -t 1\n")[0] == 0
    except subprocess.TimeoutExpired:
        return True
    except OSError:
        return False


def _control(folder: Path, timeout_s: float, *arguments: str, command: str = "") -> tuple[int, str]:
    """Exit code and output of the control program; a file, since a daemon may keep a pipe open."""
    with tempfile.TemporaryFile() as output:
        done = subprocess.run(
            [CONTROL, *arguments],
            input=command.encode(),
            env=os.environ | client_environment(folder),
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
        )
        output.seek(0)
        return done.returncode, output.read().decode(errors="replace")


def guard(folder: Path) -> int:
    """Hold a daemon until standard input closes; 0 when it was started and is gone again."""
    problem = _start(folder)
    # An owner that was killed meanwhile reads no answer, and its daemon must end all the same.
    with contextlib.suppress(BrokenPipeError):
        print(problem or READY, flush=True)
    if problem is None:
        sys.stdin.read()
    # What did not start may have started in part.
    end(folder)
    return 0 if problem is None else 1


def _start(folder: Path) -> str | None:
    """Start the daemon of ``folder`` and see that it answers; why that failed, on one line."""
    deadline = time.monotonic() + _START_DEADLINE_S
    try:
        for name in ("pipe", "log"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        code, output = _control(folder, _START_DEADLINE_S, "-d")
    except subprocess.TimeoutExpired:
        return f"{CONTROL} -d: did not return within {_START_DEADLINE_S:g} s"
    except OSError as error:
        return f"{CONTROL} -d: {error}"
    if code != 0:
        return f"{CONTROL} -d: exit code {code}: {_one_line(output)}"
    return _no_answer(folder, deadline)


def _no_answer(folder: Path, deadline: float) -> str | None:
    """Ask the daemon until it answers; why it did not. "-d" is over before the daemon is there."""
    why = "it was not asked"
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            timeout_s = min(left_s, _ONE_QUESTION_DEADLINE_S)
            code, output = _control(folder, timeout_s, command=f"{_QUESTION}\n")
        except subprocess.TimeoutExpired:
            why = "a question hung"
            continue
        except OSError as error:
            return f"{CONTROL}: {error}"
        if code == 0:
            return None
        why = f"exit code {code}: {_one_line(output)}"
        time.sleep(0.1)
    asked = f"{CONTROL} -d returned, and {_QUESTION} got no answer"
    return f"{asked} within {_START_DEADLINE_S:g} s: {why}"


def _one_line(output: str) -> str:
    return " ".join(output.split())


if __name__ == "__main__":
    sys.exit(guard(Path(sys.argv[1])))
