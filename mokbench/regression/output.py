"""What compare and check say: table, markdown within GitHub's limits, JSON, JUnit; worst first."""

import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from mokbench.regression.check import Checked
from mokbench.regression.confirm import suspects
from mokbench.regression.judge import Judged
from mokbench.regression.launch import MARKS
from mokbench.regression.verdict import ORDER, Verdict
from mokbench.report import units
from mokbench.shown_text import escaped, visible

# GitHub's limit for the summaries of one step, and what is surely below its 65 536 characters for a
# comment: docs/ci/github-comment.yml cuts what is longer, and so would take the last line away.
SUMMARY_BYTES = 1024 * 1024
COMMENT_BYTES = 65_000
_MOST_LINES = 40
_STYLES = {
    Verdict.SLOWER: "bold red",
    Verdict.FAILED: "bold red",
    Verdict.CLOCK: "yellow",
    Verdict.AMBIGUOUS: "yellow",
    Verdict.FASTER: "green",
}
_HEADINGS = ("verdict", "cell", "metric", "base", "now", "ratio (95 % CI)", "launches")
_LEFT_OUT = "{} more not shown; --format json has them all."


def headline(checked: Checked) -> str:
    """One sentence that says how the check ended."""
    shown_only = sum(not one.gates for one in checked.judged)
    parts = [tally(one for one in checked.judged if one.gates) or "no series that may gate"]
    if shown_only:
        parts.append(f"{shown_only} shown only (shared GPU or oversubscribed)")
    if checked.commits:
        parts.append(f"commits {checked.commits}")
    if checked.confirmed:
        parts.append(_measured_again(checked))
    if checked.recorded:
        parts.append(f"{units.count(checked.recorded, 'run')} recorded")
    if checked.accepted:
        parts.append(f"new level accepted of {len(checked.accepted)} series")
    elif checked.open_levels:
        parts.append(f"{checked.open_levels} FASTER and not accepted: no base, see --accept")
    if short := short_level(checked):
        parts.append(short)
    return "; ".join(parts)


def _measured_again(checked: Checked) -> str:
    again = sum(one.again for one in checked.judged)
    open_ = suspects(checked.judged, checked.limits)
    left = sum(not one.again for one in open_)
    text = f"{again} of {units.count(again + left, 'suspect')} measured again in turn with the base"
    unclear = sum(one.call.verdict is not Verdict.SLOWER for one in open_)
    return text + (f", {unclear} of them neither confirmed nor cleared" if unclear else "")


def short_level(checked: Checked) -> str | None:
    """Say that an accepted level has too few launches to judge anything by; null where not."""
    if not checked.level_lacks:
        return None
    least = checked.limits.least_base
    return (
        f"the new level has {least - checked.level_lacks} of the {least} launches that a base "
        f"needs: its series are INSUFFICIENT, and pass, until {checked.level_lacks} more are "
        "recorded"
    )


def tally(judged: Iterable[Judged]) -> str:
    """How many series have each verdict, worst first: ``1 SLOWER, 7 SAME``."""
    counts = Counter(one.call.verdict for one in judged)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in ORDER if counts[verdict])


def table(judged: Sequence[Judged], explain: bool, most: int = _MOST_LINES) -> Table:
    """Build a terminal table of what is worth a look; ``explain``: every series with its why."""
    chosen = list(judged) if explain else [one for one in judged if _worth_a_look(one)]
    drawn = Table(box=None, pad_edge=False, header_style="cyan")
    for title in _HEADINGS[:3]:
        drawn.add_column(title, overflow="fold")
    for title in _HEADINGS[3:]:
        drawn.add_column(title, justify="right", no_wrap=True)
    drawn.add_column("why", overflow="fold")
    shown = chosen if explain else chosen[:most]
    for one in shown:
        style = _STYLES.get(one.call.verdict, "") if one.gates else "dim"
        drawn.add_row(Text(one.call.verdict, style), *map(_text, (*_cells(one)[1:], one.words)))
    if len(chosen) > len(shown):
        drawn.caption = _LEFT_OUT.format(len(chosen) - len(shown))
    return drawn


def _text(text: str) -> Text:
    return Text(visible(text))


