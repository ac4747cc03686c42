"""Ranks under torchrun or srun: every launcher process is an agent with one worker; rank 0 leads.

The launcher's processes cannot be restarted one by one, so the ranks that measure are their
children: after a fault the agents start new ones, and the launcher sees nothing of it.
"""

import json
import os
import secrets
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mokbench.errors import ConfigError, MokbenchError
from mokbench.keeper import Keeper
from mokbench.spawn import WorkerProcess, worker_environment

if TYPE_CHECKING:
    from torch.distributed import Store

_JOIN_DEADLINE_S = 120.0
_KEY = "mokbench/agents"


@dataclass(frozen=True)
class Launcher:
    """What torchrun or srun told this process. ``agent_store``: the launcher hosts the store."""

    name: str
    rank: int
    ranks: int
    nodes: int
    master_host: str
    master_port: int
    agent_store: bool

    @property
    def bind_host(self) -> str:
        """The address to listen on: loopback when all ranks are here, else every interface."""
        loopback = self.master_host in ("127.0.0.1", "localhost", "::1")
        return "127.0.0.1" if loopback else ""

    def told(self) -> dict[str, Any]:
        """What run.json keeps of it."""
        return {"name": self.name, "ranks": self.ranks, "nodes": self.nodes}

    @classmethod
    def detect(cls, environment: Mapping[str, str]) -> "Launcher | None":
        """The launcher this process runs under, or None: then the command starts its own ranks.

        Raises ConfigError for half of a launcher's variables.
        """
        try:
            return cls._detect(environment)
        except (KeyError, ValueError) as error:
            raise ConfigError(
                [
                    f"the environment looks like torchrun's or srun's, but {error} is missing or "
                    "no number; unset TORCHELASTIC_RUN_ID and SLURM_STEP_NUM_TASKS to run without"
                ]
            ) from error

    @classmethod
    def _detect(cls, environment: Mapping[str, str]) -> "Launcher | None":
        if "TORCHELASTIC_RUN_ID" in environment:
            ranks = int(environment["WORLD_SIZE"])
            return cls(
                name="torchrun",
                rank=int(environment["RANK"]),
                ranks=ranks,
                nodes=ranks // int(environment["LOCAL_WORLD_SIZE"]),
                master_host=environment["MASTER_ADDR"],
                master_port=int(environment["MASTER_PORT"]),
                agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            )
        # SLURM_STEP_NUM_TASKS is srun's; a batch script of many tasks itself is one process.
        ranks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
        if ranks == 1:
            return None
        nodes = int(environment.get("SLURM_STEP_NUM_NODES", "1"))
        host = environment.get("MASTER_ADDR") or ("127.0.0.1" if nodes == 1 else "")
        if not host:
            raise ConfigError(
                ["srun on several nodes: set MASTER_ADDR to the first node's name before srun"]
            )
        # Jobs of one node must not share a port; a job's id is what tells them apart.
        default_port = 20000 + int(environment.get("SLURM_JOB_ID", "0")) % 20000
        return cls(
            name="srun",
            rank=int(environment["SLURM_PROCID"]),
            ranks=ranks,
            nodes=nodes,
            master_host=host,
            master_port=int(environment.get("MASTER_PORT", default_port)),
            agent_store=False,
        )


def too_few_gpus(launcher: Launcher, visible: int) -> str:
    """Why a launcher's ranks do not run on the GPUs that this process sees, and what to do."""
    without = f"run mokbench without {launcher.name}, it starts ranks and daemon"
    found = f"{launcher.name} started {launcher.ranks} ranks, and this one sees {visible} GPU"
    found += "s" if visible != 1 else ""
    shared = f"ranks that share a GPU need an MPS daemon of their own: {without}"
    if launcher.name != "srun":
        return f"{found}; {shared}"
    # Bound to one GPU each, tasks call every one of them 0 and cannot reach one another's memory.
    return (
        f"{found}; where srun binds a GPU to each task (--gpus-per-task, --gpu-bind), let every "
        "task see them all: srun --gpus-per-node=N --gpu-bind=none, mokbench gives each rank its "
        f"own. Where GPUs are fewer than ranks, {shared}"
    )


