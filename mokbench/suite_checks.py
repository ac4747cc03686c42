"""What cannot be seen value by value: axes that clash, combinations that cannot be meant."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from mokbench import cells, placement
from mokbench.document import AXES, REQUIRED_AXES, Axes, Document
from mokbench.problems import Problems, close
from mokbench.shapes import Shape
from mokbench.source import Loc
from mokbench.workload import Workload

if TYPE_CHECKING:
    from mokbench.config import Suite


def check(document: Document, suite: "Suite", problems: Problems) -> None:
    """Note every problem; what pydantic took out of the document is not complained about again."""
    _check_axes(document, problems)
    _check_zip(document, problems)
    _check_lists(document, problems)
    _check_systems(document, suite, problems)
    _check_labels(document, problems)
    given = {axis for track in suite.tracks for axis in track.axes if track.rows}
    if suite.systems and given.issuperset(REQUIRED_AXES):
        _check_cells(document, suite, problems)


def _axis_lists(document: Document) -> Iterator[tuple[Loc, str, tuple[Any, ...]]]:
    """Every list of values of an axis: where it stands, the axis, the values."""
    sections: list[tuple[Loc, Axes]] = [((), document), (("sweep",), document.sweep)]
    sections += [(("sweep", "zip", i), group) for i, group in enumerate(document.sweep.zip)]
    sections += [(("sweep", "include", i), each) for i, each in enumerate(document.sweep.include)]
    for loc, section in sections:
        for axis in AXES:
            if axis in section.model_fields_set:
                yield (*loc, axis), axis, getattr(section, axis)


def _check_axes(document: Document, problems: Problems) -> None:
    source = problems.source
    first: dict[str, Loc] = {}
    for loc, axis, _ in _axis_lists(document):
        if loc[:2] == ("sweep", "include"):
            continue
        if axis in first:
            place = source.find(first[axis])[0].key
            problems.add(loc, f"this axis already has values at {place}; give it once", at_key=True)
        first.setdefault(axis, loc)
    removed = [str(loc[-1]) for loc in source.removed if loc]
    meant = {name for key in removed for name in close(key, (*REQUIRED_AXES, "systems"))}
    for axis in REQUIRED_AXES:
        hurt = (
            source.damaged(axis) or source.damaged("sweep", axis) or source.damaged("sweep", "zip")
        )
        if axis not in first and not hurt and axis not in meant:
            problems.add((), f"{axis} is missing; give it at the top or under sweep")
    if not document.systems and not source.damaged("systems") and "systems" not in meant:
        problems.add((), "systems is missing; allowed: a list such as [mok, push, alltoall]")


def _check_zip(document: Document, problems: Problems) -> None:
    for i, group in enumerate(document.sweep.zip):
        loc: Loc = ("sweep", "zip", i)
        sizes = {axis: len(getattr(group, axis)) for axis in AXES if getattr(group, axis)}
        if _is_damaged(problems, loc):
            continue
        if len(set(sizes.values())) > 1:
            found = ", ".join(f"{axis} has {size}" for axis, size in sizes.items())
            problems.add(loc, f"{found} values; allowed: lists of one length, they move together")
        elif not sizes:
            problems.add(loc, "found nothing to move together; allowed: lists of one length")
        rows = list(zip(*(getattr(group, axis) for axis in sizes), strict=False))
        for j, repeated in _repeated(rows):
            problems.add(loc, f"values {j + 1} of the lists repeat values {repeated + 1}")


def _check_lists(document: Document, problems: Problems) -> None:
    lists = [
        (loc, values) for loc, _, values in _axis_lists(document) if loc[:2] != ("sweep", "zip")
    ]
    lists += [(("measure", key), getattr(document.measure, key)) for key in ("regimes", "graph")]
    lists += [(("require",), document.require)]
    for i, each in enumerate(document.sweep.exclude):
        lists += [
            (("sweep", "exclude", i, key), getattr(each, key)) for key in each.model_fields_set
        ]
    for loc, values in lists:
        for i, first in _repeated(values):
            if _is_damaged(problems, (*loc, i)) or _is_damaged(problems, (*loc, first)):
                continue
            place = problems.source.find((*loc, first))[0].place
            shown = problems.source.find((*loc, i))[0].shown()
            problems.add((*loc, i), f"{shown} is listed twice, first at {place}")


def _is_damaged(problems: Problems, loc: Loc) -> bool:
    """Whether something was taken out of a value: what is left of it says nothing."""
    return problems.source.damaged(*problems.source.find(loc)[0].loc)


def _repeated(values: Iterable[Any]) -> Iterator[tuple[int, int]]:
    first: dict[Any, int] = {}
    for i, value in enumerate(values):
        if value in first:
            yield i, first[value]
        first.setdefault(value, i)


def _check_systems(document: Document, suite: "Suite", problems: Problems) -> None:
    listed = [(i, e.name, options) for i, e in enumerate(suite.systems) for options in e.variants]
    for j, first in _repeated((name, options) for _, name, options in listed):
        i, name, options = listed[j]
        if any(_is_damaged(problems, ("systems", k)) for k in (i, listed[first][0])):
            continue
        variant = ", ".join(f"{key}={value}" for key, value in options) or "the default options"
        place = problems.source.find(("systems", listed[first][0]))[0].place
        problems.add(("systems", i), f"{name} with {variant} is listed twice, first at {place}")
    if problems.source.damaged("systems"):
        return
    names = list(dict.fromkeys(e.name for e in suite.systems))
    uses: list[tuple[Loc, str]] = [
        (("require", i), name) for i, name in enumerate(document.require)
    ]
    for i, extra in enumerate(document.sweep.include):
        uses += [
            (("sweep", "include", i, "system", j), name) for j, name in enumerate(extra.system)
        ]
    for loc, name in uses:
        if names and name not in names:
            problems.add(loc, f"{name!r} is not under systems; allowed: {', '.join(names)}")


def _check_labels(document: Document, problems: Problems) -> None:
    """Cell ids are built from names, so one name may not stand for two things."""
    known: dict[tuple[str, str], Any] = {}
    for loc, axis, values in _axis_lists(document):
        for i, value in enumerate(values):
            if axis not in ("model", "routing"):
                continue
            label = value.model.name if isinstance(value, Shape) else value.label
            if known.setdefault((axis, label), value) != value:
                problems.add((*loc, i), f"the name {label!r} already stands for another {axis}")


def _check_cells(document: Document, suite: "Suite", problems: Problems) -> None:
    num_cells = cells.count(suite)
    if num_cells > cells.MAX_CELLS:
        problems.add(("sweep",), f"found {num_cells} cells; allowed: at most {cells.MAX_CELLS}")
        return
    expansion = cells.expansion(suite)
    _check_workloads(document, [cell.workload for cell in expansion.cells], problems)
    # Cell ids and idle entries mean something only where the sweep is otherwise sound.
    if not problems:
        for i, _ in _repeated(cell.id for cell in expansion.cells):
            name = expansion.cells[i].id
            problems.add(("model",), f"two cells would both be called {name}; rename a model")
    if not problems.source.removed:
        _check_idle(suite, expansion, problems)


def _check_workloads(document: Document, works: list[Workload], problems: Problems) -> None:
    lists = _axis_lists(document)
    places = {(axis, v): (*loc, i) for loc, axis, values in lists for i, v in enumerate(values)}
    for model, ranks in dict.fromkeys((work.model, work.ranks) for work in works):
        if model.experts % ranks:
            divisors = [str(n) for n in range(1, model.experts + 1) if model.experts % n == 0]
            problems.add(
                places["ranks", ranks],
                f"{ranks} ranks cannot share the {model.experts} experts of {model.name} evenly; "
                f"allowed: {', '.join(divisors)}, or - {{model: {model.name}, ranks: {ranks}}} "
                "under sweep.exclude",
            )
    for work in {(w.placement, w.model, w.ranks): w for w in works}.values():
        if found := placement.problem(work.placement, work.ranks, work.model.experts):
            problems.add(
                places["placement", work.placement],
                f"{found} of {work.model.name}; allowed: to let it move with its ranks and model "
                "under sweep.zip, or to name the others under sweep.exclude",
            )
    if works and not any(work.tokens_per_rank for work in works):
        loc = places["tokens_per_rank", 0]
        problems.add(loc, "found 0 everywhere; allowed: at least one above 0")


def _check_idle(suite: "Suite", expansion: cells.Expansion, problems: Problems) -> None:
    for i in expansion.idle_excludes:
        problems.add(("sweep", "exclude", i), "matches no cell of the sweep; correct or drop it")
    listed = {entry.name for entry in suite.systems}
    for i in expansion.idle_includes:
        if listed.issuperset(suite.include[i].systems):
            problems.add(("sweep", "include", i), "adds no cell: the sweep already has all of them")
    if not expansion.cells:
        problems.add(("sweep", "exclude"), "leaves no cell to run")
