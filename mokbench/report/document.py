"""What a report consists of, section by section, and the markdown form of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from mokbench.report import against_deepep, places, units, wording
from mokbench.report.against_deepep import deepep_tables
from mokbench.report.phases import phase_tables
from mokbench.report.rows import Rows
from mokbench.report.signaling import min_step_table, signaling_tables
from mokbench.report.slowdown import slowdown_tables
from mokbench.report.tables import Table, note_counts, problem_table, uncompared, workload_tables
from mokbench.run_checks import older_method
from mokbench.shown_text import escaped

_MAX_NOTES = 10


@dataclass(frozen=True)
class Section:
    """A heading, lines of text, then tables."""

    title: str
    lines: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()


def sections(rows: Rows) -> list[Section]:
    """Build the whole report; sections without content are left out."""
    steps, slowdowns = workload_tables(rows), slowdown_tables(rows)
    deepep = deepep_tables(rows)
    found = [
        Section("", (*wording.runs(rows), wording.machine(rows.machine), *_warnings(rows))),
        Section("Step time", tables=tuple(steps)),
        Section("Against DeepEP", tables=tuple(deepep)),
        Section("Step time over that of balanced routing", tables=tuple(slowdowns)),
        Section("Phases inside of the kernel", tables=tuple(phase_tables(rows))),
        Section("Signaling", tables=tuple(_signaling(rows))),
        Section("Reading the figures", tuple(_legend([*steps, *deepep], slowdowns))),
        Section("Not measured", tables=tuple(_problems(rows))),
        Section("Notes", tuple(_notes(rows))),
    ]
    return [section for section in found if section.lines or section.tables]


def markdown(rows: Rows, charts: Sequence[Path] = ()) -> str:
    """Render the report as GitHub markdown; ``charts`` are shown as images at its end."""
    names = ", ".join(dict.fromkeys(meta.name for _, meta in rows.runs))
    parts = [f"# mokbench: {escaped(names)}"]
    for section in sections(rows):
        if section.title:
            parts.append(f"## {section.title}")
        if section.lines:
            parts.append("\n".join(f"- {escaped(line)}" for line in section.lines))
        for table in section.tables:
            parts += table_markdown(table)
    if charts:
        parts.append("## Charts")
        parts += [f"![{path.stem}]({quote(path.as_posix())})" for path in charts]
    return "\n\n".join(parts) + "\n"


def table_markdown(table: Table) -> list[str]:
    """Blocks of GitHub markdown: heading, what it is about, the table, its sentences."""
    lines = [
        "| " + " | ".join(escaped(column.title) for column in table.columns) + " |",
        "|" + "|".join("---:" if column.right else "---" for column in table.columns) + "|",
    ]
    lines += ["| " + " | ".join(map(escaped, row)) + " |" for row in table.cells]
    parts = [f"### {escaped(table.title)}", *map(escaped, table.about), "\n".join(lines)]
    if table.sentences:
        parts.append("\n".join(f"- {escaped(line)}" for line in table.sentences))
    return parts


def _warnings(rows: Rows) -> list[str]:
    """Collect what must be read before any figure."""
    measured = [row.record for row in rows.rows if row.record.status == "ok"]
    older = older_method(rows.method_version)
    lines = [older] if older else []
    lines += [wording.HOST] if any(row.record.fabric == "host" for row in rows.rows) else []
    lines += wording.marks(measured, rows.machine)
    if not rows.rows:
        lines.append("This run has no rows yet.")
    elif not measured:
        lines.append("No row was measured; below is why.")
    lines += [text for text in (wording.unsettled(rows.rows), uncompared(rows)) if text]
    return lines


def _signaling(rows: Rows) -> list[Table]:
    least = min_step_table(rows)
    return signaling_tables(rows) + ([least] if least else [])


def _legend(tables: Sequence[Table], slowdowns: Sequence[Table]) -> list[str]:
    cells = [cell for table in tables for row in table.cells for cell in row]
    titles = {column.title for table in tables for column in table.columns}
    lines = []
    if titles.intersection((wording.AGAINST, wording.AGAINST_ON_HOST)):
        lines.append(wording.LEGEND)
    if against_deepep.AGAINST in titles:
        lines.append(against_deepep.LEGEND)
    said = [line for table in tables for line in table.sentences]
    if any(cell.startswith("~") for cell in cells) or any(wording.SEPARATE in s for s in said):
        lines.append(wording.LEGEND_SEPARATE)
    if "redundancy" in titles:
        lines.append(wording.LEGEND_BYTES)
    lines += places.legends(titles)
    return lines + [wording.LEGEND_SLOWDOWN] * bool(slowdowns)


def _problems(rows: Rows) -> list[Table]:
    found = (problem_table(rows, status) for status in ("failed", "unsupported"))
    return [table for table in found if table is not None]


def _notes(rows: Rows) -> list[str]:
    notes = note_counts(rows)
    left = len(notes) - _MAX_NOTES
    return notes[:_MAX_NOTES] + (
        [f"{units.count(left, 'more note')}: --format json has them"] if left > 0 else []
    )
