"""--only KEY=VALUE: the cells of a sweep that a person wants now."""

from collections.abc import Callable
from fnmatch import fnmatchcase

from mokbench.errors import ConfigError
from mokbench.workload import Cell

_KEYS: dict[str, Callable[[Cell], object]] = {
    "id": lambda cell: cell.id,
    "system": lambda cell: cell.system,
    "variant": lambda cell: cell.variant,
    "model": lambda cell: cell.workload.model.name,
    "ranks": lambda cell: cell.workload.ranks,
    "tokens_per_rank": lambda cell: cell.workload.tokens_per_rank,
    "dtype": lambda cell: cell.workload.dtype,
    "routing": lambda cell: cell.workload.routing.label,
    "placement": lambda cell: cell.workload.placement_label,
    "seed": lambda cell: cell.workload.seed,
    "regime": lambda cell: cell.regime,
    "graph": lambda cell: str(cell.graph).lower(),
}


def select(cells: list[Cell], only: tuple[str, ...]) -> list[Cell]:
    """Cells that match every key of ``only``; several values of one key are alternatives.

    ``system=mok,push`` is the same as ``system=mok`` and ``system=push``; values may hold * and ?.
    Raises ConfigError for a malformed or unknown key, for a value that no cell has, and when
    nothing matches, with the values there are.
    """
    wanted: dict[str, list[str]] = {}
    problems = []
    for term in only:
        key, separator, value = term.partition("=")
        if not separator or key not in _KEYS:
            problems.append(f"--only {term}: write KEY=VALUE with KEY one of {', '.join(_KEYS)}")
            continue
        there = {str(_KEYS[key](cell)) for cell in cells}
        values = _values(value, there)
        problems += [
            f"--only {key}={each}: no such cell; {_listed(there)}"
            for each in values
            if not _is_in(each, there)
        ]
        wanted.setdefault(key, []).extend(values)
    if problems:
        raise ConfigError(problems)
    for key, values in wanted.items():
        kept = [cell for cell in cells if _matches(cell, key, values)]
        if not kept:
            there = {str(_KEYS[key](cell)) for cell in cells}
            chosen = f"--only {key}={','.join(values)}"
            raise ConfigError([f"{chosen}: no such cell beside the other --only; {_listed(there)}"])
        cells = kept
    return cells


def _values(value: str, there: set[str]) -> list[str]:
    """A list's parts; ids and variants hold commas themselves, so the whole goes first."""
    return [value] if _is_in(value, there) else value.split(",")


def _is_in(value: str, there: set[str]) -> bool:
    return any(fnmatchcase(found, value) for found in there)


def _listed(there: set[str]) -> str:
    return f"there is {', '.join(sorted(there)[:20])}" + (", ..." if len(there) > 20 else "")


def _matches(cell: Cell, key: str, values: list[str]) -> bool:
    found = str(_KEYS[key](cell))
    return any(fnmatchcase(found, value) for value in values)
