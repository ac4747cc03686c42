"""Who is fastest where, by how much, and what the figures say about why."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from mokbench.clocks import apart
from mokbench.record import Record
from mokbench.report import clock_words, units, wording
from mokbench.report.comparison import Comparison, compare, may_compare
from mokbench.report.rows import Row, Rows, Workload
from mokbench.tolerances import tolerance
from mokbench.workload import Dtype

_MOST_REASONS = 4
NO_MOK = "No row of mok was measured: the others are compared with one another."
Outcome = Literal["faster", "open", "alone"]


@dataclass(frozen=True)
class Win:
    """The fastest row of a workload, regime and link, and the next one.

    ``outcome``: ``faster`` where it is faster than each other row by the effect floor or more, and
    the interval of rows in one turn excludes 1; ``open`` where one of them is not shown to be
    slower, ``alone`` without a second row. ``behind`` compares every other row
    with the fastest (other over fastest), the next one first; ``why`` is about the last of them.
    """

    work: Workload
    fastest: Row
    outcome: Outcome
    behind: tuple[Comparison, ...] = ()
    why: str = ""


def wins(rows: Rows) -> list[Win]:
    """One for each set of rows that compare with one another; none of the host fabric."""
    return [win for group in rows.by_workload().values() for win in _wins(group)]


def _wins(group: Sequence[Row]) -> Iterator[Win]:
    """Rows of a workload fall into sets by run, regime, graph and how they share GPUs."""
    sets: dict[tuple[object, ...], list[Row]] = {}
    for row in group:
        record = row.record
        if record.step_time_us is not None and record.fabric != "host" and not wrong(record):
            key = (row.run, record.regime, record.graph, record.ranks_per_gpu)
            sets.setdefault(key, []).append(row)
    for members in sets.values():
        yield _win(sorted(members, key=_median))


def wrong(record: Record) -> str | None:
    """Say how an ok row's output is wrong by its own figures; the oracle lets none such pass."""
    if record.status != "ok" or record.dtype not in list(Dtype):
        return None
    if record.nan_count:
        return f"{units.count(record.nan_count, 'NaN')} in its output"
    allowed = tolerance(Dtype(record.dtype), "fp8" if "fp8" in record.variant else None)
    if record.rel_error is not None and record.rel_error > allowed:
        return f"relative error {record.rel_error:.3g}, allowed {allowed:.3g}"
    return None


def _win(ordered: Sequence[Row]) -> Win:
    best = ordered[0]
    work = Workload.of(best.record)
    others = (row for row in ordered[1:] if may_compare(best.record, row.record))
    behind = tuple(pair for row in others if (pair := compare(row, best)) is not None)
    if not behind:
        return Win(work, best, "alone")
    why = reason(best.record, behind[-1].mok.record)
    return Win(work, best, "faster" if all(map(_sure, behind)) else "open", behind, why)


def _sure(pair: Comparison) -> bool:
    return pair.basis == "turn" and pair.ratio.is_resolved and pair.ratio.value > 1.0


def reason(fast: Record, slow: Record) -> str:
    """What the rows' own figures say about their difference; empty where they say nothing."""
    found = []
    a, b = _moving(fast), _moving(slow)
    if b is not None and a is None:
        found.append(
            f"{slow.name} spends {units.number(b)} us in dispatch + combine, which {fast.name} "
            f"{'does not have' if fast.ranks == 1 else 'does not have apart'}"
        )
    elif a is not None and b is not None:
        found.append(
            f"dispatch + combine: {slow.name} {units.number(b)} us, {fast.name} {units.number(a)}"
        )
    # Of rows at two clocks the rest is not known to be the systems'.
    if a is not None and b is not None and not apart(fast.sm_clock_mhz, slow.sm_clock_mhz):
        rest_a, rest_b = _median_of(fast) - a, _median_of(slow) - b
        found.append(
            f"the rest: {slow.name} {units.number(rest_b)} us, {fast.name} {units.number(rest_a)}"
        )
    if fast.redundancy and slow.redundancy and abs(fast.redundancy / slow.redundancy - 1) > 0.05:
        found.append(
            f"bytes moved over useful bytes: {slow.name} {units.quotient(slow.redundancy)}, "
            f"{fast.name} {units.quotient(fast.redundancy)}"
        )
    return "; ".join(found)


