"""One row of a run: everything that is known about one cell, under the report contract's names.

Names are a contract: add, never rename. Adding a field raises ``RECORD_VERSION``, and older records
stay readable; changing what a figure means raises ``METHOD_VERSION``, and rows of different method
versions are never compared.
"""

import contextlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, ValidationError, ValidationInfo, model_validator

from mokbench.brief import brief
from mokbench.cell_digest import cell_digest
from mokbench.errors import ResultsError
from mokbench.figures import (
    Fabric,
    Failure,
    Figures,
    Imbalance,
    Link,
    Quantity,
    RankPhases,
    Status,
    StepTime,
    Traffic,
    finite,
    first_problem,
    once,
)
from mokbench.moment import Moment
from mokbench.row_checks import implausible, not_finite

if TYPE_CHECKING:
    from mokbench.workload import Cell

RECORD_VERSION = 5
_OLDEST_RECORD_VERSION = 1
METHOD_VERSION = 2  # since 2 nothing runs behind a pass or phase until all ranks ended it

# What only a measured row may carry: a failed or unsupported row has no performance.
PERFORMANCE = (
    "step_time_us",
    "rank_spread_us",
    "tflops_per_gpu",
    "roofline_us",
    "roofline_ratio",
    "tokens_per_s",
    "signal_hop_us",
    "local_hop_us",
    "signal_entry_us",
    "signal_ready_us",
    "min_step_us",
    "dispatch_us",
    "combine_us",
    "physical_bytes",
    "link_utilization",
    "wire_utilization",
    "dispatch_link_utilization",
    "combine_link_utilization",
    "stop_reason",
    "t_first_us",
    "block_us",
    "noise",
    "signal_detail",
    "hold_expired_share",
    "mma_utilization",
    "kernel_phases",
)


class Record(Figures):
    """One cell's row. Null means: does not apply or could not be read; reason or notes say why.

    A ``failed`` or ``unsupported`` row has a reason and no performance figure. Values that are
    not finite are stored as null with a note.
    """

    record_version: int = RECORD_VERSION
    id: str = Field(pattern=r"^[^\s./][^\s/\x00-\x1f]*$", max_length=500)
    system: str
    status: Status
    reason: str | None = None
    fabric: Fabric
    variant: str = ""
    link: Link | None = None
    ranks: int = Field(ge=1)
    nodes: int = Field(1, ge=1)
    ranks_per_gpu: int | None = None
    model: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    tokens_per_rank: int
    dtype: str
    routing: str
    pass_: Literal["forward", "train"] = Field("forward", alias="pass")
    regime: Literal["isolated", "steady"]
    graph: bool = False
    step_time_us: StepTime | None = None
    rank_spread_us: float | None = None
    tflops_per_gpu: float | None = None
    peak_tflops: float | None = None
    roofline_us: float | None = None
    roofline_ratio: float | None = None
    tokens_per_s: float | None = None
    signal_hop_us: float | None = None
    local_hop_us: float | None = None
    signal_entry_us: float | None = None
    signal_ready_us: float | None = None
    min_step_us: float | None = None
    dispatch_us: float | None = None
    combine_us: float | None = None
    wire_bytes: int | None = None
    useful_bytes: int | None = None
    physical_bytes: int | None = None
    link_utilization: float | None = None
    wire_utilization: float | None = None
    link_peak_gbs: float | None = None
    num_sms: int | None = None
    placement: str = "contiguous"
    l2_state: str | None = None
    stop_reason: str | None = None
    rejected_samples: int | None = None
    t_first_us: float | None = None
    notes: list[str] = Field(default_factory=list)
    imbalance: Imbalance | None = None
    rel_error: float | None = None
    nan_count: int | None = None
    bitwise_repeat: bool | None = None
    sm_clock_mhz: float | None = None
    peak_memory_bytes: int | None = None
    # Beyond the contract's list. Rows measured in turn share ``turn``, and block i of one ran
    # next to block i of the others; a block's value is the median of its iterations.
    attempt: int = 1
    turn: str | None = None
    block_us: list[float] = Field(default_factory=list)
    noise: float | None = None
    oversubscribed: bool = False
    seed: int = 0
    traffic: Traffic | None = None
    dispatch_link_utilization: float | None = None
    combine_link_utilization: float | None = None
    signal_detail: dict[str, Quantity] = Field(default_factory=dict)
    timer_step_us: float | None = None
    expert_counts: list[int] = Field(
        default_factory=list
    )  # routed rows of each expert, in expert order
    routing_digest: str | None = None
    cell_digest: str | None = None
    samples_file: str | None = None
    # Of samples whose pass was not yet queued when it began, see docs/measuring-on-a-gpu.md.
    hold_expired_share: float | None = None
    mma_utilization: float | None = None
    peak_sm_clock_mhz: float | None = None
    # By rank, of the last pass; empty where the system did not stamp its phases.
    kernel_phases: list[RankPhases] = Field(default_factory=list)
    error: Failure | None = None
    started: Moment | None = None
    elapsed_s: float | None = None
    measured_s: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _store_finite_only(cls, data: Any, info: ValidationInfo) -> Any:
        if info.mode == "json" or not isinstance(data, Mapping):
            return data
        notes: list[str] = list(data.get("notes") or [])
        clean = {str(key): finite(value, str(key), notes) for key, value in data.items()}
        step = clean.get("step_time_us")
        if isinstance(step, dict) and None in [step.get(key) for key in ("median", "p95", "min")]:
            clean["step_time_us"] = None
        detail = clean.get("signal_detail")
        if isinstance(detail, dict):
            keep = {k: q for k, q in detail.items() if None not in (q.get("median"), q.get("p99"))}
            clean["signal_detail"] = keep
        return {**clean, "notes": notes}

    @model_validator(mode="after")
    def _no_performance_without_success(self) -> Self:
        if self.status == "ok":
            return self
        if not self.reason:
            raise ValueError(f"a row with status {self.status} needs a reason")
        given = [name for name in PERFORMANCE if getattr(self, name) not in (None, [], {})]
        if given:
            raise ValueError(
                f"a row with status {self.status} may not carry performance figures: "
                + ", ".join(given)
            )
        return self

    @property
    def redundancy(self) -> float | None:
        """Wire bytes over useful bytes; null where nothing crosses ranks."""
        if not self.useful_bytes or self.wire_bytes is None:
            return None
        return self.wire_bytes / self.useful_bytes

    @property
    def name(self) -> str:
        """System with its variant, as reports show it: ``mok (block_m=32)``."""
        return f"{self.system} ({self.variant})" if self.variant else self.system

    @classmethod
    def from_cell(
        cls, cell: "Cell", *, status: Status, reason: str | None = None, **fields: Any
    ) -> Self:
        """Row of ``cell``: its identity and shape are filled in, ``fields`` give the rest.

        Raises pydantic.ValidationError for an unknown field, a missing reason, or a performance
        figure on a row that is not ok.
        """
        work = cell.workload
        identity: dict[str, Any] = {
            "id": cell.id,
            "system": cell.system,
            "fabric": cell.fabric,
            "variant": cell.variant,
            "ranks": work.ranks,
            "nodes": work.nodes,
            "model": work.model.name,
            "hidden": work.model.hidden,
            "intermediate": work.model.intermediate,
            "experts": work.model.experts,
            "top_k": work.model.top_k,
            "tokens_per_rank": work.tokens_per_rank,
            "dtype": str(work.dtype),
            "routing": work.routing.label,
            "regime": str(cell.regime),
            "graph": cell.graph,
            "placement": work.placement_label,
            "seed": work.seed,
            "cell_digest": cell_digest(cell),
        }
        return cls.model_validate({**identity, "status": status, "reason": reason, **fields})

    def to_json(self) -> str:
        """One line of JSON, finite numbers only, under the contract's names."""
        return self.model_dump_json(by_alias=True)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form under the contract's names."""
        return self.model_dump(mode="json", by_alias=True)


