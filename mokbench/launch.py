"""Ranks as processes: start them, send them jobs, notice which one died or hung, leave nothing.

``WorkerPool`` is the same whoever starts the processes: this command (``LocalStarter``) or one
agent per launcher process under torchrun and srun (mokbench/joined.py).
"""

import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, wait
from typing import Any, Protocol

from mokbench.blame import Failure, at_fault
from mokbench.errors import RankError

# Importing torch on a busy two-core machine takes seconds for each rank.
_START_DEADLINE_S = 180.0
# Ranks that wait for one another report within the wait bound; a little more for the message.
_GRACE_S = 3.0


class Starter(Protocol):
    """Starts and ends the processes of a pool's ranks."""

    def listen(self, authkey: bytes) -> Listener:
        """The listener that workers connect to; from now on ``address`` is known."""

    @property
    def address(self) -> Any:
        """Where workers find the listener: a path, or (host, port)."""

    def start(self, specs: list[dict[str, Any]]) -> None:
        """One process per spec, which it reads from its standard input."""

    def alive(self, rank: int) -> bool:
        """Whether the rank's process still runs, as far as is known."""

    def describe(self, rank: int) -> str:
        """How the rank's process ended and what it last wrote, for a message."""

    def kill(self) -> None:
        """End all processes now, also stopped ones, and reap them."""

    def store(self, generation: int) -> dict[str, Any]:
        """The rendezvous store for the workers of this generation."""

    def close(self) -> None:
        """Remove whatever start() made outside the processes."""


class GroupError(RankError):
    """A job failed; ``failure`` and ``cell_id`` say how and on which row.

    ``cell_id`` is None when no rank had begun a row of the job.
    """

    def __init__(self, failure: Failure, cell_id: str | None) -> None:
        who = f"rank {failure.rank} " if failure.certain else ""
        super().__init__(f"{who}{failure.text}", failure.rank, failure.fault)
        self.failure = failure
        self.cell_id = cell_id


class StartError(GroupError):
    """The ranks could not be started: no row is at fault, and trying the next one is no use."""


class WorkerPool:
    """The workers of one number of ranks. A failed job ends them; the next call starts new ones."""

    def __init__(
        self,
        ranks: int,
        starter: Starter,
        wait_bound_s: float,
        shm_token: str,
        fabric: str = "host",
    ) -> None:
        self.ranks = ranks
        self._fabric = fabric
        self._starter = starter
        self._authkey = secrets.token_bytes(16)
        self._listener = starter.listen(self._authkey)
        self._wait_bound_s = wait_bound_s
        self._shm_token = shm_token
        self._generation = 0
        self._connections: dict[int, Connection] = {}

    def start(self) -> None:
        """Workers that have joined their group; does nothing when they run already."""
        if self._connections:
            return
        self._generation += 1
        common = {
            "ranks": self.ranks,
            "fabric": self._fabric,
            "address": self._starter.address,
            "authkey": self._authkey.hex(),
            "shm_token": f"{self._shm_token}-{self._generation}",
            "store": self._starter.store(self._generation),
            "wait_bound_s": self._wait_bound_s,
        }
        arrived: queue.Queue[Connection] = queue.Queue()
        threading.Thread(target=self._accept, args=(arrived,), daemon=True).start()
        self._starter.start([{**common, "rank": rank} for rank in range(self.ranks)])
        deadline = time.monotonic() + _START_DEADLINE_S
        while len(self._connections) < self.ranks:
            try:
                connection = arrived.get(timeout=0.2)
                self._connections[connection.recv()[1]] = connection
            except (queue.Empty, EOFError):
                self._check_start(deadline)
        try:
            self._collect("ready", _START_DEADLINE_S, _START_DEADLINE_S, lambda *_: None)
        except GroupError as error:
            raise StartError(error.failure, None) from error

    def _accept(self, arrived: "queue.Queue[Connection]") -> None:
        """As many connections as ranks; strangers without the key are turned away."""
        accepted = 0
        while accepted < self.ranks:
            try:
                arrived.put(self._listener.accept())
                accepted += 1
            except (AuthenticationError, ConnectionError, EOFError):
                continue
            except OSError:
                return

    def _check_start(self, deadline: float) -> None:
        missing = [rank for rank in range(self.ranks) if rank not in self._connections]
        dead = [rank for rank in missing if not self._starter.alive(rank)]
        if dead or time.monotonic() > deadline:
            rank = (dead or missing)[0]
            text = f"did not start: {self._starter.describe(rank)}"
            self.kill()
            raise StartError(Failure(rank, "died", text), None)

    def call(
        self,
        job: dict[str, Any],
        silence_s: float,
        total_s: float,
        on_phase: Callable[[str, str], None] = lambda *_: None,
    ) -> Any:
        """Rank 0's reply to ``job``. Raises GroupError; the workers are gone then.

        ``silence_s`` bounds the time without news from any rank, ``total_s`` that of the job.
        """
        self.start()
        for rank, connection in self._connections.items():
            try:
                connection.send(job)
            except OSError:
                self._fail(Failure(rank, "died", self._died(rank)), None)
        return self._collect("done", silence_s, total_s, on_phase)

    def _collect(
        self,
        expected: str,
        silence_s: float,
        total_s: float,
        on_phase: Callable[[str, str], None],
    ) -> Any:
        """Wait until every rank sent ``expected``; decide who is at fault when one does not."""
        round_ = _Round(set(range(self.ranks)), silence_s, total_s)
        ranks = {connection: rank for rank, connection in self._connections.items()}
        while round_.pending:
            waiting: list[Any] = [c for c, rank in ranks.items() if rank in round_.pending]
            for connection in wait(waiting, round_.time_left()):
                assert isinstance(connection, Connection)
                rank = ranks[connection]
                try:
                    message = connection.recv()
                except (EOFError, OSError):
                    round_.fail(Failure(rank, "died", self._died(rank)), _GRACE_S)
                    continue
                round_.note(rank, message, expected, on_phase, self._wait_bound_s + _GRACE_S)
            if round_.time_left() <= 0 and round_.pending:
                round_.hang()
            if round_.is_decided():
                break
        if round_.failures:
            self._fail(at_fault(round_.failures), round_.cell_id)
        return round_.reply

    def _died(self, rank: int) -> str:
        return f"died: {self._starter.describe(rank)}"

    def _fail(self, failure: Failure, cell_id: str | None) -> None:
        self.kill()
        raise GroupError(failure, cell_id)

    def kill(self) -> None:
        """End the workers, whatever they are doing."""
        self._starter.kill()
        for connection in self._connections.values():
            connection.close()
        self._connections = {}

    def stop(self) -> None:
        """Let idle workers leave in order, then make sure."""
        for connection in self._connections.values():
            try:
                connection.send({"kind": "stop"})
            except OSError:
                continue
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline and any(
            self._starter.alive(rank) for rank in self._connections
        ):
            time.sleep(0.01)
        self.kill()
        # Somebody may have removed the socket's folder, temporary as it is.
        with contextlib.suppress(FileNotFoundError):
            self._listener.close()
        self._starter.close()


