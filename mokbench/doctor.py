"""What would run on this machine, what is missing, and what to do about it.

Every check stands alone: one that fails says so and the others go on. It reports and never judges,
so the command ends with 0 whatever is found.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mokbench import __version__
from mokbench.doctor_gpus import gpu_findings
from mokbench.doctor_software import host_findings, software_findings
from mokbench.finding import Finding, State, isolated, reason
from mokbench.gpus import visible_gpus
from mokbench.machine import describe
from mokbench.output_console import OutputConsole
from mokbench.routing import RoutingSpec
from mokbench.systems import system_class
from mokbench.systems.options import SYSTEM_OPTIONS
from mokbench.workload import Cell, Dtype, Model, Regime, Workload

FABRICS = ("host", "cuda")
_MARKS = {State.OK: "ok", State.NOTE: "note", State.PROBLEM: "FIX", State.UNREADABLE: "?"}
_STYLES = {State.OK: "green", State.NOTE: "", State.PROBLEM: "bold red", State.UNREADABLE: "yellow"}
_MODEL = Model("doctor", hidden=256, intermediate=256, experts=8, top_k=2)


@dataclass(frozen=True)
class Answer:
    """What a system says to a small cell on a fabric; ``reason`` is null where it is supported."""

    system: str
    fabric: str
    reason: str | None


@dataclass(frozen=True)
class Diagnosis:
    """All findings by section, and all answers; ``machine`` is null where it is not readable."""

    machine: dict[str, Any] | None
    sections: dict[str, list[Finding]]
    answers: list[Answer]

    @property
    def findings(self) -> list[Finding]:
        """Findings of all sections."""
        return [finding for found in self.sections.values() for finding in found]


def examine() -> Diagnosis:
    """Look at this machine; raises nothing, imports no torch, starts no GPU work."""
    described: list[dict[str, Any]] = []

    def machine() -> list[Finding]:
        found = describe()
        described.append(found.model_dump(mode="json"))
        inside = f" in {found.container}" if found.container else ""
        on = "" if found.virtualization == "none" else f", guest of {found.virtualization}"
        return [
            Finding("CPU", f"{found.cpu}, {found.memory_gib} GiB{on}{inside}"),
            Finding("system", f"{found.os}, Linux {found.kernel}, Python {found.python}"),
        ]

    parts: dict[str, dict[str, Callable[[], list[Finding]]]] = {
        "machine": {"machine": machine, "host": host_findings},
        "software": {"software": software_findings},
        "GPUs": {"GPUs": gpu_findings},
    }
    sections = {
        section: [finding for name, check in checks.items() for finding in isolated(name, check)]
        for section, checks in parts.items()
    }
    answers = [ask(system, fabric) for fabric in FABRICS for system in SYSTEM_OPTIONS]
    return Diagnosis(described[0] if described else None, sections, answers)


def ask(system: str, fabric: str) -> Answer:
    """A system's answer to a cell small enough for any machine: two ranks, one for local."""
    work = Workload(
        _MODEL,
        ranks=1 if system == "local" else 2,
        tokens_per_rank=16,
        dtype=Dtype.BF16,
        routing=RoutingSpec(),
    )
    cell = Cell(f"doctor.{system}", fabric, system, (), work, Regime.ISOLATED)
    try:
        if fabric == "cuda" and not visible_gpus():
            return Answer(system, fabric, "no GPU is visible here; set fabric: host")
        return Answer(system, fabric, system_class(system, fabric).supports(cell))
    except Exception as error:
        return Answer(system, fabric, f"could not be read: {reason(error)}")


def to_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The report for programs: machine, checks and systems."""
    return {
        "version": __version__,
        "machine": diagnosis.machine,
        "checks": [
            {"section": section, **asdict(finding)}
            for section, found in diagnosis.sections.items()
            for finding in found
        ],
        "systems": [
            {**asdict(answer), "supported": answer.reason is None} for answer in diagnosis.answers
        ],
    }


def screen(diagnosis: Diagnosis) -> RenderableType:
    """The report for people, one line a finding; what to do stands below a problem."""
    lines = Table.grid(padding=(0, 2))
    lines.add_column(no_wrap=True)
    lines.add_column(no_wrap=True)
    lines.add_column(overflow="fold")
    for section, found in diagnosis.sections.items():
        lines.add_row("", Text(section, style="bold underline"), "")
        for finding in found:
            _add(lines, finding)
    lines.add_row("", Text("systems", style="bold underline"), "")
    for fabric in FABRICS:
        for finding in _fabric_findings(diagnosis.answers, fabric):
            _add(lines, finding)
    return Group(lines, Text(), Text(_summary(diagnosis), style="bold"))


def _add(lines: Table, finding: Finding) -> None:
    mark = Text(_MARKS[finding.state], style=_STYLES[finding.state])
    lines.add_row(mark, Text(finding.name), Text(finding.text))
    if finding.advice:
        lines.add_row("", "", Text(f"-> {finding.advice}", style="dim"))


def _fabric_findings(answers: list[Answer], fabric: str) -> list[Finding]:
    """One line for the systems that run, one for each that does not."""
    here = [answer for answer in answers if answer.fabric == fabric]
    able = [answer.system for answer in here if answer.reason is None]
    state = State.OK if able else State.NOTE
    found = [Finding(f"{fabric} fabric", f"supported: {', '.join(able) or 'no system'}", state)]
    found += [
        Finding(f"  {answer.system}", f"no: {answer.reason}", State.NOTE)
        for answer in here
        if answer.reason is not None
    ]
    return found


def _summary(diagnosis: Diagnosis) -> str:
    states = [finding.state for finding in diagnosis.findings]
    problems, unread = states.count(State.PROBLEM), states.count(State.UNREADABLE)
    text = f"{problems} to fix" if problems else "Nothing to fix"
    return f"{text}; {unread} could not be read." if unread else f"{text}."


def doctor_command(format_: str) -> None:
    """Print the report as a table or as JSON."""
    diagnosis = examine()
    if format_ == "json":
        click.echo(json.dumps(to_json(diagnosis), indent=1))
    else:
        OutputConsole(highlight=False).print(screen(diagnosis))
