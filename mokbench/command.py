"""What the run command does, step by step."""

import contextlib
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import click

from mokbench import machine, moment, report, trace
from mokbench.cells import expand
from mokbench.code_version import code_version
from mokbench.config import Suite, load, parse
from mokbench.dry_run import print_plan
from mokbench.errors import ConfigError, MokbenchError, ResultsError
from mokbench.fabric import segments
from mokbench.gpu_neighbours import neighbours, refuse_mps_variables
from mokbench.gpus import LEAST_CAPABILITY, Gpus, read_gpus
from mokbench.joined import JoinedStarter, Launcher, run_joined, too_few_gpus
from mokbench.launch import WorkerPool
from mokbench.output_console import OutputConsole
from mokbench.progress import make_progress
from mokbench.record import Record
from mokbench.report_command import draw
from mokbench.results import RunFolder
from mokbench.run_checks import refuse_changed_cells, refuse_moved_ranks
from mokbench.run_meta import RunMeta
from mokbench.say import say
from mokbench.selection import select
from mokbench.spawn import LocalStarter
from mokbench.sweep import Sweep
from mokbench.topology import Topology, one_machine, placed
from mokbench.workload import Cell

RUNS_FOLDER = Path("results/runs")
INTERRUPTED, FAILED, DONE = 130, 3, 0


@dataclass(frozen=True)
class Request:
    """The run command's arguments."""

    config: Path | None
    out: Path | None
    resume: Path | None
    rerun_failed: bool
    only: tuple[str, ...]
    dry_run: bool
    quiet: bool
    charts: bool


def run_command(request: Request) -> int:
    """Measure, or list what would be measured; returns the exit code."""
    launcher = Launcher.detect(os.environ)
    if launcher and request.dry_run and launcher.rank != 0:
        return DONE  # one list is enough
    if launcher is None or request.dry_run:
        return _run(request, None, None)
    return run_joined(launcher, lambda starter: _run(request, launcher, starter))


def _run(request: Request, launcher: Launcher | None, starter: JoinedStarter | None) -> int:
    suite = _load_suite(request)
    gpus = read_gpus()
    fabric = _fabric(suite, gpus, request.dry_run)
    if launcher and fabric == "cuda" and gpus.ranks_per_gpu(launcher.ranks) > 1:
        raise ConfigError([too_few_gpus(launcher, gpus.visible())])
    topology = one_machine(fabric, gpus)
    cells = placed(select(expand(suite, fabric=fabric), request.only), topology)
    trace.check(cells)
    if request.dry_run:
        stored = RunFolder.open(request.resume) if request.resume else None
        print_plan(suite, _left(request, stored, cells), fabric, gpus)
        return DONE
    if fabric == "cuda":
        refuse_mps_variables()
        for line in neighbours(gpus):
            say(f"note: {line}")
    segments.remove_stale()
    places = map(topology, dict.fromkeys(cell.workload.ranks for cell in cells))
    # A launcher may have started fewer ranks than some cells ask for.
    topologies = list({found.ranks: found for found in places}.values())
    folder = _open_folder(request, suite, cells, launcher, topologies)
    token = segments.new_token()

    def make_pool(ranks: int) -> WorkerPool:
        share_gpu = fabric == "cuda" and gpus.ranks_per_gpu(ranks) > 1
        chosen = starter or LocalStarter(folder.path / "logs", share_gpu)
        return WorkerPool(ranks, chosen, suite.measure.wait_bound_s, token, fabric)

    def link(ranks: int) -> str:
        return topology(ranks).link(gpus.link if fabric == "cuda" else lambda _: "shm")

    where: dict[str, Any] = {"fabric": fabric, "link": link, "topology": topology}
    sweep = partial(Sweep, suite, folder, make_pool, **where)
    try:
        code = _measure(request, suite, cells, folder, sweep, launcher)
    finally:
        segments.remove(token)
    # Rows that failed have failed, whoever reads of it (| head).
    with contextlib.suppress(BrokenPipeError):
        _conclude(request, folder, code)
    return code


def _measure(
    request: Request,
    suite: Suite,
    cells: list[Cell],
    folder: RunFolder,
    sweep: Callable[..., Sweep],
    launcher: Launcher | None,
) -> int:
    """Run what is not yet stored, and say how the run ended in the folder and the exit code."""
    left = _left(request, folder, cells)
    again = _resume_line(folder, request.only)
    try:
        with make_progress(len(left), request.quiet) as progress:
            max_ranks = launcher.ranks if launcher else None
            sweep(progress=progress, max_ranks=max_ranks).run(left)
    except KeyboardInterrupt:
        # The folder may be what made them stop; the exit code is theirs in any case.
        with contextlib.suppress(ResultsError):
            folder.finish("interrupted")
        say(f"interrupted; what was measured is stored. Go on: {again}")
        return INTERRUPTED
    except ResultsError as error:
        folder.close()
        say(str(error))
        return FAILED
    except MokbenchError as error:
        folder.finish("aborted")
        say(f"error: {error}\nWhat was measured is stored. Go on: {again}")
        return FAILED
    wanted = {cell.id for cell in cells}
    records = [r for r in folder.records() if r.id in wanted]
    if all(record.status == "unsupported" for record in records):
        say(f"no row was measured: all {len(records)} are unsupported, for the reasons above")
    code = exit_code(suite, records)
    folder.finish("done" if code == DONE else "failed")
    return code


