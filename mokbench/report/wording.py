"""Every sentence a report says about its figures, so that all formats say the same."""

from collections.abc import Iterable, Sequence

from mokbench.figures import SHARED_GPU, SHARED_GPUS
from mokbench.machine import Machine
from mokbench.record import Record
from mokbench.report import clock_words, places, units
from mokbench.report.comparison import Comparison
from mokbench.report.rows import Row, Rows, Workload
from mokbench.run_meta import RunMeta
from mokbench.stats import EFFECT_FLOOR, interval_ranks

HOST = (
    "Host fabric: a check of the protocol on shared memory. It compares mok with push only, "
    "which share one matmul (mok runs four threads a rank or more, push one), and gives no "
    "performance verdict."
)
SEPARATE = "separate medians, not measured in turn"
FLOOR = f"{100 * EFFECT_FLOOR:g} %"
NO_VERDICT = "host fabric, no performance verdict"
AGAINST = "mok us / row us (95 % CI)"
AGAINST_ON_HOST = f"{AGAINST}, no verdict"
LEGEND = (
    "mok us / row us: step time of mok divided by the step time of the row it stands in (below 1: "
    "mok took less time), the median over pairs of blocks measured in turn, with its 95 % interval."
)
LEGEND_SEPARATE = (
    f"~ before a ratio: from {SEPARATE} (in another turn or run); the interval takes both rows' at "
    "their worst, and drift between them is not in it, so it gives no verdict."
)
LEGEND_SLOWDOWN = (
    "slowdown: step time at this routing divided by the same system's at balanced routing, two "
    "medians that were not measured in turn; where the interval holds 1 no slowdown is shown."
)
LEGEND_BYTES = (
    "wire: bytes of one step between ranks, summed over ranks; redundancy: wire over useful bytes, "
    "which count each (token, rank) pair once."
)


def regime(record: Record) -> str:
    """How passes followed one another: ``steady, graph``."""
    return f"{record.regime}, graph" if record.graph else record.regime


def workload(work: Workload, links: Iterable[str | None]) -> str:
    """Title of a workload: model, load, routing, ranks, dtype, link."""
    known = sorted({link for link in links if link not in (None, "none")} or {"no link"})
    parts = [
        work.model,
        tokens(work.tokens_per_rank),
        work.routing,
        units.count(work.ranks, "rank"),
        work.dtype,
        f"{work.fabric} ({', '.join(map(str, known))})",
    ]
    return ", ".join(parts + unusual(work))


def shape(work: Workload, how: str) -> str:
    """Title of what tables and charts over routings share: ``how`` is the regime."""
    parts = [work.model, units.count(work.ranks, "rank"), work.dtype, how, work.fabric]
    return ", ".join(parts + unusual(work))


def unusual(work: Workload) -> list[str]:
    """What a title says only where it is not the default: nodes, placement, pass, seed."""
    parts = [units.count(work.nodes, "node")] if work.nodes > 1 else []
    parts += [f"placement {work.placement}"] if work.placement != "contiguous" else []
    parts += [work.pass_] if work.pass_ != "forward" else []
    return parts + ([f"seed {work.seed}"] if work.seed else [])


def tokens(per_rank: int) -> str:
    """``1 token/rank``, ``128 tokens/rank``."""
    return f"{units.count(per_rank, 'token')}/rank"


def imbalance(records: Iterable[Record]) -> str | None:
    """Imbalance of a workload, from the first row that has it."""
    found = next((r.imbalance for r in records if r.imbalance is not None), None)
    if found is None:
        return None
    empty = found.empty_experts
    return (
        f"max/mean: expert {units.quotient(found.expert_max_over_mean)}, "
        f"rank {units.quotient(found.rank_max_over_mean)}, "
        f"pair {units.quotient(found.pair_max_over_mean)}; "
        f"cv {units.quotient(found.cv)}, Gini {units.quotient(found.gini)}, empty "
        + (units.NOTHING if empty is None else f"{100 * empty:.0f} %")
    )


def marks(records: Sequence[Record], machine: Machine) -> list[str]:
    """Collect what must be said wherever these rows are shown."""
    said = []
    crowded: dict[str, list[int]] = {}
    for record in sorted(records, key=lambda r: r.ranks):
        if record.oversubscribed and record.ranks not in crowded.setdefault(record.system, []):
            crowded[record.system].append(record.ranks)
    systems_of: dict[str, list[str]] = {}
    for system, counts in crowded.items():
        ranks = ", ".join(map(str, counts)) + (" rank" if counts == [1] else " ranks")
        systems_of.setdefault(ranks, []).append(system)
    if systems_of:
        who = "; ".join(f"{', '.join(names)} with {ranks}" for ranks, names in systems_of.items())
        cores = units.count(machine.usable_cores, "core")
        said.append(f"oversubscribed host, more busy threads than its {cores}: {who}")
    said += dict.fromkeys(sharing(r) for r in records if shares_gpu(r))
    return said


def shares_gpu(record: Record) -> bool:
    """Whether ranks of this row ran on one GPU, whose memory then was the link among them."""
    return record.ranks_per_gpu is not None and record.ranks_per_gpu > 1


def sharing(record: Record) -> str:
    """What that means for its ratios: all ranks on one GPU, or several GPUs that each have some."""
    return SHARED_GPUS if record.link in ("nvlink", "pcie") else SHARED_GPU