class JoinedStarter:
    """Rank 0's side: starts its own worker and has the other agents start theirs."""

    def __init__(self, launcher: Launcher, agents: dict[int, Connection]) -> None:
        self._launcher, self._agents = launcher, agents
        self._own = _Agent()
        self._started: set[int] = set()
        self._port = 0

    def listen(self, authkey: bytes) -> Listener:
        """See Starter; on all interfaces only where the launcher named a real host."""
        listener = Listener((self._launcher.bind_host, 0), authkey=authkey)
        self._port = listener.address[1]
        return listener

    @property
    def address(self) -> tuple[str, int]:
        """See Starter."""
        return (self._launcher.master_host, self._port)

    def store(self, generation: int) -> dict[str, Any]:
        """The launcher's store, under a prefix that no dead generation has used."""
        return {
            "kind": "tcp",
            "host": self._launcher.master_host,
            "port": self._launcher.master_port,
            "prefix": f"mokbench/{os.getpid()}/{id(self)}/{generation}",
        }

    def start(self, specs: list[dict[str, Any]]) -> None:
        """See Starter."""
        for spec in specs:
            self._started.add(spec["rank"])
            self._ask(spec["rank"], "start", spec)

    def alive(self, rank: int) -> bool:
        """See Starter."""
        return rank in self._started and self._ask(rank, "alive") is True

    def describe(self, rank: int) -> str:
        """See Starter."""
        return str(self._ask(rank, "describe"))

    def kill(self) -> None:
        """See Starter."""
        for rank in sorted(self._started):
            self._ask(rank, "kill")
        self._started = set()

    def close(self) -> None:
        """Agents stay for the next pool; nothing else was made."""

    def _ask(self, rank: int, verb: str, argument: Any = None) -> Any:
        if rank == 0:
            return self._own.answer(verb, argument)
        try:
            self._agents[rank].send((verb, argument))
            return self._agents[rank].recv()
        except (EOFError, OSError):
            return f"the {self._launcher.name} process of rank {rank} is gone"


class _Agent:
    """One launcher process: owns at most one worker."""

    def __init__(self) -> None:
        self._worker: WorkerProcess | None = None
        self._keeper: Keeper | None = None
        self._log = Path(tempfile.gettempdir()) / f"mokbench-{os.getpid()}.log"

    def answer(self, verb: str, argument: Any) -> Any:
        """Carry out one request of the leading rank."""
        if verb == "start":
            self._keeper = Keeper()
            self._keeper.remember(self._log)
            self._keeper.remember_segments(argument["shm_token"])
            environment = worker_environment(argument["fabric"])
            self._worker = WorkerProcess(argument, self._log, environment, self._keeper)
        elif verb == "alive":
            return self._worker is not None and self._worker.alive()
        elif verb == "describe":
            return self._worker.describe() if self._worker else "it was never started"
        elif verb == "kill":
            if self._worker is not None:
                self._worker.kill()
            if self._keeper is not None:
                self._keeper.close()
            self._worker, self._keeper = None, None
            self._log.unlink(missing_ok=True)
        return None


Lead = Callable[[JoinedStarter], int]


def run_joined(launcher: Launcher, lead: Lead) -> int:
    """Lead as rank 0, serve as any other rank; the exit code is rank 0's on all of them."""
    if launcher.nodes > 1:
        raise MokbenchError(
            f"{launcher.name} started ranks on {launcher.nodes} nodes; mokbench reaches one node "
            "only, on the host and on the cuda fabric: use one node"
        )
    store = _open_store(launcher)
    if launcher.rank == 0:
        return _lead(launcher, store, lead)
    return _serve(launcher, store)


def _open_store(launcher: Launcher) -> "Store":
    from datetime import timedelta

    from torch.distributed import TCPStore

    return TCPStore(
        launcher.master_host,
        launcher.master_port,
        is_master=launcher.rank == 0 and not launcher.agent_store,
        timeout=timedelta(seconds=_JOIN_DEADLINE_S),
        wait_for_workers=False,
    )


def _lead(launcher: Launcher, store: "Store", lead: Lead) -> int:
    authkey = secrets.token_bytes(16)
    agents: dict[int, Connection] = {}
    with Listener((launcher.bind_host, 0), authkey=authkey) as meeting:
        port = meeting.address[1]
        store.set(_KEY, json.dumps([launcher.master_host, port, authkey.hex()]))
        while len(agents) < launcher.ranks - 1:
            connection = meeting.accept()
            agents[connection.recv()] = connection
        code = 3
        try:
            code = lead(JoinedStarter(launcher, agents))
        finally:
            for connection in agents.values():
                try:
                    connection.send(("exit", code))
                except OSError:
                    continue
    return code


def _serve(launcher: Launcher, store: "Store") -> int:
    host, port, authkey = json.loads(store.get(_KEY))
    connection = Client((host, port), authkey=bytes.fromhex(authkey))
    connection.send(launcher.rank)
    agent = _Agent()
    try:
        while True:
            verb, argument = connection.recv()
            if verb == "exit":
                return int(argument)
            connection.send(agent.answer(verb, argument))
    except (EOFError, OSError):
        return 3
    finally:
        agent.answer("kill", None)
