"""Append-only history files of one machine, in results/history/<machine>/.

* launches.jsonl: one line per launch, ``Launch``; never rewritten
* levels.jsonl: one line per accepted new level: from which launch on, for which series, why
* machine.json: what the key in the folder's name stands for
"""

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from mokbench.durable import Lock, append_line, as_results_error, cut_torn_line, replace_file
from mokbench.errors import ResultsError
from mokbench.machine import Machine
from mokbench.regression.history_checks import (
    in_order_of_time,
    refuse_lost_levels,
    refuse_no_folder,
    refuse_no_launches,
    refuse_reordered,
)
from mokbench.regression.history_folders import (
    LAUNCHES,
    LEVELS,
    MACHINE,
    folder_of,
    refuse_misnamed,
)
from mokbench.regression.history_lines import WINDOW, machines, names, read_all, read_launches
from mokbench.regression.launch import Launch, Measured, Readings
from mokbench.regression.levels import Level, Series, counting, first_of, newest_levels
from mokbench.regression.shift import Floats

# Another check that appends is done long before; to give up would lose what was measured.
_LOCK_WAIT_S = 60.0


@dataclass
class History:
    """A machine's launches, oldest first, and accepted levels. Reading never writes.

    ``recorded`` names all launches of the file, of which ``launches`` are those that were read.
    """

    folder: Path
    launches: list[Launch] = field(default_factory=list)
    levels: list[Level] = field(default_factory=list)
    recorded: set[str] = field(default_factory=set)

    @classmethod
    def of_machine(cls, root: Path, machine: Machine) -> Self:
        """Read a machine's folder in ``root``, see ``folder_of``. Raises ResultsError."""
        return cls.read(folder_of(root, machine))

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a machine's folder; one that does not exist is an empty history.

        Raises ResultsError for a line that is none, of another version, or of another machine
        than the lines before: a verdict from half a history would be a guess.
        """
        path = folder / LAUNCHES
        refuse_no_folder(folder)
        refuse_no_launches(path, [folder / MACHINE, folder / LEVELS])
        levels = read_all(folder / LEVELS, Level)
        newest = {name for level in counting(levels) for name in level.launches}
        launches = read_launches(path, keep=newest)
        recorded = names(path).union(launch.launch for launch in launches)
        refuse_lost_levels(path, counting(levels), recorded)
        refuse_misnamed(folder, machines(path).union(launch.machine for launch in launches))
        once: dict[str, Launch] = {}
        for launch in launches:
            if launch.launch in once:
                warnings.warn(f"{folder / LAUNCHES}: launch {launch.run} twice", stacklevel=2)
            once.setdefault(launch.launch, launch)
        refuse_reordered(path, list(once.values()), counting(levels))
        return cls(folder, list(once.values()), levels, recorded)

    def record(self, launches: Sequence[Launch], machine: Machine) -> int:
        """Append launches that are not yet there, all or none; returns how many.

        Raises ResultsError on a full disk.
        """
        if all(one.launch in self.recorded for one in launches):
            return 0
        with as_results_error(self.folder, "writing the history", "free some space"):
            self.folder.mkdir(parents=True, exist_ok=True)
        with self._locked(LAUNCHES) as path:
            self._read_again(path)
            new = in_order_of_time(one for one in launches if one.launch not in self.recorded)
            if not new:
                warnings.warn(f"{path}: another check recorded these runs just now", stacklevel=3)
                return 0
            refuse_reordered(path, self.launches + new, counting(self.levels))
            # The launches first: a folder that has only the rest is one that lost them. And at
            # once: of a check that is half recorded, the other half would be too few to judge.
            append_line(path, "\n".join(launch.model_dump_json() for launch in new))
        self.launches += new
        self.recorded.update(launch.launch for launch in new)
        with as_results_error(self.folder, "writing the history", "free some space"):
            if not (self.folder / MACHINE).exists():
                text = machine.model_dump_json(indent=1, exclude={"gpu_uuids"})
                replace_file(self.folder / MACHINE, text.encode() + b"\n")
        return len(new)

    def _read_again(self, path: Path) -> None:
        """Take in what another check appended since this one read the file."""
        if names(path) <= self.recorded:
            return
        now = type(self).read(self.folder)
        self.launches, self.levels, self.recorded = now.launches, now.levels, now.recorded

    def accept(self, level: Level) -> None:
        """Append an accepted level; its launches must have been recorded. Raises ResultsError."""
        missing = set(level.launches).difference(launch.launch for launch in self.launches)
        if missing:
            raise ResultsError(f"{self.folder}: launches {', '.join(sorted(missing))} not recorded")
        refuse_reordered(self.folder / LAUNCHES, self.launches, [level])
        with self._locked(LEVELS) as path:
            append_line(path, level.model_dump_json())
        self.levels.append(level)

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[Path]:
        """Path of a file to append to, whole to its last line, that nobody else writes now."""
        path = self.folder / name
        with as_results_error(path, "appending", "what was there is safe; free some space"):
            lock = Lock(self.folder, _LOCK_WAIT_S)
            try:
                if cut_torn_line(path) and not path.stat().st_size:
                    path.unlink()
                yield path
            finally:
                if path.exists() and not path.stat().st_size:
                    path.unlink()
                lock.release()

    def last_commit(self, before: set[str]) -> str | None:
        """Commit of the newest launch that is not one of ``before``."""
        found = [x.commit for x in self.launches if x.launch not in before and x.commit]
        return found[-1] if found else None


def base_of(
    history: History,
    series: Sequence[Series],
    measured: Sequence[Measured],
    *,
    method_version: int,
    leave_out: Iterable[str] = (),
) -> Readings:
    """Last ``WINDOW`` unflagged launches of each series since its newest accepted level.

    ``measured[i]`` is what the candidate of series i measured: launches that measured something
    else under the same id, or with another mark, are no base. ``leave_out``: the candidate's own
    launches.
    """
    out = set(leave_out)
    used = [
        launch
        for launch in history.launches
        if launch.launch not in out and launch.method_version == method_version
    ]
    levels = newest_levels(history.levels)
    position = {launch.launch: i for i, launch in enumerate(history.launches)}
    found = Readings.empty(len(series), len(used))
    for j, launch in enumerate(used):
        for i, (cell, metric) in enumerate(series):
            reading = launch.reading(cell, metric, *measured[i])
            if reading is None:
                continue
            since = levels.get((cell, metric))
            accepted = since is not None and launch.launch in since.launches
            too_old = since is not None and position[launch.launch] < first_of(since, position)
            if accepted or not (too_old or cell in launch.flags.get(metric, ())):
                found.put(i, j, reading)
    keep = _last(found.values)
    return Readings(np.where(keep, found.values, np.nan), np.where(keep, found.clock_mhz, np.nan))


def _last(values: Floats) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Where a value is among the last ``WINDOW`` of its row."""
    there = ~np.isnan(values)
    later = np.cumsum(there[:, ::-1], axis=1)[:, ::-1]
    return np.asarray(there & (later <= WINDOW))