def exit_code(suite: Suite, records: list[Record]) -> int:
    """0 when all is well; an unsupported row fails only if ``require:`` names its system."""
    failed = any(record.status == "failed" for record in records)
    missing = any(r.status == "unsupported" and r.system in suite.require for r in records)
    return FAILED if failed or missing else DONE


def _conclude(request: Request, folder: RunFolder, code: int) -> None:
    """The report, the charts and, last, the folder; who interrupts wants neither of the two."""
    stored = RunFolder.open(folder.path)
    if code == INTERRUPTED:
        say(f"report so far: mokbench report {shlex.quote(str(folder.path))}")
    elif stored.records() and not request.quiet:
        OutputConsole().print(report.table([stored]))
    if stored.records() and request.charts and code != INTERRUPTED:
        draw([stored], folder.path / "charts")
    click.echo(str(folder.path))


def _load_suite(request: Request) -> Suite:
    if request.config is not None:
        return load(request.config)
    if request.resume is None:
        raise ConfigError(["name a config, as in: mokbench run configs/quickstart.yaml"])
    meta = RunFolder.open(request.resume).meta
    return parse(meta.config_text, _config_of(request.resume, meta))


def _config_of(run: Path, meta: RunMeta) -> Path:
    """Where a run's config was: paths in it are relative to its folder, wherever we are now."""
    from_run = run / str(meta.config.get("from_run", ""))
    if meta.config.get("from_run") and from_run.parent.is_dir():
        return from_run
    return Path(str(meta.config.get("file", "config.yaml")))


def _open_folder(
    request: Request,
    suite: Suite,
    cells: list[Cell],
    launcher: Launcher | None,
    topologies: list[Topology],
) -> RunFolder:
    here = machine.describe()
    if request.resume is None:
        if request.rerun_failed:
            raise ConfigError(["--rerun-failed goes with --resume: it measures failed rows again"])
        path = request.out or _new_path(suite.name)
        meta = _meta(request, suite, here, launcher, path)
        return RunFolder.create(path, meta.model_copy(update={"topologies": topologies}))
    if request.out is not None:
        raise ConfigError(["--out and --resume both name the run folder: give one of them"])

    def check(run: RunFolder) -> None:
        refuse_moved_ranks(run, topologies)
        _left(request, run, cells)

    folder = RunFolder.resume(request.resume, here, check)
    if folder.meta.config_text != suite.text:
        folder.close()
        raise ConfigError(
            [
                f"{request.config}: differs from the config this run was started with; leave it "
                f"out ({_resume_line(folder, request.only)}) or start a new run"
            ]
        )
    folder.keep_topologies(topologies)
    return folder


def _meta(
    request: Request,
    suite: Suite,
    here: machine.Machine,
    launcher: Launcher | None,
    run: Path,
) -> RunMeta:
    return RunMeta(
        name=suite.name,
        config_text=suite.text,
        config={"file": _text(str(request.config)), "from_run": _from(run, request.config)},
        command=["mokbench", *map(_text, sys.argv[1:])],
        launcher=launcher.told() if launcher else None,
        machine=here,
        versions=machine.versions(),
        code=[code_version()],
        created=moment.now(),
    )


def _from(run: Path, config: Path | None) -> str | None:
    """The config seen from the run folder: a relative path moves with both."""
    if config is None:
        return None
    return _text(os.path.relpath(config.resolve(), run.resolve()))


def _text(argument: str) -> str:
    """An argument as JSON can hold it: bytes that are no UTF-8 become question marks."""
    return argument.encode(errors="replace").decode()


def _new_path(name: str) -> Path:
    """results/runs/<config>-<time>; two runs within one second get different folders."""
    path = RUNS_FOLDER / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def _fabric(suite: Suite, gpus: Gpus, only_list: bool) -> str:
    """``auto`` is the cuda fabric where a GPU is there that the kernels are for, else the host.

    A plan may be made anywhere (``only_list``), a run of the cuda fabric needs a GPU.
    """
    if suite.fabric == "cuda" and gpus.visible() == 0 and not only_list:
        why = gpus.note or "CUDA_VISIBLE_DEVICES hides them all"
        raise ConfigError(
            [f"{suite.path}: fabric: cuda needs a GPU, and none is here ({why}); allowed: host"]
        )
    if suite.fabric != "auto":
        return suite.fabric
    able = gpus.visible() > 0 and (gpus.compute_capability or (0, 0)) >= LEAST_CAPABILITY
    return "cuda" if able else "host"


def _left(request: Request, stored: RunFolder | None, cells: list[Cell]) -> list[Cell]:
    """What the run's folder, if there is one yet, does not hold."""
    if stored is None:
        return cells
    done = stored.completed_ids(include_failed=not request.rerun_failed)
    refuse_changed_cells(stored, [cell for cell in cells if cell.id in done])
    return [cell for cell in cells if cell.id not in done]


def _resume_line(folder: RunFolder, only: tuple[str, ...]) -> str:
    chosen = "".join(f" --only {shlex.quote(term)}" for term in only)
    return f"mokbench run --resume {shlex.quote(str(folder.path))}{chosen}"
