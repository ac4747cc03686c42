"""Running the mokbench command in tests: a small sweep, its processes, what it leaves behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from mokbench.results import RunFolder

SMALL = """\
name: small
ranks: {ranks}
model: {{name: tiny, hidden: 64, intermediate: 64, experts: 8, top_k: 2}}
systems: [mok, push, alltoall]
sweep:
  tokens_per_rank: [4, 32]
  routing: [balanced, skewed]
measure: {{regimes: [isolated], noise: 20%, blocks: 2, max_time: {max_time}, deadline: 20s,
  wait_bound: 2s, signals: false, min_step: false}}
"""
NUM_CELLS = 12


def write_config(folder: Path, ranks: int = 2, max_time: str = "100ms") -> Path:
    path = folder / "small.yaml"
    path.write_text(SMALL.format(ranks=ranks, max_time=max_time), encoding="utf-8")
    return path


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-P", "-m", "mokbench", *map(str, arguments)]


def mokbench(*arguments: str | Path, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=240, **options
    )


@contextmanager
def started(*arguments: str | Path, **options) -> Iterator[subprocess.Popen]:
    """The command in the background; killed with all it started when the test leaves."""
    process = subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )
    try:
        yield process
    finally:
        for worker in worker_processes(process.pid):
            worker.kill()
        if process.poll() is None:
            process.kill()
            process.communicate()


def worker_processes(pid: int, recursive: bool = False) -> list[psutil.Process]:
    """The rank processes a command started, by rank."""
    try:
        children = psutil.Process(pid).children(recursive)
    except psutil.NoSuchProcess:
        return []
    return [child for child in children if _is_worker(child)]


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "mokbench.worker" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # it ended since it was listed
        return False


def wait_for_rows(folder: Path, count: int, process: subprocess.Popen, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    path = folder / "records.jsonl"
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None, f"ended early: {process.communicate()}"
        assert time.monotonic() < deadline, f"no {count} rows in {seconds} s"
        time.sleep(0.02)


def end(process: subprocess.Popen, seconds: float = 120) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def statuses(folder: Path) -> dict[str, str]:
    return {record.id: record.status for record in RunFolder.open(folder).records()}


def segments(process: subprocess.Popen) -> set[str]:
    """Segments of this command: others may run on the machine, and have some for a moment."""
    return {path.name for path in Path("/dev/shm").glob(f"mokbench-{process.pid}-*")}


def gone(processes: list[psutil.Process], seconds: float = 10) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not any(map(_still_runs, alive))


def _still_runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> bool:
    """Whether ``condition()`` became true in time."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def send(process: subprocess.Popen, number: signal.Signals) -> None:
    os.kill(process.pid, number)


def inject(folder, code: str) -> dict[str, str]:
    """An environment in which every worker runs ``code`` when it starts."""
    (folder / "sitecustomize.py").write_text(textwrap.dedent(code), encoding="utf-8")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path.rstrip(os.pathsep)}
