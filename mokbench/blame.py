"""Which rank is at fault when several report trouble: the one that explains the others."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Failure:
    """How one rank failed. ``kind``: died, error, fault (a wait expired), peer, hung."""

    rank: int
    kind: str
    text: str
    fault: dict[str, Any] | None = None


def at_fault(failures: list[Failure]) -> Failure:
    """The failure that caused the others.

    A death or an error of a rank's own explains its peers' expired waits. Among expired waits the
    chain "r waits for late_rank" is followed to a rank that has no complaint of its own.
    """
    for kind in ("died", "error"):
        for failure in failures:
            if failure.kind == kind:
                return failure
    by_rank = {f.rank: f for f in failures}
    faults = [f for f in failures if f.kind == "fault" and f.fault]
    hung = [f for f in failures if f.kind == "hung"]
    if hung:
        witness = next((f for f in faults if (f.fault or {})["late_rank"] == hung[0].rank), None)
        seen = f"; {_witness(witness)}" if witness else ""
        return Failure(
            hung[0].rank, "hung", hung[0].text + seen, witness.fault if witness else None
        )
    if faults:
        return _follow(faults[0], by_rank)
    return failures[0]


def _follow(fault: Failure, by_rank: dict[int, Failure]) -> Failure:
    """From a rank that waited to the one that nobody else explains, at most once around."""
    for _ in by_rank:
        late = (fault.fault or {}).get("late_rank", fault.rank)
        next_ = by_rank.get(late)
        if late == fault.rank or next_ is None or next_.kind != "fault":
            if late == fault.rank:
                return fault
            return Failure(late, "late", f"was late; {_witness(fault)}", fault.fault)
        fault = next_
    return fault


def _witness(failure: Failure) -> str:
    return f"rank {failure.rank} {failure.text}"
