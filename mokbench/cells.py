"""Suite -> ordered cells: product and zip of the axes, minus exclude, plus include."""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from mokbench.document import AXES
from mokbench.routing import RoutingSpec
from mokbench.system_choice import Options
from mokbench.workload import Cell, Dtype, Model, Regime, Workload

if TYPE_CHECKING:
    from mokbench.config import Suite

MAX_CELLS = 100_000
MAX_ID_CHARS = 200
_MAX_COMBINATIONS = 1000

DEFAULTS: dict[str, Any] = {
    "dtype": Dtype.BF16,
    "seed": 0,
    "placement": "contiguous",
    "routing": RoutingSpec.model_validate("balanced"),
}

Match = tuple[tuple[str, tuple[Any, ...]], ...]


@dataclass(frozen=True)
class Track:
    """Axes that move together: every row holds one value of each."""

    axes: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def without(self, axes: Iterable[str]) -> "Track | None":
        """Leave axes out, keep rows that become equal once; None where no axis is left."""
        kept = [i for i, axis in enumerate(self.axes) if axis not in axes]
        if len(kept) == len(self.axes):
            return self
        rows = dict.fromkeys(tuple(row[i] for i in kept) for row in self.rows)
        return Track(tuple(self.axes[i] for i in kept), tuple(rows)) if kept else None


@dataclass(frozen=True)
class Extra:
    """One include entry: its own axes as tracks, and the systems it is for (empty: all)."""

    tracks: tuple[Track, ...]
    systems: tuple[str, ...] = ()


@dataclass
class Expansion:
    """The cells, and which entries of exclude and include did nothing."""

    cells: list[Cell] = field(default_factory=list)
    idle_excludes: list[int] = field(default_factory=list)
    idle_includes: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Row:
    workload: Workload
    system: str
    options: Options
    regime: Regime
    graph: bool

    def value(self, key: str) -> Any:
        if key == "model":
            return self.workload.model.name.lower()
        return getattr(self, key) if hasattr(self, key) else getattr(self.workload, key)


class _Excludes:
    """The entries of exclude, looked up by value: thousands of them meet thousands of rows.

    Entries with the same keys share a table of every combination of their values; an entry of too
    many combinations for that is compared key by key.
    """

    def __init__(self, matches: tuple[Match, ...]) -> None:
        self._tables: dict[tuple[str, ...], dict[tuple[Any, ...], list[int]]] = {}
        self._wide: list[tuple[int, list[tuple[str, frozenset[Any]]]]] = []
        for i, match in enumerate(matches):
            if math.prod(len(values) for _, values in match) > _MAX_COMBINATIONS:
                self._wide.append((i, [(key, frozenset(values)) for key, values in match]))
                continue
            table = self._tables.setdefault(tuple(key for key, _ in match), {})
            for combination in itertools.product(*(dict.fromkeys(values) for _, values in match)):
                table.setdefault(combination, []).append(i)

    def matching(self, row: _Row) -> list[int]:
        """Positions of the entries that leave ``row`` out."""
        found = [i for i, match in self._wide if all(row.value(k) in v for k, v in match)]
        for keys, table in self._tables.items():
            found += table.get(tuple(map(row.value, keys)), ())
        return found


def expand(suite: "Suite", fabric: str = "host") -> list[Cell]:
    """Cells in the order they should run; cells of one workload stand together.

    Order: workload (ranks, model, dtype, seed, placement, tokens, routing; the first changes
    slowest), then system and variant as listed, regime, graph. ``fabric`` is host or cuda.
    """
    if fabric not in ("host", "cuda"):
        raise ValueError(f"fabric {fabric!r} is not resolved; allowed: host, cuda")
    return expansion(suite, fabric).cells


def expansion(suite: "Suite", fabric: str = "host") -> Expansion:
    """Expand and tell which entries of exclude and include had no effect."""
    result = Expansion()
    hits = [0] * len(suite.exclude)
    excludes = _Excludes(suite.exclude)
    rows: dict[_Row, None] = {}
    for row in _rows(suite, suite.tracks):
        matching = excludes.matching(row)
        for i in matching:
            hits[i] += 1
        if not matching:
            rows[row] = None
    for i, extra in enumerate(suite.include):
        before = len(rows)
        rows |= dict.fromkeys(_rows(suite, with_extra(suite.tracks, extra), extra.systems))
        if len(rows) == before:
            result.idle_includes.append(i)
    result.idle_excludes = [i for i, count in enumerate(hits) if not count]
    result.cells = [_cell(row, fabric) for row in _ordered(suite, list(rows))]
    return result


