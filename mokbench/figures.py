"""The figures that rows carry, and the rule that only finite numbers are stored."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

# What every row, table, chart and verdict of ranks that share a GPU has to say.
SHARED_GPU = "ranks share one GPU; ratios do not predict NVLink"
# More ranks than GPUs, of which there are several.
SHARED_GPUS = "ranks share GPUs, a part crosses no link; ratios do not predict one GPU per rank"

_AS_NULL = ": stored as null"

Status = Literal["ok", "unsupported", "failed"]
Fabric = Literal["host", "cuda"]
Link = Literal["none", "shm", "tcp", "hbm", "pcie", "nvlink", "mnnvl", "rdma"]
# Of a fused kernel, in the order of a pass.
PhaseName = Literal["stage", "entry", "schedule", "dispatch", "gemm1", "gemm2", "combine", "sum"]


# Farther out than anything that one step moves; arithmetic on more overflows.
_Bytes = Annotated[int, Field(ge=0, le=10**18)]


class Figures(BaseModel):
    """Base of all stored objects: unknown names are errors, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class StepTime(Figures):
    """Step time in us over ``n`` iterations, each the maximum over ranks; 95 % interval or null."""

    median: float
    p95: float
    min: float
    ci_low: float | None
    ci_high: float | None
    n: int


class Imbalance(Figures):
    """How uneven the routed rows are; ``empty_experts`` is a share, 1 is perfect for the ratios."""

    expert_max_over_mean: float | None
    rank_max_over_mean: float | None
    pair_max_over_mean: float | None
    cv: float | None
    gini: float | None
    empty_experts: float | None


class Quantity(Figures):
    """One signaling figure in us over ``n`` rounds; the interval is that of the median."""

    median: float
    p99: float
    ci_low: float | None
    ci_high: float | None
    n: int


class TrafficSplit(Figures):
    """Bytes of one step by how far they go; the first three are all bytes, each once.

    Local ones stay on their rank. ``cross_node_bytes`` are those of the same-domain and
    cross-domain bytes that go between nodes.
    """

    local_bytes: _Bytes
    same_domain_bytes: _Bytes
    cross_domain_bytes: _Bytes
    cross_node_bytes: _Bytes


class Traffic(Figures):
    """Off-rank bytes of one step by phase, summed over ranks: useful once per (token, rank).

    ``useful`` and ``wire`` are dispatch and combine together, with what stays on its rank;
    ``domains`` are the NVLink domains of the ranks. Null in rows of an older mokbench.
    """

    dispatch_useful_bytes: int
    dispatch_wire_bytes: int
    combine_useful_bytes: int
    combine_wire_bytes: int
    useful: TrafficSplit | None = None
    wire: TrafficSplit | None = None
    domains: int | None = Field(None, ge=1, le=1 << 31)


class Failure(Figures):
    """Why a row failed: the rank at fault, the kind of failure and the protocol's fault record."""

    rank: int | None = None
    kind: str
    text: str
    fault: dict[str, Any] | None = None


# No kernel runs for as long as a year.
_PhaseUs = Annotated[float, Field(ge=0, le=3.2e13, allow_inf_nan=False)]


class PhaseSpan(Figures):
    """A phase of one rank in us, from the begin of its first CTA to the end of its last."""

    name: PhaseName
    begin_us: _PhaseUs
    end_us: _PhaseUs

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.end_us < self.begin_us:
            raise ValueError(f"{self.name} ends at {self.end_us}, before {self.begin_us}")
        return self


class RankPhases(Figures):
    """Phases inside of the kernel that was one rank's last pass, as its CTAs stamped them.

    Zero is the earliest begin of a CTA among the ranks with the same ``clock``, a number that ranks
    of one GPU share; times of different clocks cannot be held against one another. A phase that no
    CTA had is not there. ``waited_us`` is what a CTA waited for rows in all, the median and the
    largest over ``num_ctas`` CTAs.
    """

    rank: int = Field(ge=0, le=1 << 31)
    clock: int = Field(ge=0, le=1 << 31)
    num_ctas: int = Field(ge=1, le=1 << 31)
    spans: list[PhaseSpan]
    waited_us_median: _PhaseUs
    waited_us_max: _PhaseUs

    @model_validator(mode="after")
    def _sound(self) -> Self:
        names = [span.name for span in self.spans]
        if len(set(names)) < len(names):
            raise ValueError(f"rank {self.rank} has a phase twice: {', '.join(names)}")
        if self.waited_us_median > self.waited_us_max:
            raise ValueError(f"waited_us_median is above waited_us_max, {self.waited_us_max}")
        return self


class SignalPoint(Figures):
    """Signaling among ``ranks`` ranks; quantities are keyed ``signal_ready_us.pull`` and so on.

    ``crowded`` names those whose threads (two a rank for "ready") were more than the cores even
    where the ranks were not, so that a thread may have waited for its turn on a core.
    """

    ranks: int = Field(ge=1, le=1 << 31)
    fabric: Fabric
    link: Link
    oversubscribed: bool = False
    crowded: list[str] = []
    quantities: dict[str, Quantity]


def finite(value: Any, path: str, notes: list[str]) -> Any:
    """Plain Python form of ``value``; nan and infinities become null, each with a note.

    A list that holds one becomes empty: a null inside would shift what its neighbours mean.
    """
    if isinstance(value, BaseModel):
        value = value.model_dump()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    elif isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        notes.append(f"{path} was {value}{_AS_NULL}")
        return None
    if isinstance(value, Mapping):
        return {str(key): finite(item, f"{path}.{key}", notes) for key, item in value.items()}
    if isinstance(value, list | tuple):
        if all(type(item) in (int, str) for item in value):
            return list(value)
        before = len(notes)
        items = [finite(item, f"{path}[{i}]", notes) for i, item in enumerate(value)]
        return [] if len(notes) > before else items
    return value


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object (object_pairs_hook); ValueError where a name stands in it twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)} stands in it twice")
    return found


def was_not_finite(notes: Iterable[str], name: str) -> str | None:
    """Find the note that ``finite`` left about the figure ``name``, or about a part of it."""
    starts = (f"{name} was ", f"{name}.", f"{name}[")
    return next((n for n in notes if n.startswith(starts) and n.endswith(_AS_NULL)), None)


def first_problem(error: Exception) -> str:
    """Put an error that may have many lines into one."""
    if isinstance(error, ValidationError):
        problem = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, problem['loc'])) or 'row'}: {problem['msg']}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__