def sentence(found: Comparison, name_runs: bool = False) -> str:
    """One sentence for one comparison; a verdict only where in-turn blocks support it.

    ``name_runs``: say which run each of the two is from.
    """
    mok, other = found.mok.record, found.other.record
    one_run = found.mok.run == found.other.run
    names = [
        row.record.name + (f" of {row.run}" if name_runs and not one_run else "")
        for row in (found.mok, found.other)
    ]
    if mok.fabric == "host":
        text = f"{names[0]} took {_ratio(found)} of the step time of {names[1]}"
    else:
        text = f"{_verdict(found, *names)}: {_ratio(found)} of the step time of {names[1]}"
    if mok.fabric != "host" and other.dispatch_us is not None and other.combine_us is not None:
        text += (
            f", which spends {units.number(other.dispatch_us)} us in dispatch and "
            f"{units.number(other.combine_us)} us in combine"
        )
    if clock := clock_words.beside(found):
        text += f"; {clock}"
    if shares_gpu(mok):
        text += f"; {sharing(mok)}"
    where = f"{found.mok.run}, " if name_runs and one_run else ""
    first = "no performance verdict; " if mok.fabric == "host" else ""
    return f"{first}{where}{regime(mok)}: {text}."


def reference(ratios: Iterable[Comparison | None], shown: Sequence[Row]) -> str | None:
    """Which mok the ratio column divides, where the table leaves room for doubt."""
    used = dict.fromkeys(found.mok.record.name for found in ratios if found is not None)
    moks = {row.record.name for row in shown if row.record.system == "mok"}
    if not used or (len(moks) == 1 and list(used) == ["mok"]):
        return None
    which = " or ".join(name if name != "mok" else "mok with default options" for name in used)
    return f"mok us / row us: mok is {which}; the sentences below have every mok"


def _ratio(found: Comparison) -> str:
    """Ratio, its interval, and what both rest on."""
    ratio = found.ratio
    interval = f" ({units.quotient(ratio.low)}-{units.quotient(ratio.high)})"
    if found.basis == "separate":
        return units.quotient(ratio.value) + interval * (ratio.low is not None) + f" [{SEPARATE}]"
    if ratio.low is None:
        needed = next(n for n in range(1, 100) if interval_ranks(n))
        pairs = units.count(ratio.n, "block pair")
        return f"{units.quotient(ratio.value)} [{pairs}; an interval needs {needed}]"
    return units.quotient(ratio.value) + interval


def supports_verdict(found: Comparison) -> bool:
    """Whether the rows were measured in turn, in enough blocks for an interval."""
    return found.basis == "turn" and found.ratio.low is not None


def _verdict(found: Comparison, mok: str, other: str) -> str:
    ratio = found.ratio
    if not supports_verdict(found):
        return f"too little for a verdict on {mok} and {other}"
    if ratio.is_resolved:
        return f"{mok} is {'faster' if ratio.value < 1.0 else 'slower'}"
    if ratio.excludes_one:
        return f"{mok} and {other} differ by less than {FLOOR}"
    return f"no difference shown between {mok} and {other}"


def machine(found: Machine) -> str:
    """One line on the machine."""
    parts = []
    if found.gpus:
        parts += [f"{found.gpus} x {found.gpu}", f"driver {found.driver}"]
        parts += [f"topology {found.topology}"] if found.topology else []
    parts += [
        f"{found.cpu}, {units.count(found.cores, 'core')} ({found.usable_cores} usable)",
        units.size(found.memory_bytes),
        f"virtualization {found.virtualization}",
    ]
    versions = {"CUDA": found.cuda, "torch": found.torch, "NCCL": found.nccl}
    parts += [
        f"{name} {text}" for name, text in {**versions, "DeepEP": found.deep_ep}.items() if text
    ]
    return f"{'; '.join(parts)}; machine key {found.key}"


def runs(rows: Rows) -> list[str]:
    """One line per run: its config, when, how it ended, rows of each kind; and where ranks were."""
    lines = []
    for name, meta in rows.runs:
        own = [row for row in rows.rows if row.run == name]
        tally = ", ".join(
            f"{sum(row.record.status == status for row in own)} {status}"
            for status in ("ok", "unsupported", "failed")
        )
        about = f"config {meta.name}, {meta.created}, {meta.status}, {code(meta)}"
        lines += [f"{name}: {about}; rows: {tally}", *places.lines(name, meta)]
    return lines


def code(meta: RunMeta) -> str:
    """Which mokbench measured a run; several where it was resumed with another one."""
    if meta.code:
        return "; then ".join(map(str, meta.code))
    return "by an older mokbench that did not store its version"


def unsettled(rows: Sequence[Row]) -> str | None:
    """How many rows stopped before their noise target, so that nobody reads them as settled."""
    measured = [row.record for row in rows if row.record.step_time_us is not None]
    early = [r for r in measured if r.stop_reason in ("time", "stable")]
    if not early:
        return None
    worst = max((r.noise for r in early if r.noise is not None), default=None)
    noise = "" if worst is None else f"; the worst has noise {100 * worst:.1f} %"
    return (
        f"{len(early)} of {units.count(len(measured), 'measured row')} stopped above the noise "
        f"target ({sum(r.stop_reason == 'time' for r in early)} at the time limit){noise}."
    )