def with_extra(tracks: Iterable[Track], extra: Extra) -> tuple[Track, ...]:
    """Put the extra's tracks in place of the axes it names."""
    named = {axis for track in extra.tracks for axis in track.axes}
    kept = (track.without(named) for track in tracks)
    return (*(track for track in kept if track), *extra.tracks)


def count(suite: "Suite") -> int:
    """Cells before exclude, without expanding: what guards against a product that explodes."""
    rows = len(suite.measure.regimes) * len(suite.measure.graph)
    sweeps: list[tuple[tuple[Track, ...], tuple[str, ...]]] = [(suite.tracks, ())]
    sweeps += [(with_extra(suite.tracks, extra), extra.systems) for extra in suite.include]
    return sum(
        rows
        * math.prod(len(track.rows) for track in tracks)
        * sum(len(s.variants) for s in suite.systems if not systems or s.name in systems)
        for tracks, systems in sweeps
    )


def _rows(suite: "Suite", tracks: Iterable[Track], systems: tuple[str, ...] = ()) -> Iterator[_Row]:
    runs = [
        (entry.name, options, regime, graph)
        for entry in suite.systems
        if not systems or entry.name in systems
        for options in entry.variants
        for regime in suite.measure.regimes
        for graph in suite.measure.graph
    ]
    tracks = tuple(tracks)
    axes = [axis for track in tracks for axis in track.axes]
    if missing := [axis for axis in AXES if axis not in axes and axis not in DEFAULTS]:
        raise ValueError(f"no values for {', '.join(missing)}")
    for parts in itertools.product(*(track.rows for track in tracks)):
        point = DEFAULTS | dict(zip(axes, itertools.chain(*parts), strict=True))
        workload = Workload(**point)
        for run in runs:
            yield _Row(workload, *run)


def _ordered(suite: "Suite", rows: list[_Row]) -> list[_Row]:
    """Sort by each axis's order in the config, so that like stands with like."""
    position: dict[str, dict[Any, int]] = {axis: {} for axis in AXES}
    extras = itertools.chain.from_iterable(extra.tracks for extra in suite.include)
    for track in itertools.chain(suite.tracks, extras):
        for row in track.rows:
            for axis, value in zip(track.axes, row, strict=True):
                position[axis].setdefault(value, len(position[axis]))
    ranking = {
        work: tuple(position[axis].get(getattr(work, axis), 0) for axis in AXES)
        for work in dict.fromkeys(row.workload for row in rows)
    }
    variants = [(entry.name, options) for entry in suite.systems for options in entry.variants]
    systems = {variant: i for i, variant in enumerate(variants)}
    regimes = {regime: i for i, regime in enumerate(suite.measure.regimes)}
    return sorted(
        rows,
        key=lambda row: (
            ranking[row.workload],
            systems[row.system, row.options],
            regimes[row.regime],
            row.graph,
        ),
    )


def _cell(row: _Row, fabric: str) -> Cell:
    cell = Cell("", fabric, row.system, row.options, row.workload, row.regime, row.graph)
    return Cell(cell_id(cell), fabric, row.system, row.options, row.workload, row.regime, row.graph)


def cell_id(cell: Cell) -> str:
    """Readable name from the cell's own content alone; safe as a file name, never a list position.

    ``tiny.mok~ring_tiles=2.r4.t128.balanced.bf16.isolated``; seed, placement and graph appear
    where they are not the default. The fabric is not part of it: a run has one.
    """
    work: Workload = cell.workload
    model: Model = work.model
    parts = [
        model.name,
        f"{cell.system}~{cell.variant}" if cell.options else cell.system,
        f"r{work.ranks}",
        f"t{work.tokens_per_rank}",
        work.routing.label,
        work.dtype.value,
        cell.regime.value,
        *(["graph"] if cell.graph else []),
        *([f"seed{work.seed}"] if work.seed else []),
        *([work.placement_label] if work.placement != DEFAULTS["placement"] else []),
    ]
    name = ".".join(parts)
    if len(name) <= MAX_ID_CHARS:
        return name
    return f"{name[: MAX_ID_CHARS - 9]}-{sha256(name.encode()).hexdigest()[:8]}"
