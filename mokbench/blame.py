"""Which rank is at fault when several report trouble: the one that explains the others."""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Failure:
    """How one rank failed. ``kind``: died, error, fault (a wait expired), peer, hung.

    Not ``certain``: it is one of several that ``text`` names, and nobody knows which.
    """

    rank: int
    kind: str
    text: str
    fault: dict[str, Any] | None = None
    certain: bool = True


def collective_bound_s(wait_bound_s: float) -> float:
    """Seconds after which a rank gives up on a collective, and so tells that it was not the cause.

    Far above what ranks of a healthy run are apart, of which the wait bound says little.
    """
    return max(10.0, 2 * wait_bound_s)


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
        return _silent(hung, faults)
    if faults:
        return _follow(faults[0], by_rank)
    return failures[0]


def _silent(hung: list[Failure], faults: list[Failure]) -> Failure:
    """The silent rank that another waited for; of several without a witness nobody is accused.

    A silent rank may as well be a victim: in a collective it says nothing until its bound.
    """
    by_rank = {failure.rank: failure for failure in hung}
    for witness in faults:
        late = by_rank.get((witness.fault or {})["late_rank"])
        if late is not None:
            return replace(late, text=f"{late.text}; {_witness(witness)}", fault=witness.fault)
    if len(hung) == 1:
        return hung[0]
    text = f"{hung[0].text}; which of them the others waited for is unknown"
    return replace(hung[0], text=text, certain=False)


def _follow(fault: Failure, by_rank: dict[int, Failure]) -> Failure:
    """From a rank that waited to the one that nobody else explains.

    Where ranks name one another, the one that waited longest is believed: a rank that slept and
    woke up finds its peer's fault at once, and names the peer.
    """
    seen = {fault.rank: fault}
    while True:
        late = _late_rank(fault)
        if late == fault.rank:
            return fault
        next_ = by_rank.get(late)
        if next_ is None or next_.kind != "fault":
            return _late(fault)
        if late in seen:
            return _late(
                max(seen.values(), key=lambda each: (each.fault or {}).get("waited_s", 0.0))
            )
        seen[late] = fault = next_


def _late_rank(fault: Failure) -> int:
    return int((fault.fault or {}).get("late_rank", fault.rank))


def _late(witness: Failure) -> Failure:
    """The rank that ``witness`` waited for in vain."""
    return Failure(_late_rank(witness), "late", f"was late; {_witness(witness)}", witness.fault)


def _witness(failure: Failure) -> str:
    return f"rank {failure.rank} {failure.text}"
