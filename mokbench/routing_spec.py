"""What a config says about routing: which generator, how strong, what is masked or empty."""

import difflib
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

GeneratorName = Literal[
    "balanced", "lognormal", "zipf", "dirichlet", "hot_expert", "hot_rank", "trace"
]

# Generators with a value: (symbol, least, most, example).
_VALUES: dict[str, tuple[str, float, float, float]] = {
    "lognormal": ("sigma", 0.01, 5.0, 0.6),
    "zipf": ("s", 0.01, 5.0, 0.8),
    "dirichlet": ("alpha", 0.01, 1e6, 1.0),
    "hot_expert": ("share", 1e-6, 1.0, 0.5),
    "hot_rank": ("ratio", 1.0, 1e4, 2.5),
}

PRESETS: dict[str, tuple[GeneratorName, float]] = {
    "typical": ("lognormal", 0.25),
    "skewed": ("lognormal", 0.6),
    "extreme": ("zipf", 0.65),
}

_MODIFIERS = ("masked", "uneven", "empty_experts", "empty_ranks")
_ALLOWED = (
    "allowed: balanced, "
    + ", ".join(PRESETS)
    + ", "
    + ", ".join(f"{{{name}: {row[3]:g}}}" for name, row in _VALUES.items())
    + ", {trace: file.npz, layer: 0}, each with "
    + ", ".join(_MODIFIERS)
    + " if wanted"
)


class RoutingSpec(BaseModel):
    """Where tokens go. ``docs/metrics.md`` gives each generator's formula.

    A config may write a name ("balanced", "extreme"), a generator with its value
    ({zipf: 0.8, masked: 0.1}), a preset with modifiers ({preset: typical, uneven: 0.5}), a trace
    ({trace: file.npz, layer: 3}), or every field. ``preset`` is a label: it does not change what is
    generated.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    generator: GeneratorName = "balanced"
    value: float | None = Field(None, description="sigma, s, alpha, share or ratio")
    preset: str | None = Field(None, description="name that stood for generator and value")
    trace: str | None = Field(None, description="npz of top-k ids, see docs/trace-format.md")
    layer: int | None = Field(None, ge=0, le=100_000, description="layer of the trace")
    masked: float = Field(0.0, ge=0, le=1, description="share of routes set to -1")
    uneven: float = Field(0.0, ge=0, le=1, description="spread of the ranks' token counts")
    empty_experts: int = Field(0, ge=0, le=1024, description="experts that get no route")
    empty_ranks: int = Field(0, ge=0, le=1024, description="source ranks without tokens")

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, data: Any) -> Any:
        if isinstance(data, RoutingSpec):
            return data
        fields = _from_name(data) if isinstance(data, str) else _from_mapping(data)
        preset = fields.get("preset")
        if preset is not None:
            _fill_preset(fields, preset)
        if fields.get("trace") is not None:
            fields.setdefault("generator", "trace")
            if fields.get("layer") is None:
                fields["layer"] = 0
        for name in ("value", "layer", *_MODIFIERS):
            if isinstance(fields.get(name), bool):
                raise ValueError(f"{name}: {fields[name]} is not a number")
        return fields

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.generator in _VALUES:
            _check_value(self.generator, self.value)
        elif self.value is not None:
            raise ValueError(f"{self.generator} takes no value, found {self.value:g}")
        if (self.generator == "trace") != (self.trace is not None):
            raise ValueError(
                "the trace generator and a trace file go together: {trace: file.npz, layer: 0}"
            )
        if self.layer is not None and self.trace is None:
            raise ValueError("layer belongs to a trace: {trace: file.npz, layer: 0}")
        if self.empty_experts and self.generator in ("hot_rank", "trace"):
            raise ValueError(
                f"empty_experts does not go with {self.generator}, which fixes every rank's share"
                if self.generator == "hot_rank"
                else "empty_experts does not go with a trace, whose routes are taken as recorded"
            )
        return self

    @property
    def label(self) -> str:
        """Readable, stable, file-safe: ``extreme``, ``zipf-0.8+masked-0.1``, ``trace-day1-l3``."""
        if self.preset:
            base = self.preset
        elif self.trace is not None:
            stem = re.sub(r"[^A-Za-z0-9_.-]+", "_", PurePath(self.trace).stem)
            base = f"trace-{stem}-l{self.layer}"
        elif self.value is not None:
            base = f"{self.generator}-{self.value:.12g}"
        else:
            base = self.generator
        changed = [(name, getattr(self, name)) for name in _MODIFIERS if getattr(self, name)]
        return "+".join([base, *(f"{name}-{value:.12g}" for name, value in changed)])

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """All forms a config may use, so that editors complete the short ones too."""
        full = handler.resolve_ref_schema(handler(core_schema))
        modifiers = {name: full["properties"][name] for name in _MODIFIERS}
        short = [
            {
                "type": "object",
                "properties": {name: {"type": "number", "minimum": least, "maximum": most}}
                | modifiers,
                "required": [name],
                "additionalProperties": False,
            }
            for name, (_, least, most, _) in _VALUES.items()
        ]
        names = {"type": "string", "enum": ["balanced", *PRESETS]}
        return {"title": "Routing", "anyOf": [names, *short, dict(full)]}


def _from_name(name: str) -> dict[str, Any]:
    if name == "balanced":
        return {"generator": name}
    if name in PRESETS:
        return {"preset": name}
    if name in _VALUES:
        raise ValueError(f"{name} needs its value, as in {{{name}: {_VALUES[name][3]:g}}}")
    if name == "trace":
        raise ValueError("trace needs its file, as in {trace: file.npz, layer: 0}")
    close = difflib.get_close_matches(name, ["balanced", *PRESETS, *_VALUES, "trace"], n=1)
    hint = f", did you mean {close[0]}?" if close else ""
    raise ValueError(f"unknown routing {name!r}{hint}; {_ALLOWED}")


def _from_mapping(data: object) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise ValueError(f"routing cannot be {data!r}; {_ALLOWED}")
    fields = dict(data)
    named = [name for name in _VALUES if name in fields]
    if len(named) > 1:
        raise ValueError(f"one generator at a time, found {' and '.join(named)}")
    if named:
        for other in ("generator", "value", "preset", "trace"):
            if fields.get(other) is not None:
                raise ValueError(f"{named[0]} and {other} cannot both be given")
        fields["generator"], fields["value"] = named[0], fields.pop(named[0])
        if fields["value"] is None:
            raise ValueError(f"{named[0]} needs its value; {_value_range(named[0])}")
    return fields


def _fill_preset(fields: dict[str, Any], preset: object) -> None:
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}; allowed: {', '.join(PRESETS)}")
    for name, value in zip(("generator", "value"), PRESETS[str(preset)], strict=True):
        if fields.get(name) not in (None, value):
            raise ValueError(f"preset {preset} means {name} {value}, found {fields[name]!r}")
        fields[name] = value


def _value_range(generator: str) -> str:
    symbol, least, most, example = _VALUES[generator]
    return f"{symbol} from {least:g} to {most:g}, as in {{{generator}: {example:g}}}"


def _check_value(generator: str, value: float | None) -> None:
    _, least, most, _ = _VALUES[generator]
    if value is None:
        raise ValueError(f"{generator} needs its value; {_value_range(generator)}")
    if not least <= value <= most:
        raise ValueError(f"{generator}: {value:g} is out of range; {_value_range(generator)}")