def _worth_a_look(one: Judged) -> bool:
    return one.call.verdict is not Verdict.SAME


def _cells(one: Judged) -> tuple[str, ...]:
    call = one.call
    ratio = units.NOTHING
    if call.ratio is not None:
        ratio = f"{call.ratio:.3f}"
        if call.low is not None and call.high is not None:
            ratio += f" ({call.low:.3f}-{call.high:.3f})"
    return (
        call.verdict,
        *one.series,
        _value(one, one.base_value),
        _value(one, one.value),
        ratio,
        f"{call.base_n}+{call.candidate_n}",
    )


def _value(one: Judged, value: float | None) -> str:
    return units.size(value) if one.series[1].endswith("_bytes") else units.number(value)


def markdown(title: str, first: str, judged: Sequence[Judged], limit: int) -> str:
    """Build a GitHub table, worst first, cut so that the whole stays below ``limit`` bytes.

    SAME series are counted in ``first`` and listed last, so that a cut takes them away before
    anything else.
    """
    lines = [
        f"## {escaped(title)}",
        "",
        escaped(first),
        "",
        "| " + " | ".join((*_HEADINGS, "why")) + " |",
        "|---|---|---|---:|---:|---:|---:|---|",
    ]
    size = sum(len(line.encode()) + 1 for line in lines)
    # Room for the line that says what was cut.
    spare = len(_LEFT_OUT) + 20
    for number, one in enumerate(judged):
        line = "| " + " | ".join(map(escaped, (*_cells(one), one.words))) + " |"
        size += len(line.encode()) + 1
        if size + spare > limit:
            lines += ["", _LEFT_OUT.format(len(judged) - number)]
            break
        lines.append(line)
    return "\n".join(lines) + "\n"


def as_json(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """JSON-ready form, worst first, finite numbers or null only."""
    return [
        {
            "id": one.series[0],
            "metric": one.series[1],
            "gates": one.gates,
            "mark": MARKS.get(one.mark),
            "base": one.base_value,
            "value": one.value,
            **asdict(one.call),
        }
        for one in judged
    ]


def check_json(checked: Checked, strict: bool) -> dict[str, Any]:
    """Build the check's object: how it ended, with which limits, and every series."""
    return {
        "exit_code": checked.exit_code(strict),
        "headline": headline(checked),
        "machine": checked.machine.key,
        "runs": [launch.run for launch in checked.launches],
        "commits": checked.commits,
        "confirmed": checked.confirmed,
        "recorded": checked.recorded,
        "accepted": checked.accepted,
        "level_lacks": checked.level_lacks,
        "open_levels": checked.open_levels,
        "limits": asdict(checked.limits),
        "series": as_json(checked.judged),
    }


def junit(checked: Checked) -> bytes:
    """JUnit XML: SLOWER fails, FAILED is an error, what is unsettled or may not gate is skipped.

    So is SLOWER where it was accepted: it ends with exit code 0.
    """
    judged = checked.judged
    suite = ElementTree.Element("testsuite", name="mokbench check", tests=str(len(judged)))
    kinds = [_outcome(one, accepted=bool(checked.accepted)) for one in judged]
    totals = Counter(kinds)
    suite.set("failures", str(totals["failure"]))
    suite.set("errors", str(totals["error"]))
    suite.set("skipped", str(totals["skipped"]))
    for one, kind in zip(judged, kinds, strict=True):
        cell, metric = one.series
        case = ElementTree.SubElement(suite, "testcase", classname=_xml(metric), name=_xml(cell))
        if kind:
            told = ElementTree.SubElement(
                case, kind, message=_xml(f"{one.call.verdict}: {one.words}")
            )
            if checked.commits:
                told.text = _xml(f"commits {checked.commits}")
    text: bytes = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
    return text


def _outcome(one: Judged, accepted: bool) -> str:
    if one.call.verdict in (Verdict.SAME, Verdict.FASTER):
        return ""
    if one.gates and one.call.verdict is Verdict.SLOWER and not accepted:
        return "failure"
    # A failure gates wherever it ran.
    return "error" if one.failed or one.call.verdict is Verdict.FAILED else "skipped"


def _xml(text: str) -> str:
    """Leave out what XML 1.0 cannot hold at all, escaped or not."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)
