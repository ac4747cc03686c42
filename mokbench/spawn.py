"""Ranks as child processes of this command."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Listener
from pathlib import Path
from typing import IO, Any

from mokbench import child
from mokbench.errors import MokbenchError
from mokbench.fabric.environment import CUDA_ENVIRONMENT
from mokbench.fabric.mps import MpsDaemon
from mokbench.keeper import Keeper
from mokbench.private_folder import private_folder

_LOG_TAIL_LINES = 12
_EXIT_DEADLINE_S = 1.0


def worker_environment(fabric: str) -> dict[str, str]:
    """The environment of a worker: one thread a rank, gloo on the loopback interface.

    Ranks are the parallelism here; a BLAS that starts its own threads would measure the scheduler.
    """
    environment = child.environment()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment[name] = "1"
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    environment.setdefault("PYTHONFAULTHANDLER", "1")
    if fabric == "cuda":
        environment |= CUDA_ENVIRONMENT
    return environment


def rendezvous_socket(pid: int, environment: dict[str, str]) -> Path:
    """What torch's symmetric memory leaves where a rank is killed while it meets its peers."""
    names = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")
    folder = next((environment[name] for name in names if name in environment), "/tmp")
    return Path(folder) / f"symm_mem-{pid}"


class WorkerProcess:
    """One rank's process, in a session of its own so that Ctrl-C does not reach it.

    It holds ``keeper`` until it ends. On Linux the kernel kills it when the thread that made this
    object ends, so the main thread should.
    """

    def __init__(
        self,
        spec: dict[str, Any],
        log_path: Path,
        environment: dict[str, str],
        keeper: Keeper,
    ) -> None:
        self.log_path = log_path
        with log_path.open("ab") as log:
            # What earlier workers of this rank wrote is not this one's last word.
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                child.command("mokbench.worker"),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=environment,
                pass_fds=(keeper.held,),
            )
        self.pid = self._process.pid
        keeper.remember_socket(rendezvous_socket(self.pid, environment), self.pid)
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(spec).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            pass  # it died at once; alive() and describe() tell
        self._lifeline: IO[bytes] = stdin

    def alive(self) -> bool:
        """Whether the process still runs (a stopped one does)."""
        return self._exit_code() is None

    def _exit_code(self) -> int | None:
        """How it ended, as Popen spells it; not reaped, so that ``kill`` can hit no stranger.

        A process that is reaped gives its number, and that of its group, to whoever comes next.
        """
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            return self._process.poll()
        if self._process.returncode is not None:
            return self._process.returncode
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def describe(self) -> str:
        """How it ended, and the end of its log."""
        deadline = time.monotonic() + _EXIT_DEADLINE_S
        while (code := self._exit_code()) is None:
            if time.monotonic() > deadline:
                return "its connection closed but it still runs"
            time.sleep(0.01)
        how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        try:
            written = self.log_path.read_bytes()[self._log_start :]
        except OSError:
            return f"{how}; its log is gone"
        lines = written.decode("utf-8", errors="replace").splitlines()
        tail = "\n".join(lines[-_LOG_TAIL_LINES:])
        return f"{how}; its log ends:\n{tail}" if tail and code > 0 else how

    def kill(self) -> None:
        """SIGKILL to its whole session, then reap; ends stopped processes too."""
        if self._process.returncode is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                self._process.kill()
            self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._lifeline.close()


class LocalStarter:
    """All ranks on this host, found through a socket and a file store in a private folder.

    Ranks that share a GPU (``share_gpu``) get an MPS daemon, a new one with every start: a fatal
    error of one client can leave a daemon useless.
    """

    def __init__(self, log_folder: Path, share_gpu: bool = False) -> None:
        self._log_folder = log_folder
        self._share_gpu = share_gpu
        self._mps: MpsDaemon | None = None
        self._folder = private_folder("mokbench-", "socket")
        self._keeper = Keeper()
        self._keeper.remember(self._folder)
        self._processes: list[WorkerProcess] = []

    def listen(self, authkey: bytes) -> Listener:
        """See Starter; a socket in the private folder, so no port is taken."""
        return Listener(self.address, family="AF_UNIX", authkey=authkey)

    @property
    def address(self) -> str:
        """Path of the listener's socket."""
        return str(self._folder / "socket")

    def store(self, generation: int) -> dict[str, Any]:
        """A fresh file: a store that a dead generation used holds stale keys."""
        return {"kind": "file", "path": str(self._folder / f"store-{generation}")}

    def start(self, specs: list[dict[str, Any]]) -> None:
        """One process a spec, its output in the run folder's logs."""
        try:
            self._log_folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MokbenchError(
                f"{self._log_folder}: the ranks' logs cannot be kept there: {error.strerror}"
            ) from error
        self._keeper.remember_segments(specs[0]["shm_token"])
        environment = worker_environment(specs[0]["fabric"])
        if self._share_gpu:
            self._mps = MpsDaemon(self._keeper.remember_mps)
            environment |= self._mps.environment
        for spec in specs:
            log = self._log_folder / f"rank{spec['rank']}.log"
            self._processes.append(WorkerProcess(spec, log, environment, self._keeper))

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid for process in self._processes]

    def alive(self, rank: int) -> bool:
        """See Starter."""
        return rank < len(self._processes) and self._processes[rank].alive()

    def describe(self, rank: int) -> str:
        """See Starter."""
        return self._processes[rank].describe()

    def kill(self) -> None:
        """See Starter."""
        for process in self._processes:
            process.kill()
        self._processes = []
        if self._mps is not None:
            self._mps.stop()
            self._mps = None

    def close(self) -> None:
        """Remove the private folder and what the ranks left."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._keeper.close()
