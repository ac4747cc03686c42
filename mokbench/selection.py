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
    "placement": lambda cell: cell.workload.placement,
    "seed": lambda cell: cell.workload.seed,
    "regime": lambda cell: cell.regime,
    "graph": lambda cell: str(cell.graph).lower(),
}


def select(cells: list[Cell], only: tuple[str, ...]) -> list[Cell]:
    """Cells that match every key of ``only``; several values of one key are alternatives.

    Values may hold * and ?. Raises ConfigError for a malformed or unknown key and when nothing
    matches, with the values there are.
    """
    wanted: dict[str, list[str]] = {}
    problems = []
    for term in only:
        key, separator, value = term.partition("=")
        if not separator or key not in _KEYS:
            problems.append(f"--only {term}: write KEY=VALUE with KEY one of {', '.join(_KEYS)}")
        wanted.setdefault(key, []).append(value)
    if problems:
        raise ConfigError(problems)
    for key, values in wanted.items():
        kept = [cell for cell in cells if _matches(cell, key, values)]
        if not kept:
            there = sorted({str(_KEYS[key](cell)) for cell in cells})
            shown = ", ".join(there[:20]) + (", ..." if len(there) > 20 else "")
            raise ConfigError([f"--only {key}={'|'.join(values)}: no such cell; there is {shown}"])
        cells = kept
    return cells


def _matches(cell: Cell, key: str, values: list[str]) -> bool:
    found = str(_KEYS[key](cell))
    return any(fnmatchcase(found, value) for value in values)
