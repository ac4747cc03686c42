"""What a stored row's figures must be: a broken one is an error, never a quiet gap.

The writer stores null for what it could not measure, so a row that holds NaN, an infinity or a
negative time was damaged or written by hand, and no verdict may rest on it.
"""

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mokbench.brief import brief
from mokbench.figures import Quantity, StepTime

if TYPE_CHECKING:
    from mokbench.record import Record

# Farther out than anything measured, in any unit here; arithmetic beyond them overflows.
LEAST, MOST = 1e-12, 1e18
# Of ranks, tokens and the like: far beyond what configs allow.
_MOST_COUNT = 1 << 31
_COUNTS = (
    "ranks",
    "nodes",
    "ranks_per_gpu",
    "hidden",
    "intermediate",
    "experts",
    "top_k",
    "attempt",
)
# A rank may have no tokens.
_COUNTS_OR_NONE = ("tokens_per_rank", "rejected_samples", "num_sms")
# Nothing takes no time, and no clock stands still: docs/metrics.md, "null, never 0".
_ABOVE_ZERO = (
    "min_step_us",
    "signal_ready_us",
    "dispatch_us",
    "combine_us",
    "peak_memory_bytes",
    "sm_clock_mhz",
    "peak_sm_clock_mhz",
    "roofline_us",
    "roofline_ratio",
    "peak_tflops",
    "link_peak_gbs",
)
_NOT_BELOW_ZERO = (
    "rank_spread_us",
    "tflops_per_gpu",
    "tokens_per_s",
    "signal_hop_us",
    "local_hop_us",
    "signal_entry_us",
    "wire_bytes",
    "useful_bytes",
    "physical_bytes",
    "link_utilization",
    "wire_utilization",
    "dispatch_link_utilization",
    "combine_link_utilization",
    "t_first_us",
    "noise",
    "rel_error",
    "nan_count",
    "timer_step_us",
    "mma_utilization",
    "elapsed_s",
    "measured_s",
    "seed",
)


def not_finite(data: Mapping[str, Any]) -> str | None:
    """Say where a parsed JSON row holds NaN or an infinity, and which; null where nowhere."""
    for key, item in data.items():
        for path, value in _numbers(key, item):
            if not math.isfinite(value):
                return f"{path} is {value}, a finite number is needed"
    return None


def implausible(record: "Record") -> str | None:
    """Say which figure of a row cannot be, with its value; null for a sound row."""
    if (step := record.step_time_us) is not None and (problem := _step_problem(step)):
        return problem
    if problem := _count_problem(record):
        return problem
    for names, problem_of in ((_ABOVE_ZERO, not_positive), (_NOT_BELOW_ZERO, _negative)):
        for name in names:
            value = getattr(record, name)
            if value is not None and (problem := problem_of(value)):
                return f"{name} is {problem}"
    return _list_problem(record)


def _count_problem(record: "Record") -> str | None:
    for names, least in ((_COUNTS, 1), (_COUNTS_OR_NONE, 0)):
        for name in names:
            value = getattr(record, name)
            if value is not None and not least <= value <= _MOST_COUNT:
                return f"{name} is {brief(value)}, {least} to {_MOST_COUNT} is needed"
    share = record.hold_expired_share
    if share is not None and not 0 <= share <= 1:
        return f"hold_expired_share is {share}, a share is 0 to 1"
    return _traffic_problem(record)


def _traffic_problem(record: "Record") -> str | None:
    """Bytes by phase that cannot be, or a split that is not the split of them."""
    traffic = record.traffic
    if traffic is None:
        return None
    for kind in ("useful", "wire"):
        phases = [f"{phase}_{kind}_bytes" for phase in ("dispatch", "combine")]
        for name in phases:
            if problem := _negative(getattr(traffic, name)):
                return f"traffic.{name} is {problem}"
        split, total = getattr(traffic, kind), sum(getattr(traffic, name) for name in phases)
        if split is None:
            continue
        crossing = split.same_domain_bytes + split.cross_domain_bytes
        if crossing != total or split.cross_node_bytes > total:
            return (
                f"traffic.{kind} is split into {crossing} bytes between ranks, "
                f"{split.cross_node_bytes} of them between nodes, and {' + '.join(phases)} is "
                f"{total}"
            )
    return None


def _list_problem(record: "Record") -> str | None:
    for i, value in enumerate(record.block_us):
        if problem := not_positive(value):
            return f"block_us[{i}] is {problem}"
    for i, count in enumerate(record.expert_counts):
        if problem := _negative(count):
            return f"expert_counts[{i}] is {problem}"
    for name, quantity in record.signal_detail.items():
        if problem := quantity_problem(name, quantity):
            return problem
    phases = [found.rank for found in record.kernel_phases]
    if phases and (len(phases) != record.ranks or phases != list(range(record.ranks))):
        return f"kernel_phases are of ranks {phases[:9]}, those of {record.ranks} ranks are needed"
    return None


def _step_problem(step: StepTime) -> str | None:
    """Times above 0, in the order that order statistics have: a digit cut off breaks it."""
    for name in ("median", "p95", "min", "ci_low", "ci_high"):
        value = getattr(step, name)
        if value is not None and (problem := not_positive(value)):
            return f"step_time_us.{name} is {problem}"
    if not 1 <= step.n <= _MOST_COUNT:
        return f"step_time_us.n is {brief(step.n)}, a median needs a sample, and none that many"
    if not step.min <= step.median <= step.p95:
        return (
            f"step_time_us.median is {step.median}, outside its own min {step.min} and "
            f"p95 {step.p95}"
        )
    low = step.median if step.ci_low is None else step.ci_low
    high = step.median if step.ci_high is None else step.ci_high
    if not low <= step.median <= high:
        return f"step_time_us.median is {step.median}, outside its own interval {low} to {high}"
    return None


def quantity_problem(name: str, quantity: Quantity) -> str | None:
    """Say which part of a signaling figure cannot be, with its value; null for a sound one."""
    for part in ("median", "p99", "ci_low", "ci_high"):
        value = getattr(quantity, part)
        if value is not None and (problem := _negative(value)):
            return f"{name}.{part} is {problem}"
    if not 1 <= quantity.n <= _MOST_COUNT:
        return f"{name}.n is {brief(quantity.n)}, 1 to {_MOST_COUNT} is needed"
    return None


def not_positive(value: float) -> str | None:
    """Say what ``value`` is where no time, size or clock can be it; null where one can."""
    # Compared, not asked of math: an integer of 400 digits fits in no float.
    if not 0 < value < math.inf:
        return f"{brief(value)}, a finite number above 0 is needed"
    if not LEAST <= value <= MOST:
        return f"{brief(value)}, a number from {LEAST:g} to {MOST:g} is needed"
    return None


def _negative(value: float) -> str | None:
    if not 0 <= value < math.inf:
        return f"{brief(value)}, a finite number that is not negative is needed"
    return None if value <= MOST else f"{brief(value)}, a number up to {MOST:g} is needed"


def _numbers(path: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, float):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(f"{path}.{key}", item)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _numbers(f"{path}[{i}]", item)
