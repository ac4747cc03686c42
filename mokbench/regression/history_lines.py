"""Reading a history's files: which lines are still needed, and what each holds.

A file grows for years and holds launches of several configs. How far back a series must be known
is a matter of that series, so a line is read while one of its cells has too few newer launches.
"""

import hashlib
import json
import re
import stat
import sys
import warnings
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mokbench.brief import brief
from mokbench.durable import as_results_error, is_whole_object
from mokbench.errors import ResultsError
from mokbench.figures import Figures, first_problem, once
from mokbench.regression.launch import HISTORY_VERSION, Launch

# Launches of a series that count as base; older ones measured another machine room.
WINDOW = 30
# Launches of each cell that are read in any case, for charts and change points. Beyond them only
# what a cell still lacks as base: a slowdown that nobody mends must not run out of base and pass.
MOST_READ = 100
# Finding a line's launch, cells and flags is a hundredth of the work of reading it.
_LAUNCH = re.compile(rb'"launch": ?"([0-9a-f]+)"')
_MACHINE = re.compile(rb'"machine": ?"([^"]*)"')
_COLUMNS = re.compile(
    rb'"ids": ?(\[.*?\]), ?"digests": ?(\[.*?\]), ?"status": ?(\[.*?\]), '
    rb'?"marks": ?(\[.*?\]), ?"clock_mhz"'
)
_FLAGS = re.compile(rb'"flags": ?(\{.*\})\}\s*$')

_Line = TypeVar("_Line", bound=Figures)


class _Seen(NamedTuple):
    """A line by its number: its launch, its ok cells, those that are flagged in it.

    A cell is its id, what it measured and its mark, as a base is of one thing. ``ids`` is empty
    where they do not stand out, ``cells`` also where none is ok.
    """

    number: int
    launch: str
    cells: tuple[tuple[str, str, str], ...]
    ids: tuple[str, ...]
    flagged: frozenset[str] = frozenset()


def read_all(path: Path, kind: type[_Line]) -> list[_Line]:
    """Every line of a file; none where it does not exist. ResultsError for one that is none.

    So is a last one that was cut short: a launch can be measured again, a person's word cannot.
    """
    return [parse(f"{path}:{number}", line, kind) for number, line in _lines(path)]


def read_launches(path: Path, keep: Collection[str] = ()) -> list[Launch]:
    """Launches that some cell needs and those named in ``keep``, oldest first.

    A cell needs its last ``MOST_READ``, and earlier ones while its base is not full. Raises
    ResultsError for a line that is none, of another version or not readable.
    """
    shared: dict[bytes, Any] = {}
    lines = [_look(number, line, shared) for number, line in _whole_lines(path)]
    wanted = _wanted(lines, keep)
    return [
        parse(f"{path}:{number}", line, Launch)
        for number, line in _whole_lines(path, warn=False)
        if number in wanted
    ]


def names(path: Path) -> list[str]:
    """Launches of all lines in their order, also of those that ``read_launches`` passes over."""
    return _all(_LAUNCH, path)


def machines(path: Path) -> set[str]:
    """Machine keys of all lines, also of those that ``read_launches`` passes over."""
    return set(_all(_MACHINE, path))


def _all(pattern: re.Pattern[bytes], path: Path) -> list[str]:
    found = (pattern.search(line) for _, line in _whole_lines(path, warn=False))
    return [one[1].decode(errors="replace") for one in found if one is not None]


def _wanted(lines: list[_Seen], keep: Collection[str]) -> set[int]:
    """Numbers of the lines to read. What does not look like a launch is, so that it is refused."""
    newer: Counter[object] = Counter()
    base: Counter[tuple[str, str, str]] = Counter()
    wanted = set()
    for line in reversed(lines):
        # Ids apart from what they measured: lines of failures alone are read too, so many.
        unflagged = [cell for cell in line.cells if cell[0] not in line.flagged]
        needed = (
            not line.ids
            or any(newer[name] < MOST_READ for name in [*line.ids, *line.cells])
            or any(base[cell] < WINDOW for cell in unflagged)
        )
        if needed or line.launch in keep:
            wanted.add(line.number)
            newer.update(line.ids)
            newer.update(line.cells)
            base.update(unflagged)
    return wanted


def _look(number: int, line: bytes, shared: dict[bytes, Any]) -> _Seen:
    """Find what ``_Seen`` has; equal lists of cells become one object in ``shared``."""
    launch, columns, flags = (pattern.search(line) for pattern in (_LAUNCH, _COLUMNS, _FLAGS))
    # Flags that are not last would pass for none, and a slow launch for a base.
    if launch is None or columns is None or (flags is None and b'"flags"' in line):
        return _Seen(number, "", (), ())
    key = hashlib.sha256(columns[0]).digest()
    try:
        if key not in shared:
            columns_ = (map(str, json.loads(text)) for text in columns.groups())
            ids, digests, status, marks = columns_
            found = list(zip(map(sys.intern, ids), digests, marks, status, strict=True))
            cells = tuple((cell, digest, mark) for cell, digest, mark, how in found if how == "ok")
            shared[key] = cells, tuple(cell for cell, *_ in found)
        by_metric = json.loads(flags[1]) if flags else {}
        flagged = frozenset(cell for cells in by_metric.values() for cell in cells)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return _Seen(number, "", (), ())
    own, names_ = shared[key]
    return _Seen(number, launch[1].decode(), own, names_, flagged)


def _whole_lines(path: Path, warn: bool = True) -> Iterator[tuple[int, bytes]]:
    """Numbered lines; a torn last one is passed over with a warning, its newline it may lack."""
    for number, line in _lines(path):
        if line.endswith(b"\n") or is_whole_object(line):
            yield number, line
        elif warn:
            warnings.warn(f"{path}: ignored a last line that was cut short", stacklevel=4)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines of a file; none where it does not exist. ResultsError for an empty one."""
    with as_results_error(path, "reading", "make it readable"):
        if not path.exists() and not path.is_symlink():
            return
        kind = path.stat()
        if not stat.S_ISREG(kind.st_mode):
            raise ResultsError(f"{path}: is no file; restore it from version control")
        if not kind.st_size:
            raise ResultsError(
                f"{path}: is empty; restore it from version control, or delete it to begin anew"
            )
        file = path.open("rb")
    with as_results_error(path, "reading", "make it readable"), file:
        yield from enumerate(file, 1)


def parse(where: str, line: bytes, kind: type[_Line]) -> _Line:
    """Read one line; ``where`` (file:line) goes into the ResultsError for a bad one."""
    try:
        data = json.loads(line, object_pairs_hook=_shared)
        if not isinstance(data, dict):
            raise ValueError(f"found a {type(data).__name__}, a JSON object is needed")
        version = data.get("history_version")
        if version != HISTORY_VERSION:
            raise ResultsError(
                f"{where}: history_version {brief(version)}, this mokbench reads "
                f"{HISTORY_VERSION}; use the version that wrote it, or start a new history folder"
            )
        return kind.model_validate(data)
    except (ValueError, RecursionError) as error:
        raise ResultsError(
            f"{where}: not a line of a history: {first_problem(error)}; restore the file from "
            "version control, nothing is judged from what is left"
        ) from error


def _shared(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Columns of text with one object for equal words: a hundred launches repeat the same ids."""
    return {
        key: [sys.intern(item) if type(item) is str else item for item in value]
        if isinstance(value, list)
        else value
        for key, value in once(pairs).items()
    }
