"""A run's folder: what was asked (run.json), its rows (records.jsonl), samples and signaling.

* run.json: config, command, machine, versions, method version, status
* records.jsonl: one line per finished cell, appended the moment it ends; of several lines with one
  id the last attempt counts
* samples/: one parquet file per measured row, columns of ``SAMPLE_TYPES``
* signals.json: signaling against the number of ranks
"""

import contextlib
import hashlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from mokbench import moment, sample_file, signal_file
from mokbench.code_version import code_version
from mokbench.durable import (
    Lock,
    append_line,
    as_results_error,
    cut_torn_line,
    is_locked,
    replace_file,
    whole_lines,
)
from mokbench.errors import ResultsError
from mokbench.figures import Imbalance, Quantity, SignalPoint, StepTime
from mokbench.machine import Machine
from mokbench.record import METHOD_VERSION, RECORD_VERSION, Record, parse_record
from mokbench.run_glob import READABLE, globbed
from mokbench.run_meta import RunMeta, RunStatus, read_meta
from mokbench.sample_file import SAMPLE_TYPES
from mokbench.topology import Topology

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "METHOD_VERSION",
    "SAMPLE_TYPES",
    "Imbalance",
    "Quantity",
    "Record",
    "RunFolder",
    "RunMeta",
    "SignalPoint",
    "StepTime",
    "open_runs",
]


