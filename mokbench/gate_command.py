"""What the compare and check commands do, step by step."""

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import click
from rich.console import Console

from mokbench.command import RUNS_FOLDER
from mokbench.config import load
from mokbench.durable import as_results_error, replace_file
from mokbench.errors import ConfigError, ResultsError
from mokbench.machine import describe
from mokbench.regression import output
from mokbench.regression.check import Checked, accept, check, record
from mokbench.regression.confirm import Confirmation, config_of, interpreter
from mokbench.regression.history import History
from mokbench.regression.judge import Judged, judge_sides
from mokbench.regression.launch import METRICS, Launch, one_kind, refuse_copies
from mokbench.regression.levels import good_commit
from mokbench.regression.verdict import Limits, Verdict
from mokbench.report import units
from mokbench.results import RunFolder, open_runs
from mokbench.run_checks import (
    refuse_stale_key,
    refuse_torn,
    refuse_unfinished,
    refuse_unknown_method,
)
from mokbench.say import say
from mokbench.shown_text import visible

_ENDLESS = 10_000


@dataclass(frozen=True)
class CheckRequest:
    """The check command's arguments."""

    runs: tuple[str, ...]
    history: Path
    metrics: tuple[str, ...]
    floor: float
    confirm: bool
    baseline_python: str | None
    baseline_commit: str | None
    good_commit: bool
    config: Path | None
    rounds: int
    commit: str | None
    record: bool
    accept: str | None
    strict: bool
    explain: bool
    format: str
    junit: Path | None
    summary: Path | None
    comment: Path | None


def check_command(request: CheckRequest) -> int:
    """Judge, confirm, record, say it in every form asked for; returns the exit code."""
    metrics = known_metrics(request.metrics) or METRICS[:1]
    if request.good_commit:
        return _say_good_commit(request)
    if not request.runs:
        raise ConfigError(["check: give the RUNS to judge"])
    runs = open_runs(request.runs)
    _refuse_no_text(request, runs)
    checked = check(
        runs,
        request.history,
        metrics=metrics,
        limits=Limits(floor=request.floor),
        commit=request.commit,
        confirmation=_confirmation(request, runs),
    )
    if request.accept is not None:
        checked = accept(checked, request.accept)
        if short := output.short_level(checked):
            say(f"warning: {short}")
    elif request.record:
        checked = record(checked)
    _write_files(request, checked)
    # A reader who left (| head) must not turn a regression into exit code 0.
    with contextlib.suppress(BrokenPipeError):
        _show(request, checked)
    return checked.exit_code(request.strict)


def _refuse_no_text(request: CheckRequest, runs: Sequence[RunFolder]) -> None:
    """Raise ConfigError for bytes that are no UTF-8, before a history that cannot hold them."""
    told = {"--commit": request.commit, "--accept": request.accept}
    if request.record or request.accept is not None:
        told |= {f"run folder {i}": run.path.name for i, run in enumerate(runs, 1)}
    bad = {name: text for name, text in told.items() if text and not _is_text(text)}
    if bad:
        raise ConfigError([f"{name}: {text!r} is no UTF-8 text" for name, text in bad.items()])


def _is_text(found: str) -> bool:
    try:
        found.encode()
    except UnicodeEncodeError:
        return False
    return True


def _say_good_commit(request: CheckRequest) -> int:
    """Print the base that a confirmation needs; no line where the history has none yet."""
    if request.runs or request.record or request.accept is not None:
        raise ConfigError(["--good-commit judges and records nothing: it goes without RUNS"])
    history = History.of_machine(request.history, describe())
    found = good_commit(history.launches, history.levels)
    if found:
        click.echo(found)
    return 0


def _confirmation(request: CheckRequest, runs: Sequence[RunFolder]) -> Confirmation | None:
    if not request.confirm:
        if request.baseline_python is not None or request.baseline_commit is not None:
            raise ConfigError(["--baseline-python and --baseline-commit go with --confirm"])
        return None
    if request.baseline_python is None:
        raise ConfigError(
            ["--confirm needs --baseline-python: the python of the environment that has the base"]
        )
    if request.config is not None:
        load(request.config)  # what is no config is said now, not by a run that fails
    stamp = f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    return Confirmation(
        baseline_python=interpreter(request.baseline_python),
        config=request.config or config_of(runs[0]),
        out=RUNS_FOLDER / f"confirm-{stamp}",
        rounds=request.rounds,
        say=say,
        baseline_commit=request.baseline_commit,
    )