def sentences(rows: Rows, found: Sequence[Win]) -> list[str]:
    """The verdict from ``wins``: a line for each model, ranks, link and regime; marks included."""
    groups: dict[tuple[str, str, str], list[Win]] = {}
    for win in found:
        record = win.fastest.record
        link = record.link or "no link"
        where = f"{units.count(record.ranks, 'rank')} ({'no link' if link == 'none' else link})"
        groups.setdefault((record.model, where, wording.regime(record)), []).append(win)
    lines = [_sentence(key, own, rows) for key, own in groups.items()] + _largest(groups)
    if any(row.record.fabric == "host" for row in rows.rows):
        lines.append(wording.HOST)
    if not lines:
        lines.append("No row was measured; the reasons are below.")
    elif not any(row.record.system == "mok" for row in rows.with_status("ok")):
        # First: who reads on takes the fastest of the others for an answer about mok.
        lines.insert(0, NO_MOK)
    lines += [
        f"Not counted: {row.record.id} of {row.run} has {why}: it is ok and wrong."
        for row in rows.rows
        if (why := wrong(row.record))
    ][:_MOST_REASONS]
    return lines + [_missing(*item) for item in _reasons(rows).most_common(_MOST_REASONS)]


def _largest(groups: dict[tuple[str, str, str], list[Win]]) -> list[str]:
    """One line on the largest difference that was shown, and why."""
    pairs = [(p, w) for found in groups.values() for w in found for p in w.behind if _sure(p)]
    if not pairs:
        return []
    pair, win = max(pairs, key=lambda item: item[0].ratio.value)
    slow, fast = pair.mok.record, pair.other.record
    why = "; ".join(filter(None, [clock_words.beside(pair), reason(fast, slow)]))
    return [
        f"Largest difference: {wording.workload(win.work, [fast.link])}, {wording.regime(fast)}: "
        f"{slow.name} takes {units.ratio(pair.ratio)} times as long as {fast.name}"
        + (f"; {why}" if why else "")
        + "".join(f" ({wording.sharing(fast)})" for _ in range(wording.shares_gpu(fast)))
        + "."
    ]


def _sentence(key: tuple[str, str, str], found: Sequence[Win], rows: Rows) -> str:
    where = ", ".join(key)
    parts = []
    fastest = [win.fastest.record.name for win in found if win.outcome == "faster"]
    for name, count in Counter(fastest).most_common():
        parts.append(f"{name} is fastest in {count} of {units.count(len(found), 'workload')}")
    unsettled = [win for win in found if win.outcome == "open"]
    if unsettled:
        parts += _unsettled(unsettled)
    slower: dict[str, list[Comparison]] = {}
    for pair in (pair for win in found for pair in win.behind if _sure(pair)):
        slower.setdefault(pair.mok.record.name, []).append(pair)
    for name, behind in slower.items():
        ratios = [pair.ratio.value for pair in behind]
        span = " to ".join(dict.fromkeys(map(units.quotient, (min(ratios), max(ratios)))))
        clock = clock_words.span(behind)
        parts.append(
            f"{name} takes {span} times the least step time in {len(ratios)}"
            + (f" [{clock}]" if clock else "")
        )
    alone = [win for win in found if win.outcome == "alone"]
    if alone:
        names = ", ".join(dict.fromkeys(win.fastest.record.name for win in alone))
        parts.append(f"{len(alone)} with {names} alone, nothing to compare with")
    marks = wording.marks([win.fastest.record for win in found], rows.machine)
    return f"{where}: {'; '.join(parts)}." + "".join(f" ({mark})" for mark in marks)


def _unsettled(found: Sequence[Win]) -> list[str]:
    """Medians of two turns may be far apart: that is too little, and not "no difference"."""
    parts = []
    for enough, what in (
        (True, f"no difference of {wording.FLOOR} or more shown"),
        (False, "too little for a verdict"),
    ):
        open_ = [
            (number, win.fastest.record.name, pair)
            for number, win in enumerate(found)
            for pair in win.behind
            if not _sure(pair) and wording.supports_verdict(pair) == enough
        ]
        if open_:
            names = dict.fromkeys(
                " and ".join(sorted((name, pair.mok.record.name))) for _, name, pair in open_
            )
            clock = clock_words.span([pair for *_, pair in open_])
            parts.append(
                f"{what} in {len({number for number, *_ in open_})} between {', '.join(names)}"
                + (f" [{clock}]" if clock else "")
            )
    return parts


def _reasons(rows: Rows) -> Counter[tuple[str, str, str]]:
    return Counter(
        (row.record.system, row.record.status, row.record.reason or "")
        for row in rows.rows
        if row.record.status != "ok"
    )


def _missing(what: tuple[str, str, str], count: int) -> str:
    system, status, why = what
    return f"Not measured: {units.count(count, 'row')} of {system}, {status}: {why}"


def _moving(record: Record) -> float | None:
    if record.dispatch_us is None or record.combine_us is None:
        return None
    return record.dispatch_us + record.combine_us


def _median(row: Row) -> float:
    return _median_of(row.record)


def _median_of(record: Record) -> float:
    return record.step_time_us.median if record.step_time_us is not None else float("inf")
