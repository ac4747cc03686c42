"""Which run folders a glob names; pathlib's own passes over folders that may not be read."""

import fnmatch
import re
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path

from mokbench.durable import as_results_error, is_kind
from mokbench.errors import ResultsError

READABLE = "make it readable, or leave it out"


def globbed(pattern: Path) -> list[Path]:
    """Run folders that ``pattern`` matches, in order; a warning for other folders.

    Raises ResultsError for what cannot be read and for links that lead nowhere: to pass over them
    would judge the rest as if it were all.
    """
    parts = pattern.relative_to(pattern.anchor).parts
    found = []
    for path in sorted(set(_matching(Path(pattern.anchor), parts))):
        with as_results_error(path, "reading", READABLE):
            if is_kind(stat.S_ISREG, path / "run.json"):
                found.append(path)
            elif is_kind(stat.S_ISDIR, path):
                _refuse_dead_link(path / "run.json")
                warnings.warn(f"{path}: passed over, it has no run.json", stacklevel=4)
    return found


def _matching(folder: Path, parts: tuple[str, ...]) -> Iterator[Path]:
    _refuse_dead_link(folder)
    if not parts:
        yield folder
        return
    first, rest = parts[0], parts[1:]
    if first == "**":
        yield from _matching(folder, rest)
        for path in _inside(folder):
            if not path.is_symlink():
                yield from _matching(path, parts)
    elif re.search(r"[*?[]", first):
        for path in _inside(folder):
            if fnmatch.fnmatchcase(path.name, first):
                yield from _matching(path, rest)
    else:
        yield from _matching(folder / first, rest)


def _inside(folder: Path) -> list[Path]:
    with as_results_error(folder, "reading", READABLE):
        if not is_kind(stat.S_ISDIR, folder):
            return []
        return list(folder.iterdir())


def _refuse_dead_link(path: Path) -> None:
    with as_results_error(path, "reading", READABLE):
        is_dead = path.is_symlink() and not path.exists()
    if is_dead:
        raise ResultsError(f"{path}: is a link that leads nowhere; mend it, or leave it out")
