"""A config file -> Suite: what to run, fully checked, or one ConfigError with every problem."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from mokbench import yaml_source
from mokbench.cells import Extra, Match, Track
from mokbench.cluster import Cluster
from mokbench.document import AXES, Document, MeasureOptions, schema
from mokbench.problems import Problems
from mokbench.shapes import Shape, file_safe
from mokbench.source import Source
from mokbench.suite_checks import check
from mokbench.system_choice import SystemEntry, entry

__all__ = ["MeasureOptions", "Suite", "SystemEntry", "load", "parse", "schema"]


@dataclass(frozen=True)
class Suite:
    """A checked config. ``fabric`` may be auto: the caller resolves it for ``cells.expand``.

    ``tracks``, ``exclude`` and ``include`` are the sweep; ``resolved`` is the config with models,
    paths and units resolved, JSON-ready, and itself a valid config; ``text`` is the file's text.
    """

    name: str
    fabric: str
    systems: tuple[SystemEntry, ...]
    tracks: tuple[Track, ...]
    exclude: tuple[Match, ...]
    include: tuple[Extra, ...]
    measure: MeasureOptions
    require: tuple[str, ...]
    cluster: Cluster | None
    resolved: dict[str, Any]
    text: str
    path: Path


def load(path: str | Path) -> Suite:
    """Read a config. Raises ConfigError with one line a problem: file:line:column: field: why."""
    path = Path(path)
    return _suite(yaml_source.read(path), path)


def parse(text: str, path: str | Path = "config.yaml") -> Suite:
    """Check text in hand; ``path`` names it in messages and anchors relative paths."""
    return _suite(yaml_source.parse(text, str(path)), Path(path))


def _suite(source: Source, path: Path) -> Suite:
    problems = Problems(source)
    document = _validate(source, path.parent, problems)
    suite = _build(document, source, path)
    check(document, suite, problems)
    problems.raise_all()
    return suite


def _validate(source: Source, folder: Path, problems: Problems) -> Document:
    """Note what pydantic finds wrong, take it out, and go on with the rest.

    Only the first pass speaks: later ones would complain about what the earlier took out.
    """
    source.remove_private()
    found = False
    while True:
        try:
            return Document.model_validate(source.root.plain(), context={"folder": folder})
        except ValidationError as error:
            # A default that depends on a faulty value is no fault of its own.
            errors = [
                each
                for each in error.errors(include_url=False)
                if each["type"] != "default_factory_not_called"
            ]
            if not found:
                problems.add_errors(errors, Document)
            found = True
            source.remove([source.find(each["loc"])[0] for each in errors])


def _build(document: Document, source: Source, path: Path) -> Suite:
    sweep = document.sweep
    return Suite(
        name=document.name or file_safe(path.stem),
        fabric=document.fabric,
        systems=tuple(entry(choice) for choice in document.systems),
        tracks=_tracks(document),
        exclude=tuple(_match(section) for section in sweep.exclude),
        include=tuple(Extra(_lists(extra), extra.system) for extra in sweep.include),
        measure=document.measure,
        require=document.require,
        cluster=document.cluster,
        resolved=_resolved(document),
        text=source.text,
        path=path,
    )


def _tracks(document: Document) -> tuple[Track, ...]:
    """Top level, then sweep, then zip groups; an axis given twice counts once."""
    zipped = []
    for group in document.sweep.zip:
        lists = _lists(group)
        axes = tuple(track.axes[0] for track in lists)
        rows = zip(*(track.rows for track in lists), strict=False)
        zipped.append(Track(axes, tuple(tuple(part[0] for part in row) for row in rows)))
    tracks: list[Track] = []
    for track in (*_lists(document), *_lists(document.sweep), *zipped):
        seen = {axis for known in tracks for axis in known.axes}
        kept = track.without(seen)
        if kept and kept.axes:
            tracks.append(kept)
    return tuple(tracks)


def _lists(section: BaseModel) -> tuple[Track, ...]:
    given = {axis: getattr(section, axis) for axis in AXES if axis in section.model_fields_set}
    return tuple(
        Track((axis,), tuple((v.model if isinstance(v, Shape) else v,) for v in values))
        for axis, values in given.items()
    )


def _match(section: BaseModel) -> Match:
    keys = [key for key in type(section).model_fields if key in section.model_fields_set]
    return tuple(
        (key, tuple(v.lower() if key == "model" else v for v in getattr(section, key)))
        for key in keys
    )


def _resolved(document: Document) -> dict[str, Any]:
    data = document.model_dump(mode="json", by_alias=True, exclude_unset=True)
    data["measure"] = document.measure.model_dump(mode="json", by_alias=True)
    return data