class _Round:
    """What is known while a job's replies come in."""

    def __init__(self, pending: set[int], silence_s: float, total_s: float) -> None:
        self.pending = pending
        self.failures: list[Failure] = []
        self.reply: Any = None
        self.cell_id: str | None = None
        self._silence_s = silence_s
        self._end = time.monotonic() + total_s
        self._deadline = min(self._end, time.monotonic() + silence_s)

    def time_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def note(
        self,
        rank: int,
        message: tuple[Any, ...],
        expected: str,
        on_phase: Callable[[str, str], None],
        grace_s: float,
    ) -> None:
        """Take one message of ``rank`` in."""
        if message[0] == "phase":
            if not self.failures:
                self.cell_id = message[1]
                self._deadline = min(self._end, time.monotonic() + self._silence_s)
                if rank == 0:
                    on_phase(message[1], message[2])
        elif message[0] == "failed":
            told = message[1]
            self.fail(Failure(rank, told["kind"], _told_text(told), told["fault"]), grace_s)
        else:
            assert message[0] == expected, f"rank {rank} sent {message[0]}, not {expected}"
            self.pending.discard(rank)
            self.reply = message[1] if rank == 0 and len(message) > 1 else self.reply

    def fail(self, failure: Failure, grace_s: float) -> None:
        """Record a failure, which starts the time the other ranks have to report.

        An error needs no answers of others, yet it may be the shadow of a death that is noticed
        later: where ranks share a GPU, a killed one takes its neighbours' contexts along.
        """
        self.pending.discard(failure.rank)
        if failure.kind == "error":
            grace_s = min(grace_s, _GRACE_S)
        if not self.failures or failure.kind == "error":
            self._deadline = min(self._deadline, time.monotonic() + grace_s)
        self.failures.append(failure)

    def hang(self) -> None:
        """The deadline passed: whoever is still silent hangs."""
        why = "while others waited for it" if self.failures else "within the deadline"
        names = ", ".join(str(rank) for rank in sorted(self.pending))
        silent = f" (silent ranks: {names})" if len(self.pending) > 1 else ""
        self.failures += [
            Failure(rank, "hung", f"hung: no answer {why}{silent}") for rank in sorted(self.pending)
        ]
        self.pending.clear()

    def is_decided(self) -> bool:
        """A death needs no further witness."""
        return any(f.kind == "died" for f in self.failures)


def _told_text(told: dict[str, Any]) -> str:
    verb = {"fault": "waited in vain:", "error": "raised", "peer": "saw"}[told["kind"]]
    return f"{verb} {told['text']}"
