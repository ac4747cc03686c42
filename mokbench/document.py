"""The grammar of a config file: one pydantic model a section, the source of the JSON schema."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from mokbench.cluster import Cluster
from mokbench.placement import Placement, PlacementEntry
from mokbench.quantity import PERCENT, WHOLE, FileSafeName, Seconds, Share, Switch, allowed, percent
from mokbench.routing_spec import RoutingSpec
from mokbench.section import Many, Section
from mokbench.shapes import ModelEntry, user_path
from mokbench.system_choice import SystemChoice, SystemName
from mokbench.workload import Dtype, Regime

_ROUTING_SHARES = ("masked", "uneven", "hot_expert")


def _read_percents(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: percent(v) if k in _ROUTING_SHARES else v for k, v in value.items()}
    return value


def _find_trace(spec: RoutingSpec, info: ValidationInfo) -> RoutingSpec:
    """Make the path absolute; in the config it is relative to the config's folder."""
    if spec.trace is None:
        return spec
    path = user_path((info.context or {}).get("folder", Path()), spec.trace)
    try:
        if not path.is_file():
            raise ValueError(
                f"no trace file {path}; allowed: an npz of top-k ids, relative to the config"
            )
        return spec.model_copy(update={"trace": str(path.resolve())})
    except OSError as error:
        raise ValueError(f"trace {spec.trace!r}: {error.strerror}") from None


Ranks = Annotated[int, Field(ge=1, le=1024), WHOLE]
Tokens = Annotated[int, Field(ge=0, le=1 << 20), WHOLE]
Seed = Annotated[int, Field(ge=0, lt=1 << 32), WHOLE]
Blocks = Annotated[int, Field(ge=1, le=10_000), WHOLE]
Passes = Annotated[int, Field(ge=0, le=10_000), WHOLE]
PlacedEntry = Annotated[Placement, PlacementEntry()]
RoutingEntry = Annotated[RoutingSpec, BeforeValidator(_read_percents), AfterValidator(_find_trace)]

REQUIRED_AXES = ("ranks", "model", "tokens_per_rank")
# Slowest first: what restarts ranks, then what rebuilds weights, then what changes the inputs.
AXES = ("ranks", "model", "dtype", "seed", "placement", "tokens_per_rank", "routing")


class _Axes(Section):
    """Every axis but the model, whose meaning differs between sweep and exclude."""

    ranks: Many[Ranks] = Field(
        (), description="ranks (processes, one a GPU where there are enough)"
    )
    tokens_per_rank: Many[Tokens] = Field((), description="tokens of each rank")
    dtype: Many[Dtype] = Field((), description="type of x, weights and y; default bf16")
    routing: Many[RoutingEntry] = Field((), description="who sends where; default balanced")
    placement: Many[PlacedEntry] = Field((), description="experts to ranks; default contiguous")
    seed: Many[Seed] = Field((), description="seed of tokens, weights and routing; default 0")


class Axes(_Axes):
    """Values of the workload's axes; a single value needs no list."""

    model: Many[ModelEntry] = Field((), description="published name, sizes, or config.json path")


class Include(Axes):
    """Cells beyond the product; axes it does not name keep the sweep's values."""

    system: Many[SystemName] = Field((), description="only these systems; default all")


class Exclude(_Axes):
    """Cells to leave out: those that match every key given here."""

    model: Many[str] = Field((), description="names of models")
    system: Many[SystemName] = Field((), description="names of systems")
    regime: Many[Regime] = Field((), description="isolated or steady")
    graph: Many[Switch] = Field((), description="with or without CUDA graph")

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if not self.model_fields_set:
            raise ValueError("found an empty mapping, which matches all; allowed: what to match")
        return self


class Sweep(Axes):
    """Product of all axes, minus exclude, plus include."""

    zip: Many[Axes] = Field((), description="groups of lists of one length that move together")
    include: Many[Include] = Field((), description="extra cells")
    exclude: Many[Exclude] = Field((), description="cells to leave out")


class MeasureOptions(Section):
    """How each row is measured. Times are seconds; a config may write 500ms or 2min."""

    regimes: Many[Regime] = Field(
        (Regime.ISOLATED, Regime.STEADY), description="one pass at a time, or a chain of them"
    )
    graph: Many[Switch] = Field((False,), description="launch through a CUDA graph")
    noise: Share = Field(0.02, description="stop once the relative noise is below this")
    blocks: Blocks = Field(6, description="least number of blocks of a row")
    deadline_s: Seconds = Field(
        60.0, alias="deadline", description="a row that takes longer, all in all, is killed"
    )
    max_time_s: Seconds = Field(
        default_factory=lambda data: min(2.0, data.get("deadline_s", 60.0) / 2),
        alias="max_time",
        description="stop measuring a row after this; default 2s, at most half the deadline",
    )
    wait_bound_s: Seconds = Field(
        default_factory=lambda data: min(10.0, data.get("deadline_s", 60.0) / 4),
        alias="wait_bound",
        description="a rank that waits longer reports the late rank; default 10s, at most a "
        "quarter of the deadline",
    )
    warmup: Passes = Field(3, description="passes before measuring")
    signals: Switch = Field(True, description="measure signaling latency")
    min_step: Switch = Field(True, description="measure min_step_us")

    @field_validator("max_time_s", "wait_bound_s")
    @classmethod
    def _within_deadline(cls, value: float, info: ValidationInfo) -> float:
        deadline_s = info.data.get("deadline_s")
        if deadline_s is not None and value >= deadline_s:
            raise allowed(f"less than the deadline, {deadline_s:g} s")
        return value


class Document(Axes):
    """A mokbench config; axes stand at the top or under sweep, keys that start with x- are free."""

    name: FileSafeName | None = Field(None, description="name of the run; default the file's name")
    fabric: Literal["auto", "host", "cuda"] = Field("auto", description="where the ranks run")
    systems: Many[SystemChoice] = Field((), description="systems under test")
    sweep: Sweep = Field(default_factory=Sweep, description="axes to sweep over")
    measure: MeasureOptions = Field(default_factory=MeasureOptions, description="how to measure")
    require: Many[SystemName] = Field((), description="systems that must not be unsupported")
    cluster: Cluster | None = Field(None, description="where the ranks run: mokbench launch")


def schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a config file, for editors and tests."""
    made = Document.model_json_schema()
    _drop_empty_defaults(made)
    for form in made["$defs"]["RoutingSpec"]["anyOf"]:
        shares = form.get("properties", {})
        shares |= {k: {"anyOf": [v, PERCENT]} for k, v in shares.items() if k in _ROUTING_SHARES}
    made["patternProperties"] = {"^x-": {}}
    made["required"] = ["systems"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **made,
        "title": "mokbench config",
    }


def _drop_empty_defaults(part: Any) -> None:
    """Take out defaults that would be errors if written: an axis left out is no empty list."""
    if isinstance(part, dict):
        if part.get("default") == []:
            del part["default"]
        for child in part.values():
            _drop_empty_defaults(child)
    elif isinstance(part, list):
        for child in part:
            _drop_empty_defaults(child)
