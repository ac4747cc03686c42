"""Append-only history files of one machine, in results/history/<machine>/.

* launches.jsonl: one line per launch, ``Launch``; never rewritten
* levels.jsonl: one line per accepted new level: from which launch on, for which series, why
* machine.json: what the key in the folder's name stands for, and how many levels there are
"""

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from mokbench.durable import Lock, append_line, as_results_error, cut_torn_line
from mokbench.errors import ResultsError
from mokbench.machine import Machine
from mokbench.regression.history_checks import (
    in_order_of_time,
    refuse_late,
    refuse_lost_levels,
    refuse_no_folder,
    refuse_no_launches,
    refuse_unfounded,
    refuse_unknown_methods,
    refuse_unknown_series,
)
from mokbench.regression.history_folders import (
    LAUNCHES,
    LEVELS,
    MACHINE,
    folder_of,
    levels_told,
    refuse_misnamed,
    tell,
)
from mokbench.regression.history_lines import WINDOW, machines, names, read_all, read_launches
from mokbench.regression.launch import Launch, Measured, Readings
from mokbench.regression.levels import Level, Series, counting, first_of, newest_levels, order_of
from mokbench.regression.shift import Floats

# Another check that appends is done long before; to give up would lose what was measured.
_LOCK_WAIT_S = 60.0


@dataclass
class History:
    """A machine's launches, oldest first, and accepted levels. Reading never writes.

    ``lines`` names all launches in the order of the file, which is that in which checks ended;
    ``launches`` are those of them that were read.
    """

    folder: Path
    launches: list[Launch] = field(default_factory=list)
    levels: list[Level] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    @property
    def recorded(self) -> set[str]:
        """All launches that the file has."""
        return set(self.lines)

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
        levels = _levels(folder)
        newest = {name for level in counting(levels) for name in level.launches}
        launches = read_launches(path, keep=newest)
        refuse_unknown_methods(path, launches)
        lines = names(path)
        refuse_unfounded(path, levels, lines)
        refuse_misnamed(folder, machines(path).union(launch.machine for launch in launches))
        once: dict[str, Launch] = {}
        for launch in launches:
            if launch.launch in once:
                warnings.warn(f"{folder / LAUNCHES}: launch {launch.run} twice", stacklevel=2)
            once.setdefault(launch.launch, launch)
        found = in_order_of_time(once.values())
        refuse_unknown_series(folder / LEVELS, counting(levels), found)
        refuse_late(path, found, counting(levels), lines)
        return cls(folder, found, levels, lines)

    def record(self, launches: Sequence[Launch], machine: Machine) -> int:
        """Append launches that are not yet there, all or none; returns how many.

        Raises ResultsError on a full disk.
        """
        known = all(one.launch in self.recorded for one in launches)
        if known and (self.folder / MACHINE).exists():
            return 0
        with as_results_error(self.folder, "writing the history", "free some space"):
            self.folder.mkdir(parents=True, exist_ok=True)
        with self._locked(LAUNCHES) as path:
            self._read_again()
            new = in_order_of_time(one for one in launches if one.launch not in self.recorded)
            if new:
                self._add(path, new)
            elif not known:
                warnings.warn(f"{path}: another check recorded these runs just now", stacklevel=3)
            tell(self.folder, machine, len(self.levels))
        return len(new)

    def _add(self, path: Path, new: list[Launch]) -> None:
        refuse_late(path, self.launches + new, counting(self.levels), self.lines)
        # The launches first: a folder that has only the rest is one that lost them. And at once:
        # of a check that is half recorded, the other half would be too few to judge.
        append_line(path, "\n".join(launch.model_dump_json() for launch in new))
        self.launches = in_order_of_time(self.launches + new)
        self.lines += [launch.launch for launch in new]

    def _read_again(self) -> None:
        """Take in what another check appended since this one read the files."""
        if names(self.folder / LAUNCHES) == self.lines and _levels(self.folder) == self.levels:
            return
        now = type(self).read(self.folder)
        self.launches, self.levels, self.lines = now.launches, now.levels, now.lines

    def accept(self, level: Level) -> None:
        """Append an accepted level; its launches must have been recorded. Raises ResultsError."""
        with self._locked(LEVELS) as path:
            self._read_again()
            missing = sorted(set(level.launches).difference(self.lines))
            if missing:
                raise ResultsError(f"{self.folder}: launches {', '.join(missing)} not recorded")
            told = {"lines": len(self.lines), "order": order_of(self.lines)}
            level = level.model_copy(update=told)
            append_line(path, level.model_dump_json())
            self.levels.append(level)
            tell(self.folder, None, len(self.levels))

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


def _levels(folder: Path) -> list[Level]:
    """Accepted levels of a folder. ResultsError where some are lost."""
    told = levels_told(folder)  # first: an accept that goes on meanwhile writes the level first
    levels = read_all(folder / LEVELS, Level)
    refuse_lost_levels(folder / LEVELS, levels, told)
    return levels


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
            since = levels.get((cell, metric, measured[i][1]))
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