def _write_files(request: CheckRequest, checked: Checked) -> None:
    """JUnit, step summary and comment body."""
    first = output.headline(checked)
    title = f"mokbench check: {_word(checked)}"
    if request.junit is not None:
        _write(request.junit, output.junit(checked))
    if request.summary is not None:
        # GitHub's file collects what several commands of a step append.
        with as_results_error(request.summary, "reading", "name a file that can be read"):
            there = request.summary.read_bytes() if request.summary.is_file() else b""
        room = output.SUMMARY_BYTES - len(there)
        text = output.markdown(title, first, checked.judged, room)
        _write(request.summary, there + text.encode()[: max(room, 0)])
    if request.comment is not None:
        text = output.markdown(title, first, checked.judged, output.COMMENT_BYTES)
        _write(request.comment, text.encode())


def _word(checked: Checked) -> str:
    found = [one for one in checked.judged if one.gates]
    return found[0].call.verdict.value if found else "nothing may gate"


def _write(path: Path, content: bytes) -> None:
    with as_results_error(path, "writing", "name a file that can be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() or (path.exists() and not path.is_file()):
            # /dev/stdout, a pipe, a device: written to, a file must not take its place.
            path.write_bytes(content)
        else:
            replace_file(path, content)


def _show(request: CheckRequest, checked: Checked) -> None:
    first = output.headline(checked)
    if request.format == "json":
        click.echo(json.dumps(output.check_json(checked, request.strict), indent=1))
    elif request.format == "markdown":
        click.echo(output.markdown("mokbench check", first, checked.judged, 1 << 30))
    else:
        _print_table(checked.judged, request.explain)
        click.echo(visible(first))


def _print_table(judged: Sequence[Judged], explain: bool) -> None:
    drawn = output.table(judged, explain)
    if drawn.row_count:
        console = Console()
        if not console.is_terminal and "COLUMNS" not in os.environ:
            # A pipe or a file gets whole ids and no padding behind them.
            console.width = _ENDLESS
        with console.capture() as caught:
            console.print(drawn)
        click.echo("\n".join(line.rstrip() for line in caught.get().splitlines()))


def compare_command(
    a: Sequence[str],
    b: Sequence[str],
    *,
    metrics: tuple[str, ...],
    floor: float,
    launch_noise: float | None,
    force: bool,
    explain: bool,
    format_: str,
) -> None:
    """Compare the launches of side B with those of side A, cell by cell."""
    chosen = known_metrics(metrics) or METRICS
    sides = open_runs(a), open_runs(b)
    base, found = map(_launches, sides)
    try:
        one_kind([*base, *found])
        for run in [*sides[0], *sides[1]]:
            refuse_unknown_method(run)
            refuse_unfinished(run)
            refuse_stale_key(run.path / "run.json", run.meta.machine)
        refuse_copies([*base, *found])  # on both sides a launch draws them together
    except ResultsError as error:
        if not force:
            raise ResultsError(f"{error}; --force compares all the same") from error
        say(f"warning: {error}")
    least = 1 if launch_noise is not None else 2
    limits = Limits(floor=floor, least_base=least, least_candidate=least)
    judged = judge_sides(base, found, chosen, limits, launch_noise)
    ids = [{name for launch in side for name in launch.ids} for side in (base, found)]
    alone = {"only_in_a": sorted(ids[0] - ids[1]), "only_in_b": sorted(ids[1] - ids[0])}
    if format_ == "json":
        click.echo(json.dumps({"series": output.as_json(judged), **alone}, indent=1))
        return
    launches = f"{len(found)} against {len(base)}"
    summary = _compared(judged, launches, alone, launch_noise is None)
    if format_ == "markdown":
        click.echo(output.markdown("mokbench compare", summary, judged, 1 << 30))
        return
    _print_table(judged, explain)
    click.echo(visible(summary))


def _launches(runs: Sequence[RunFolder]) -> list[Launch]:
    for run in runs:
        refuse_torn(run)
    # A folder keeps the rows it has read: opened anew it lets go of them after each launch.
    launches = [Launch.of(RunFolder.open(run.path)) for run in runs]
    one_kind(launches)
    refuse_copies(launches)
    return launches


def _compared(
    judged: Sequence[Judged], launches: str, alone: dict[str, list[str]], noise_unknown: bool
) -> str:
    tally = output.tally(judged) or "no cell is in both"
    parts = [f"{tally} (launches: {launches}; ratios are B over A)"]
    parts += [
        f"{units.count(len(ids), 'cell')} {where.replace('_', ' ')[:-1]}{where[-1].upper()}, for "
        f"example {ids[0]}"
        for where, ids in alone.items()
        if ids
    ]
    if noise_unknown and any(one.call.verdict is Verdict.INSUFFICIENT for one in judged):
        parts.append(
            "one launch does not tell how launches differ: give several runs a side (a glob in "
            "quotes), or say what you know of it: --launch-noise 1%"
        )
    return "; ".join(parts)


def known_metrics(names: Sequence[str]) -> tuple[str, ...]:
    """Check metric names. Raises ConfigError with the allowed ones."""
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise ConfigError(
            [f"--metric {name}: unknown; allowed: {', '.join(METRICS)}" for name in unknown]
        )
    return tuple(dict.fromkeys(names))