class RunFolder:
    """One run on disk. ``create`` and ``resume`` may write and hold its lock; ``open`` reads."""

    def __init__(self, path: Path, meta: RunMeta, lock: Lock | None = None) -> None:
        self.path = path
        self.meta = meta
        self._lock = lock
        self._attempts: dict[str, int] = {}
        self._read: tuple[int, list[Record]] | None = None

    @classmethod
    def create(cls, path: str | Path, meta: RunMeta) -> Self:
        """Start a run in a new or empty folder. Raises ResultsError when it cannot be one."""
        path = Path(path)
        advice = "give an --out that can be written and has free space"
        with as_results_error(path, "reading the folder", advice):
            taken = path.is_dir() and any(path.iterdir())
        if taken:
            raise ResultsError(
                f"{path}: the folder exists and is not empty; give another --out, or go on with "
                f"the run in it: mokbench run --resume {path}"
            )
        if not path.is_dir() and (path.exists() or path.is_symlink()):
            raise ResultsError(f"{path}: is a file, not a folder; give another --out")
        with as_results_error(path, "making the run folder", advice):
            path.mkdir(parents=True, exist_ok=True)
            lock = Lock(path)
        if (path / "run.json").exists():
            lock.release()
            raise ResultsError(f"{path}: another run was started here just now")
        run = cls(path, meta, lock)
        try:
            with as_results_error(path, "making the run folder", advice):
                (path / "samples").mkdir(exist_ok=True)
            run._write_meta()
        except ResultsError:
            lock.release()
            with contextlib.suppress(OSError):
                (path / ".lock").unlink()
                (path / "samples").rmdir()
                path.rmdir()
            raise
        return run

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Read a run, also while it is being written. Raises ResultsError when it is none.

        A run that says it is running, but that nobody writes, was killed: it reads as interrupted.
        """
        path = Path(path)
        meta = read_meta(path)
        if meta.status == "running" and not is_locked(path):
            meta = meta.model_copy(update={"status": "interrupted"})
        return cls(path, meta)

    @classmethod
    def resume(
        cls, path: str | Path, machine: Machine, check: Callable[[Self], object] | None = None
    ) -> Self:
        """Go on writing a run; refused on another machine or with another method version.

        ``check`` raises what speaks against it, before the run says that it is being written.
        """
        path = Path(path)
        meta = read_meta(path)
        if meta.method_version != METHOD_VERSION:
            raise ResultsError(
                f"{path}: was measured with method version {meta.method_version}, this mokbench "
                f"has {METHOD_VERSION}; their rows cannot be mixed: start a new run"
            )
        if meta.machine.key != machine.key:
            raise ResultsError(
                f"{path}: was measured on another machine ({meta.machine.differences(machine)}); "
                "rows of two machines cannot be mixed: start a new run"
            )
        with as_results_error(path, "opening the run for writing", "make the folder writable"):
            lock = Lock(path)
            (path / "samples").mkdir(exist_ok=True)
            torn = cut_torn_line(path / "records.jsonl")
        if torn:
            warnings.warn(f"{path}: removed a row that a crash cut short", stacklevel=2)
        run = cls(path, meta, lock)
        try:
            for record in run.attempts():
                run._attempts[record.id] = record.attempt
            if check is not None:
                check(run)
            code = list(dict.fromkeys([*meta.code, code_version()]))
            update = {"status": "running", "finished": None, "rows": None, "code": code}
            run.meta = meta.model_copy(update=update | {"record_version": RECORD_VERSION})
            run._write_meta()
        except ResultsError:
            lock.release()
            raise
        return run

    def keep_topologies(self, topologies: Iterable[Topology]) -> None:
        """Store where ranks are, beside what is stored of other numbers of ranks."""
        self._must_write()
        known = {found.ranks: found for found in (*self.meta.topologies, *topologies)}
        if list(known.values()) != self.meta.topologies:
            self.meta = self.meta.model_copy(update={"topologies": list(known.values())})
            self._write_meta()

    def append(self, record: Record, samples: "pd.DataFrame | None" = None) -> Record:
        """Store one row and its samples, both or neither, and return it as stored.

        ``samples`` has the columns of ``SAMPLE_TYPES``. The attempt number and the samples' file
        are filled in here. Raises ResultsError when the disk takes no more; earlier rows stay.
        """
        self._must_write()
        attempt = self._attempts.get(record.id, 0) + 1
        name = None if samples is None else f"samples/{_file_stem(record.id)}.a{attempt}.parquet"
        stored = record.model_copy(update={"attempt": attempt, "samples_file": name})
        safe = sum(self._attempts.values())
        with as_results_error(
            self.path,
            f"storing {record.id}",
            f"the {safe} rows stored before it are safe; free some space (or raise ulimit -f) "
            f"and go on: mokbench run --resume {self.path}",
        ):
            try:
                if name is not None and samples is not None:
                    replace_file(self.path / name, sample_file.content(samples))
                append_line(self.path / "records.jsonl", stored.to_json())
            except OSError:
                if name is not None:
                    (self.path / name).unlink(missing_ok=True)
                raise
        self._attempts[record.id] = attempt
        return stored

    def attempts(self) -> list[Record]:
        """Every stored line, in the order stored; an id may have several, see ``records``."""
        path = self.path / "records.jsonl"
        lines, torn = self._lines()
        size = sum(map(len, lines))
        if self._read is None or self._read[0] != size:
            if torn:
                warnings.warn(f"{path}: ignored a last row that was cut short", stacklevel=3)
            rows = [parse_record(f"{path}:{i}", line) for i, line in enumerate(lines, 1)]
            self._read = (size, rows)
        return self._read[1]

    def records(self) -> list[Record]:
        """Last attempt at each id, in the order in which the ids first ended."""
        found: dict[str, Record] = {}
        for record in self.attempts():
            if record.attempt >= found.get(record.id, record).attempt:
                found[record.id] = record
        return list(found.values())

    def completed_ids(self, include_failed: bool) -> set[str]:
        """Ids that need no run: ok and unsupported ones, and failed ones when these may stay."""
        return {r.id for r in self.records() if include_failed or r.status != "failed"}

    def samples(self, record: Record) -> "pd.DataFrame | None":
        """Read the raw samples of a row; null where it has none."""
        if record.samples_file is None:
            return None
        return sample_file.read(self.path / record.samples_file)

    def write_signals(self, points: Sequence[SignalPoint]) -> None:
        """Store signaling against ranks, replacing what was stored."""
        self._must_write()
        signal_file.write(self.path / "signals.json", points)

    def signals(self) -> list[SignalPoint]:
        """Signaling against ranks; empty where none was measured."""
        return signal_file.read(self.path / "signals.json")

    def finish(self, status: RunStatus) -> None:
        """Store how the run ended and let go of the folder."""
        self._must_write()
        try:
            rows = len(self._lines()[0])
            update = {"status": status, "finished": moment.now(), "rows": rows}
            self.meta = self.meta.model_copy(update=update)
            self._write_meta()
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the folder; the stored status stays as it is."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _must_write(self) -> None:
        if self._lock is None:
            raise ResultsError(f"{self.path}: opened for reading, or already finished")

    def _write_meta(self) -> None:
        path = self.path / "run.json"
        with as_results_error(path, "storing the run's description", "rows are safe; free space"):
            replace_file(path, self.meta.model_dump_json(indent=1).encode() + b"\n")

    def _lines(self) -> tuple[list[bytes], int]:
        path = self.path / "records.jsonl"
        with as_results_error(path, "reading", "make it readable"):
            return whole_lines(path)


def open_runs(patterns: Iterable[str | Path]) -> list[RunFolder]:
    """Open the runs that paths and globs name, each once, in order.

    A glob passes over what is no run. Raises ResultsError for a path that is none, or for none.
    """
    paths: dict[Path, None] = {}
    for pattern in map(Path, patterns):
        found = [pattern]
        with as_results_error(pattern, "reading", READABLE):
            there = pattern.exists()
        if not there:
            found = globbed(pattern)
        if not found:
            # Who has such a folder, and no glob in mind, is told how to name it.
            hint = "; where a [ is part of a name, write [[]" * ("[" in str(pattern))
            raise ResultsError(
                f"{pattern}: no such run folder, and as a glob it matches none{hint}"
            )
        paths.update(dict.fromkeys(path.resolve() for path in found))
    if not paths:
        raise ResultsError("no run folder given; name one or more, or a glob of them")
    return [RunFolder.open(path) for path in paths]


def _file_stem(record_id: str) -> str:
    """Name a file after an id: the id itself, or its start and a digest where it is too long."""
    if len(record_id.encode()) <= 200:
        return record_id
    return f"{record_id[:120]}-{hashlib.sha256(record_id.encode()).hexdigest()[:16]}"
