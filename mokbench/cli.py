"""The commands: run, launch, report, compare, check, doctor, ...; data goes to stdout."""

import contextlib
import io
import json
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import click

from mokbench import __version__
from mokbench.command_group import EXIT_INTERRUPTED, CommandGroup
from mokbench.errors import ConfigError, MokbenchError, ResultsError
from mokbench.say import say
from mokbench.shown_text import visible

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
EXIT_BAD_USAGE = 2
EXIT_CELLS_FAILED = 3


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Is a MoK-style megakernel faster than dispatch, grouped GEMM and combine, and why?

    \b
    mokbench run configs/quickstart.yaml      measure, needs no GPU
    mokbench report results/runs/...          table and charts of a run
    mokbench check ... --history DIR          did anything become slower?
    """
    # A warning is meant for the user, who has no use for the line of ours that raised it.
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character still shows the rest.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    warnings.formatwarning = lambda message, *_, **__: visible(f"warning: {message}\n")


@main.command()
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Run folder to make.")
@click.option("--resume", type=click.Path(path_type=Path), help="Go on with this run folder.")
@click.option("--rerun-failed", is_flag=True, help="With --resume: measure failed cells again.")
@click.option("--only", multiple=True, metavar="KEY=VALUE", help="Only these cells; repeatable.")
@click.option("--dry-run", is_flag=True, help="List the cells with estimated time and memory.")
@click.option("--quiet", is_flag=True, help="No progress, failures only.")
@click.option("--no-charts", is_flag=True, help="Do not draw charts at the end.")
def run(
    config: Path | None,
    out: Path | None,
    resume: Path | None,
    rerun_failed: bool,
    only: tuple[str, ...],
    dry_run: bool,
    quiet: bool,
    no_charts: bool,
) -> None:
    """Measure every cell of CONFIG and store the rows in a run folder.

    The folder's path is the last line on standard output.

    \b
    mokbench run configs/quickstart.yaml
    mokbench run my.yaml --only system=mok --only ranks=4
    mokbench run --resume results/runs/quickstart-20260101-120000
    """
    with _exit_on_error():
        from mokbench.command import Request, run_command

        request = Request(config, out, resume, rerun_failed, only, dry_run, quiet, not no_charts)
        sys.exit(run_command(request))


@main.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--slurm", "launcher", flag_value="slurm", help="An sbatch script.")
@click.option("--torchrun", "launcher", flag_value="torchrun", help="torchrun lines through ssh.")
@click.option("--k8s", "launcher", flag_value="k8s", help="A Kubeflow PyTorchJob.")
@click.option("--nodes", required=True, type=click.IntRange(min=1), help="Nodes of the cluster.")
@click.option("--only", multiple=True, metavar="KEY=VALUE", help="Only these cells; repeatable.")
@click.option("--out", type=click.Path(path_type=Path), help="Run folder to make.")
@click.option("--resume", type=click.Path(path_type=Path), help="Go on with this run folder.")
@click.option("--submit", is_flag=True, help="Hand it to sbatch, ssh or kubectl.")
@click.option("--dry-run", is_flag=True, help="Submit nothing, whatever else is asked.")
def launch(**options: Any) -> None:
    """Print the file that runs CONFIG on nodes of its cluster section; submit it if asked.

    \b
    mokbench launch --slurm configs/nvl72.yaml --nodes 18 > nvl72.sbatch
    mokbench launch --torchrun configs/h100-8x2.yaml --nodes 2 --submit
    """
    with _exit_on_error():
        from mokbench.launch_command import LaunchRequest, launch_command

        launch_command(LaunchRequest(**options))


@main.command()
@click.argument("runs", nargs=-1)
@click.option("--history", type=click.Path(path_type=Path), help="Show a history, not runs.")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["table", "markdown", "json", "html"]),
    default="table",
    show_default=True,
)
@click.option("--charts", type=click.Path(path_type=Path), help="Folder for PNG and SVG charts.")
@click.option("--no-charts", is_flag=True, help="With the table: draw no charts.")
def report(
    runs: tuple[str, ...],
    history: Path | None,
    format_: str,
    charts: Path | None,
    no_charts: bool,
) -> None:
    """Show runs: who is faster by how much, signaling, bytes, imbalance, what failed and why.

    RUNS are run folders or globs. The table also draws charts, into the run's own folder unless
    --charts names another. html is one file with everything in it.

    \b
    mokbench report results/runs/quickstart-20260101-120000
    mokbench report results/runs/* --format html > report.html
    mokbench report --history results/history --format html > history.html
    """
    with _exit_on_error():
        from mokbench.report_command import history_command, report_command

        if history is not None and not runs:
            history_command(history, format_, charts)
        elif runs and history is None:
            report_command(runs, format_, charts, no_charts)
        else:
            raise ConfigError(["name run folders, or a history with --history, not both"])


def _share(_context: click.Context, _option: click.Parameter, value: str | None) -> float | None:
    """Read 2% or 0.02 as 0.02."""
    from mokbench.quantity import percent

    if value is None:
        return None
    try:
        found = float(percent(value))
    except ValueError:
        found = 0.0
    if not 0 < found < 1:
        raise click.BadParameter(f"{value}: a share such as 2% or 0.02, above 0 and below 1")
    return found


_METRIC = click.option("--metric", "metrics", multiple=True, help="Only this one; repeatable.")
_FLOOR = click.option(
    "--floor", default="2%", show_default=True, callback=_share, help="Smallest change that counts."
)
_EXPLAIN = click.option("--explain", is_flag=True, help="Every series, and why it got its verdict.")
_FORMAT = click.option(
    "--format",
    "format_",
    type=click.Choice(["table", "markdown", "json"]),
    default="table",
    show_default=True,
)


@main.command()
@click.argument("a")
@click.argument("b")
@_METRIC
@_FLOOR
@click.option("--launch-noise", callback=_share, help="How launches differ, if known, as 1%.")
@click.option("--force", is_flag=True, help="Warn of what differs or is unfinished only.")
@_EXPLAIN
@_FORMAT
def compare(a: str, b: str, force: bool, format_: str, **options: Any) -> None:
    """Compare run B with run A, cell by cell; a side may be a glob of several launches.

    \b
    mokbench compare results/runs/before results/runs/after
    mokbench compare 'runs/before-*' 'runs/after-*' --explain
    """
    with _exit_on_error():
        from mokbench.gate_command import compare_command

        compare_command([a], [b], force=force, format_=format_, **options)


_PATH = click.Path(path_type=Path)


@main.command()
@click.argument("runs", nargs=-1)
@click.option("--history", type=_PATH, required=True, help="Folder of history files.")
@click.option("--record", is_flag=True, help="Append the runs to the history.")
@click.option("--accept", metavar="REASON", help="Record the runs; their level is the new normal.")
@click.option("--confirm", is_flag=True, help="Measure suspects again, in turn with the base.")
@click.option("--baseline-python", help="Python of the base's environment.")
@click.option("--baseline-commit", help="What the base is; a good one can clear suspects.")
@click.option("--good-commit", is_flag=True, help="Print this machine's last good commit; no RUNS.")
@click.option("--config", type=_PATH, help="Config for --confirm, if the run's has moved.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(2, 20))
@click.option(
    "--commit", envvar=["MOKBENCH_COMMIT", "GITHUB_SHA", "CI_COMMIT_SHA"], help="What was measured."
)
@_METRIC
@_FLOOR
@click.option("--strict", is_flag=True, help="Exit 4 where something is not settled.")
@click.option("--junit", type=_PATH, help="Write JUnit XML.")
@click.option("--summary", type=_PATH, help="Append markdown for a GitHub step summary.")
@click.option("--comment", type=_PATH, help="Write a comment's body, below GitHub's limit.")
@_EXPLAIN
@_FORMAT
def check(format_: str, **options: Any) -> None:
    """Gate: judge RUNS, at least 3 launches, against a history; exit 1 for a regression.

    \b
    mokbench check 'runs/nightly-*' --history results/history --record
    """
    with _exit_on_error():
        from mokbench.gate_command import CheckRequest, check_command

        sys.exit(check_command(CheckRequest(format=format_, **options)))


@main.command()
@click.option(
    "--format", "format_", type=click.Choice(["table", "json"]), default="table", show_default=True
)
def doctor(format_: str) -> None:
    """Say what this machine has, which systems run on it, and what to do about what is missing."""
    from mokbench.doctor import doctor_command

    with _exit_on_error():
        doctor_command(format_)


@main.command()
def systems() -> None:
    """List the systems, what each is, and its options with their defaults."""
    from mokbench.systems import system_class
    from mokbench.systems.options import SYSTEM_OPTIONS

    for name, options in SYSTEM_OPTIONS.items():
        module = sys.modules[system_class(name).__module__]
        click.echo(f"{name}: {(module.__doc__ or '').splitlines()[0]}")
        for option, info in options.model_fields.items():
            click.echo(f"    {option} = {info.default}: {info.description}")


@main.command()
def schema() -> None:
    """Print the JSON schema of a config file, for editors."""
    from mokbench.config import schema as config_schema

    click.echo(json.dumps(config_schema(), indent=2))


@contextlib.contextmanager
def _exit_on_error() -> Iterator[None]:
    """Turn our own errors into a message and the exit code of the contract."""
    for number in _INTERRUPTS:
        signal.signal(number, _interrupt)
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except (ConfigError, ResultsError) as error:
        say(str(error))
        sys.exit(EXIT_BAD_USAGE)
    except MokbenchError as error:
        say(f"error: {error}")
        sys.exit(EXIT_CELLS_FAILED)


def _interrupt(_signum: int, _frame: FrameType | None) -> None:
    """Stop once: what is stored and which processes end must not depend on a second Ctrl-C."""
    for number in _INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
