"""The commands: run, report, doctor, systems, schema. Data goes to stdout, talk to stderr."""

import contextlib
import io
import json
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import click

from mokbench import __version__
from mokbench.errors import ConfigError, MokbenchError, ResultsError

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
EXIT_BAD_USAGE = 2
EXIT_CELLS_FAILED = 3
EXIT_INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Is a MoK-style megakernel faster than dispatch, grouped GEMM and combine, and why?

    \b
    mokbench run configs/quickstart.yaml      measure, needs no GPU
    mokbench report results/runs/...          table and charts of a run
    """
    # A warning is meant for the user, who has no use for the line of ours that raised it.
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character still shows the rest.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"


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
@click.argument("runs", nargs=-1, required=True)
@click.option(
    "--format",
    "format_",
    type=click.Choice(["table", "markdown", "json"]),
    default="table",
    show_default=True,
)
@click.option("--charts", type=click.Path(path_type=Path), help="Folder for PNG and SVG charts.")
@click.option("--no-charts", is_flag=True, help="With the table: draw no charts.")
def report(runs: tuple[str, ...], format_: str, charts: Path | None, no_charts: bool) -> None:
    """Show runs: who is faster by how much, signaling, bytes, imbalance, what failed and why.

    RUNS are run folders or globs. The table also draws charts, into the run's own folder unless
    --charts names another.

    \b
    mokbench report results/runs/quickstart-20260101-120000
    mokbench report results/runs/* --format json
    """
    with _exit_on_error():
        from mokbench.command import report_command

        report_command(runs, format_, charts, no_charts)


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
        click.echo(str(error), err=True)
        sys.exit(EXIT_BAD_USAGE)
    except MokbenchError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(EXIT_CELLS_FAILED)
    except BrokenPipeError:
        # `mokbench report | head`: nobody reads on, and that is fine.
        sys.stderr.close()
        sys.exit(0)


def _interrupt(_signum: int, _frame: FrameType | None) -> None:
    """Stop once: what is stored and which processes end must not depend on a second Ctrl-C."""
    for number in _INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
