"""What the launch command does: render the file that runs a config on N nodes, and submit it."""

import shlex
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click

from mokbench.cells import expand
from mokbench.cluster import Cluster
from mokbench.config import Suite, load
from mokbench.elsewhere import refusal_elsewhere
from mokbench.errors import ConfigError, MokbenchError
from mokbench.launch_files import kubernetes, slurm, torchrun
from mokbench.launch_files.job import Job
from mokbench.say import say
from mokbench.selection import select
from mokbench.workload import Cell


@dataclass(frozen=True)
class LaunchRequest:
    """The launch command's arguments."""

    config: Path
    launcher: str | None
    nodes: int
    only: tuple[str, ...]
    out: Path | None
    resume: Path | None
    submit: bool
    dry_run: bool


@dataclass(frozen=True)
class _Launcher:
    """``submit`` reads what ``render`` makes from standard input; ``waits``: till the run ends."""

    render: Callable[[Job], str]
    submit: tuple[str, ...]
    waits: bool = False


_LAUNCHERS = {
    "slurm": _Launcher(slurm.script, ("sbatch",)),
    "torchrun": _Launcher(torchrun.script, ("bash", "-s"), waits=True),
    # Not apply, which leaves a job of the same name that has ended as it is, and says all is well.
    "k8s": _Launcher(kubernetes.manifest, ("kubectl", "create", "-f", "-")),
}


def launch_command(request: LaunchRequest) -> None:
    """Print the file, or hand it to its launcher where that is asked for."""
    if request.launcher is None:
        raise ConfigError(["name the launcher: --slurm, --torchrun or --k8s"])
    if request.out is not None and request.resume is not None:
        raise ConfigError(["--out and --resume both name the run folder: give one of them"])
    suite = load(request.config)
    if suite.cluster is None:
        raise ConfigError(
            [
                f"{request.config}: has no cluster section, which says where ranks run; the least "
                "is cluster: {ranks_per_node: 8}, configs/README.md has all of it"
            ]
        )
    chosen = _LAUNCHERS[request.launcher]
    text = chosen.render(_job(request, suite, suite.cluster))
    shown = shlex.join(chosen.submit)
    if request.submit and not request.dry_run:
        say(f"handing it to: {shown}")
        _submit(chosen, text)
        return
    if request.submit:
        say(f"dry run; without --dry-run this goes to: {shown}")
    click.echo(text, nl=False)


def _job(request: LaunchRequest, suite: Suite, cluster: Cluster) -> Job:
    """The job, with the cells that it runs said on standard error."""
    ranks = request.nodes * cluster.ranks_per_node
    fabric = "host" if suite.fabric == "host" else "cuda"
    cells = select(expand(suite, fabric), request.only)
    counts = sorted({cell.workload.ranks for cell in cells})
    if ranks not in counts:
        raise ConfigError(
            [
                f"{request.config}: --nodes {request.nodes} of cluster.ranks_per_node "
                f"{cluster.ranks_per_node} are {ranks} ranks, and no cell has that many; there is "
                f"{', '.join(map(str, counts))}"
            ]
        )
    _say_cells([cell for cell in cells if cell.workload.ranks == ranks], cluster, suite.name)
    config, options = _path(request.config), _options(request)
    nodes = ("--nodes", str(request.nodes))
    return Job(
        name=suite.name,
        config=config,
        text=suite.text,
        nodes=request.nodes,
        cluster=cluster,
        arguments=(*options, *(("--only", f"ranks={ranks}") if len(counts) > 1 else ())),
        command=("mokbench", "launch", f"--{request.launcher}", config, *nodes, *options),
        on_gpus=fabric == "cuda",
    )


def _path(path: Path) -> str:
    """A path that no command takes for an option. Raises ConfigError where it is no text."""
    text = f"./{path}" if str(path).startswith("-") else str(path)
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes that are no UTF-8
        raise ConfigError([f"{text!r} is no UTF-8 text; give it another name"]) from None
    return text


def _options(request: LaunchRequest) -> tuple[str, ...]:
    """What run takes as launch does."""
    given = [("--out", request.out), ("--resume", request.resume)]
    options = [text for option, path in given if path for text in (option, _path(path))]
    return (*options, *(text for term in request.only for text in ("--only", term)))


def _say_cells(cells: list[Cell], cluster: Cluster, name: str) -> None:
    """How many cells run there; which do not, and why. Raises ConfigError where none does."""
    reasons = [refusal_elsewhere(cell, cluster) for cell in cells]
    refused = Counter((cell.system, why) for cell, why in zip(cells, reasons, strict=True) if why)
    lines = [
        f"{system}: {number} cell{'s' * (number != 1)} unsupported: {why}"
        for (system, why), number in refused.items()
    ]
    able = len(cells) - refused.total()
    if able == 0:
        raise ConfigError([f"{name}: no cell of {len(cells)} can run there", *lines])
    ranks = cells[0].workload.ranks
    say(f"{name}: {able} of {len(cells)} cells can run on these {ranks} ranks")
    for line in lines:
        say(line)


def _submit(launcher: _Launcher, text: str) -> None:
    """Hand ``text`` over; Ctrl-C ends it in order.

    Raises ConfigError where nothing was submitted, MokbenchError where the run itself failed.
    """
    command = launcher.submit
    if shutil.which(command[0]) is None:
        raise ConfigError(
            [
                f"{command[0]} is not on PATH here: leave --submit out, write the file with > and "
                "submit it where it is"
            ]
        )
    with subprocess.Popen(command, stdin=subprocess.PIPE, encoding="utf-8") as process:
        try:
            process.communicate(text)
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise
    if process.returncode and launcher.waits:
        raise MokbenchError(f"a host ended with exit code {process.returncode}; it said why above")
    if process.returncode:
        shown = f"{shlex.join(command)} ended with exit code {process.returncode}"
        raise ConfigError([f"{shown}: nothing was submitted"])
