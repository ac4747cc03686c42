"""How all charts look: colours that the colour-blind tell apart, marks, notes, files."""

import io
import itertools
import re
import textwrap
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.text import Text

from mokbench.durable import replace_file
from mokbench.record import Record
from mokbench.report import units, wording
from mokbench.report.rows import Rows

_Item = TypeVar("_Item")

# Okabe and Ito's palette, without its yellow, which white paper swallows.
_COLOURS = {
    "mok": "#0072B2",
    "push": "#D55E00",
    "deepep": "#009E73",
    "alltoall": "#CC79A7",
    "local": "#000000",
}
_MARKERS = {"mok": "o", "push": "s", "deepep": "^", "alltoall": "D", "local": "v"}
_SPARE = (
    ("#56B4E9", "P"),
    ("#E69F00", "X"),
    ("#666666", "*"),
    ("#7A3E9D", "<"),
    ("#7F5200", ">"),
    ("#00424D", "p"),
)
SHADES = ("#0072B2", "#56B4E9")

# rcParams; matplotlib types each key apart, a plain dict fits none of them.
_LOOK: Any = {
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "axes.axisbelow": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "mokbench",
}
# What a page draws in its own ink, paper and lines. White on dark cells of a heat map is #fffffe.
_THEMED = {
    "#000000": "currentColor",
    "#444444": "var(--soft)",
    "#dddddd": "var(--line)",
    "#ffffff": "var(--paper)",
}
_PLACES = re.compile(r' (?:d|x|y|width|height|transform)="[^"]*"')
# Half a second a figure: more of them and a report of 10 000 rows takes a minute.
_LARGE, _FEW_FIGURES = 2000, 1
_LINE_INCHES = 0.19
_CHARACTERS_PER_INCH = 13.0
_MOST_INCHES = 15.0


