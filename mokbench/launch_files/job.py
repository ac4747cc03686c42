"""What a launch file starts: nodes, ranks, the run command, and what comes before it."""

import shlex
from dataclasses import dataclass

from mokbench.cluster import Cluster

# torchrun's own default.
DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Job:
    """``nodes`` nodes of ``cluster.ranks_per_node`` ranks each.

    ``text`` is the config's; ``arguments`` follow ``mokbench run CONFIG``; ``command`` is the
    command line that made this job, for the reader. ``on_gpus`` is False on the host fabric.
    """

    name: str
    config: str
    text: str
    nodes: int
    cluster: Cluster
    arguments: tuple[str, ...]
    command: tuple[str, ...]
    on_gpus: bool

    @property
    def ranks(self) -> int:
        """Ranks of all nodes."""
        return self.nodes * self.cluster.ranks_per_node

    @property
    def title(self) -> str:
        """Comment lines at the head of every file; no line of it ends the comment."""
        # A line end would end the comment, and YAML takes no control characters even there.
        made_by = "".join(c if c.isprintable() else "?" for c in shlex.join(self.command))
        where = f"{self.cluster.ranks_per_node} on each of {self.nodes} nodes"
        return f"# {made_by}\n# {self.ranks} ranks, {where if self.nodes > 1 else 'on one node'}.\n"

    def run(self, config: str | None = None) -> str:
        """Arguments from ``run`` on, quoted for a shell; ``config`` where it lies elsewhere."""
        return shlex.join(["run", config or self.config, *self.arguments])

    @property
    def setup(self) -> list[str]:
        """Shell lines before the run: what the user wrote, the environment, its variables."""
        cluster = self.cluster
        activate = [f". {shlex.quote(f'{cluster.venv}/bin/activate')}"] if cluster.venv else []
        exports = [f"export {name}={shlex.quote(v)}" for name, v in cluster.variables.items()]
        return [*cluster.setup, *activate, *exports]

    def torchrun(self, *rendezvous: str) -> str:
        """A node's torchrun, up to mokbench's arguments; ``rendezvous`` is shell text."""
        sizes = f"--nnodes={self.nodes} --nproc-per-node={self.cluster.ranks_per_node}"
        return " ".join(["torchrun", sizes, *rendezvous, "-m mokbench"])
