"""What a run folder must be before its figures are held against others."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from mokbench import moment
from mokbench.brief import brief
from mokbench.cell_digest import cell_digest, lacks_defaults
from mokbench.durable import as_results_error, whole_lines
from mokbench.errors import ResultsError
from mokbench.machine import Machine
from mokbench.record import METHOD_VERSION, Record
from mokbench.results import RunFolder
from mokbench.topology import Topology
from mokbench.workload import Cell

# A run may come from another machine, whose clock is another.
MOST_AHEAD = timedelta(days=1)


def refuse_unfinished(run: RunFolder) -> None:
    """Raise ResultsError for a run that goes on or stopped half way: its rows are a selection."""
    status = run.meta.status
    if status == "running":
        raise ResultsError(f"{run.path}: is still being measured; wait for it to end")
    if status == "failed" and run.meta.rows is None:
        # An older mokbench said so of both; what failed to its end has a row that says why.
        status = "failed" if any(row.status != "ok" for row in run.records()) else "aborted"
    if status in ("interrupted", "aborted"):
        raise ResultsError(
            f"{run.path}: was {status}; finish it (mokbench run --resume {run.path}) or leave it "
            "out"
        )


def refuse_future(run: RunFolder) -> None:
    """Raise ResultsError for a run of days to come: what is measured next would be before it."""
    now = datetime.now(UTC)
    if moment.read(run.meta.created) > now + MOST_AHEAD:
        raise ResultsError(
            f"{run.path / 'run.json'}: was created at {run.meta.created}, more than a day after "
            f"now, {now.isoformat(timespec='seconds')} by this machine's clock: one of the two "
            "clocks is wrong; measure again, or leave the run out"
        )


def refuse_torn(run: RunFolder) -> None:
    """Raise ResultsError where a run that ended has lost rows, or the end of the last one.

    Only a crash in the middle of a run does that, and that run says so: here the file was cut.
    """
    if run.meta.status in ("running", "interrupted"):
        return
    path = run.path / "records.jsonl"
    with as_results_error(path, "reading", "make it readable"):
        lines, torn = whole_lines(path)
    again = f"measure what is lost again: mokbench run --resume {run.path}"
    if torn:
        raise ResultsError(
            f"{path}: the run ended, but its last row is cut short; restore the file, or {again}"
        )
    if run.meta.rows is not None and run.meta.rows != len(lines):
        raise ResultsError(
            f"{path}: has {len(lines)} rows, but the run ended with {run.meta.rows}; restore the "
            f"file, or {again}"
        )


def refuse_repeated(run: RunFolder) -> None:
    """Raise ResultsError where a row stands again that was not measured again.

    It would be counted in the place of one that is lost. Only a failed row is measured again.
    """
    last: dict[str, Record] = {}
    for row in sorted(run.attempts(), key=lambda row: row.attempt):
        before = last.get(row.id)
        if before and (before.attempt == row.attempt or before.status != "failed"):
            raise ResultsError(
                f"{run.path / 'records.jsonl'}: {row.id} stands in it again, as attempt "
                f"{row.attempt} beside attempt {before.attempt}, which is {before.status}; only "
                "failed rows are measured again, as their next attempt: restore the file, or "
                "delete what stands twice and measure what is lost: mokbench run --resume "
                f"{run.path}"
            )
        last[row.id] = row


def refuse_changed_cells(run: RunFolder, cells: Sequence[Cell]) -> None:
    """Raise ResultsError where a stored row and the cell of its id are not one measurement.

    The id does not tell: it names no option at its default, and the default may have changed.
    """
    stored = {record.id: record.cell_digest for record in run.records()}
    for cell in cells:
        found = stored.get(cell.id)
        if found is None or found == cell_digest(cell):
            continue
        why = (
            "was stored by an older mokbench, which did not keep the options that had defaults"
            if lacks_defaults(found)
            else "was measured with other options (a default may have changed since)"
        )
        raise ResultsError(
            f"{run.path}: {cell.id} {why}; its rows and new ones cannot be mixed: start a new run"
        )


def refuse_moved_ranks(run: RunFolder, topologies: Sequence[Topology]) -> None:
    """Raise ResultsError where as many ranks as before lie otherwise on nodes, GPUs and domains.

    Host names may be others: a scheduler gives other nodes of one kind.
    """
    stored = {found.ranks: found for found in run.meta.topologies}
    for here in topologies:
        before = stored.get(here.ranks)
        if before and (problem := before.differs(here)):
            raise ResultsError(
                f"{run.path}: {here.ranks} ranks were elsewhere on nodes, GPUs and NVLink domains "
                f"when it was started ({problem}); their traffic cannot be compared: start a new "
                "run, or ask the launcher for the same layout"
            )


def refuse_stale_key(where: object, machine: Machine) -> None:
    """Raise ResultsError where a machine's stored key is not that of what it says about itself.

    A key that stayed while the driver or a version changed would be held against another
    machine's figures. ``where`` is the file.
    """
    found = machine.computed_key()
    if machine.key != found:
        raise ResultsError(
            f"{where}: its machine key {machine.key or '(none)'} is not that of the machine it "
            f"describes ({found}): the file was changed, or another version of mokbench made it; "
            "measure again with this one"
        )


def refuse_unknown_method(run: RunFolder) -> None:
    """Raise ResultsError for a method version of which this mokbench has no definitions."""
    if unknown := unknown_method(run.meta.method_version):
        raise ResultsError(f"{run.path / 'run.json'}: {unknown}")


def unknown_method(found: int) -> str | None:
    """What must be said of a method version that this mokbench does not know; null for others."""
    if 1 <= found <= METHOD_VERSION:
        return None
    known = "1" if METHOD_VERSION == 1 else f"1 to {METHOD_VERSION}"
    return (
        f"was measured with method version {brief(found)}, this mokbench knows {known} and cannot "
        "say what its figures mean; use the one that measured it"
    )


def older_method(version: int) -> str | None:
    """What must be said of figures of an older method version; null for the present one."""
    if version == METHOD_VERSION:
        return None
    return (
        f"measured with method version {version}: what is said here about figures is of version "
        f"{METHOD_VERSION}, the mokbench that measured them says what they mean"
    )