def system_looks(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each system: its own for its first variant, spare ones for others."""
    looks: dict[str, tuple[str, str]] = {}
    spare = itertools.cycle(_SPARE)
    for name in names:
        system = name.split(" ")[0]
        own = (_COLOURS[system], _MARKERS[system]) if system in _COLOURS else None
        looks[name] = next(spare) if own is None or own in looks.values() else own
    return looks


def panels(
    count: int,
    *,
    title: str,
    notes: Sequence[str],
    size: tuple[float, float],
    legend: Mapping[str, tuple[str, str]] | None = None,
) -> tuple[Figure, list[Axes]]:
    """Make a figure of ``count`` panels, each of ``size`` inches, with a title and notes below.

    ``legend``: colour and marker by label, shown under the title, where it hides no point. The
    notes are where marks (oversubscribed, shared GPU) and what was left out are said.
    """
    columns = min(2 if count == 4 else 3, count, max(1, int(_MOST_INCHES / size[0])))
    rows = -(-count // columns)
    width = max(6.0, columns * size[0])
    lines = [part for note in notes for part in wrap(note, int(width * _CHARACTERS_PER_INCH))]
    heading = wrap(title, int(width * 11.0))
    keys = _keys(legend or {})
    longest = max((len(label) for label in legend or {}), default=0)
    beside = max(1, min(len(keys), int(width / (0.5 + 0.075 * longest))))
    under_title = 0.1 + 0.22 * len(heading)
    top = under_title + 0.2 * -(-len(keys) // beside)
    bottom = 0.08 + _LINE_INCHES * len(lines)
    height = rows * size[1] + top + bottom
    with mpl.rc_context(_LOOK):
        layout = ConstrainedLayoutEngine(rect=(0, bottom / height, 1, 1 - (top + bottom) / height))
        figure = Figure(figsize=(width, height), layout=layout)
        grid = figure.subplots(rows, columns, squeeze=False)
    figure.text(0.01, 1 - 0.06 / height, "\n".join(heading), va="top", weight="bold", size=11)
    figure.text(0.01, 0.05 / height, "\n".join(lines), va="bottom", size=8, color="#444444")
    if keys:
        corner = (0.0, 1 - under_title / height)
        look: Any = {"frameon": False, "fontsize": 8, "borderpad": 0.2, "handlelength": 1.0}
        figure.legend(
            handles=keys, loc="upper left", bbox_to_anchor=corner, ncols=beside, **look
        ).set_in_layout(False)
    axes = list(grid.flat)
    for spare in axes[count:]:
        spare.set_axis_off()
    return figure, axes[:count]


def _keys(legend: Mapping[str, tuple[str, str]]) -> list[Line2D]:
    return [
        Line2D([], [], color=colour, marker=marker, markersize=5, linestyle="none", label=label)
        for label, (colour, marker) in legend.items()
    ]


def wrap(text: str, width: int) -> list[str]:
    """Break text at spaces; a longer word stands alone."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return lines


def fold(label: str, width: int) -> str:
    """Break a routing's label into lines: before each ``+``, then at hyphens, then anywhere."""
    parts = [label] if len(label) <= width else re.findall(r"[+]?[^+]+", label)
    return "\n".join(line for part in parts for line in textwrap.wrap(part, width))


def most_figures(rows: Rows, usual: int) -> int:
    """How many figures of one kind to draw: a report of thousands of rows is read in its tables."""
    return usual if len(rows.rows) <= _LARGE else min(usual, _FEW_FIGURES)


def notes_of(records: Sequence[Record], rows: Rows) -> list[str]:
    """Every mark that a chart of these rows must carry: twin, oversubscribed, shared GPU."""
    marks = [f"{text[0].upper()}{text[1:]}." for text in wording.marks(records, rows.machine)]
    return [wording.HOST] * any(record.fabric == "host" for record in records) + marks


def by_imbalance(records: Sequence[Record]) -> list[str]:
    """Routings from even to uneven."""
    worst: dict[str, float] = {}
    for record in records:
        found = record.imbalance.expert_max_over_mean if record.imbalance else None
        worst[record.routing] = max(worst.get(record.routing, 0.0), found or 0.0)
    return sorted(worst, key=lambda name: (name != "balanced", worst[name]))


def spread(items: list[_Item], most: int) -> list[_Item]:
    """At most ``most`` items, first and last kept, the others evenly spread."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def imbalance_tick(records: Sequence[Record], routing: str, width: int) -> str:
    """Routing with how uneven it is for experts and for ranks."""
    found = next((r.imbalance for r in records if r.routing == routing and r.imbalance), None)
    label = fold(routing, width)
    if found is None:
        return label
    expert = units.quotient(found.expert_max_over_mean)
    return f"{label}\nexpert {expert}\nrank {units.quotient(found.rank_max_over_mean)}"


def spans_decades(values: Sequence[float]) -> bool:
    """Whether values differ so much that an axis from zero would hide the small ones."""
    above = [value for value in values if value > 0]
    return bool(above) and max(above) > 8 * min(above)


def from_zero_or_log(axes: Axes, values: Sequence[float]) -> None:
    """Scale y from zero, or by decades where the values differ more than eightfold."""
    if spans_decades(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        # Above every point, so that no marker is cut in half by the frame.
        axes.set_ylim(0, max(axes.get_ylim()[1], 1.08 * max(values, default=0.0)) or None)


def save(figure: Figure, folder: Path, stem: str, taken: Container[Path]) -> list[Path]:
    """Write a figure as PNG and SVG; a stem that is taken gets a number. Raises OSError."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.")[:120]
    number = 1
    while folder / f"{_numbered(stem, number)}.png" in taken:
        number += 1
    files = []
    _plain(figure)
    with mpl.rc_context(_LOOK):
        for kind in ("png", "svg"):
            buffer = io.BytesIO()
            metadata = {"Date": None} if kind == "svg" else None
            figure.savefig(buffer, format=kind, dpi=150, metadata=metadata)
            files.append(folder / f"{_numbered(stem, number)}.{kind}")
            replace_file(files[-1], buffer.getvalue())
    return files


def _plain(figure: Figure) -> None:
    """Draw every text as it is: a $ in a name or a reason must not start a formula."""
    for text in figure.findobj(Text):
        if isinstance(text, Text):
            text.set_parse_math(False)


def inline(figure: Figure, prefix: str) -> str:
    """SVG of a figure for a page: colours of ink and paper follow the page's light or dark.

    ``prefix`` keeps its ids apart from those of other figures in the same page.
    """
    _plain(figure)
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with mpl.rc_context(_LOOK):
        figure.savefig(buffer, format="svg", metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace("\n", " ")
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text)
    width = re.search(r'<svg [^>]*?width="([0-9.]+)pt"', text)
    text = re.sub(r'(<svg [^>]*?)height="[^"]*"([^>]*?)width="[^"]*"', r"\1\2", text, count=1)
    text = re.sub(r'(<svg [^>]*?)width="[^"]*"([^>]*?)height="[^"]*"', r"\1\2", text, count=1)
    size = f' style="width:{float(width[1]):.0f}pt"' if width else ""
    text = text.replace("<svg ", f"<svg{size} ", 1)
    text = re.sub(r'\bid="', f'id="{prefix}', text)
    text = re.sub(r'(href="#|url\(#)', rf"\1{prefix}", text)
    # Hundredths of a point: more digits are a quarter of the file and cannot be seen.
    text = _PLACES.sub(lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), text)
    for plain, themed in _THEMED.items():
        text = text.replace(plain, themed)
    return re.sub(r" {2,}", " ", text)


def _numbered(stem: str, number: int) -> str:
    return stem if number == 1 else f"{stem}-{number}"