def parse_record(where: str, line: bytes) -> Record:
    """Read one stored line; ``where`` (file:line) goes into the ResultsError for a bad one.

    Bad is also a figure that nothing can have measured: NaN, infinite, negative, out of order.
    """
    try:
        record = _parse(where, line)
    except (ValueError, RecursionError) as error:
        raise ResultsError(
            f"{where}: not a row: {first_problem(error)}; repair or delete this line, "
            "then --resume measures its cell again"
        ) from error
    if problem := implausible(record):
        raise _broken(where, record.id, problem)
    return record


def _parse(where: str, line: bytes) -> Record:
    # Four times as fast as the careful way below, which finds the words for what is wrong.
    if b"NaN" not in line and b"Infinity" not in line:
        with contextlib.suppress(ValidationError):
            record = Record.model_validate_json(line, strict=True)
            # A line that is what would be written again holds no name twice, nor an odd number.
            if record.record_version == RECORD_VERSION and record.to_json().encode() == line:
                return record
    data = json.loads(line, object_pairs_hook=once)
    check_version(where, data)
    if problem := not_finite(data):
        raise _broken(where, data.get("id"), problem)
    return Record.model_validate_json(line, strict=True)


def _broken(where: str, row: object, problem: str) -> ResultsError:
    return ResultsError(
        f"{where}: {row}: {problem}; nothing is said from a broken row: repair or delete this "
        "line, then --resume measures its cell again"
    )


def check_version(where: str, data: Any) -> None:
    """Refuse what another mokbench wrote in a form this one does not know (ResultsError)."""
    if not isinstance(data, dict):
        raise ValueError(f"found a {type(data).__name__}, a JSON object is needed")
    found = data.get("record_version")
    if isinstance(found, int) and not _OLDEST_RECORD_VERSION <= found <= RECORD_VERSION:
        age = "a newer" if found > RECORD_VERSION else "an older"
        raise ResultsError(
            f"{where}: written by {age} mokbench (record_version {brief(found)}, this one reads "
            f"{_OLDEST_RECORD_VERSION} to {RECORD_VERSION}); use that version to read it, or "
            "measure again"
        )
