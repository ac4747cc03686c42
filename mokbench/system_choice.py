"""Which systems a config runs, and with which options: every option may be a list of variants."""

import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    create_model,
)

from mokbench.problems import allowed_text, suggest
from mokbench.quantity import allowed, switch
from mokbench.section import Many, OneOf, Section
from mokbench.systems.options import SYSTEM_OPTIONS, SystemOptions
from mokbench.workload import Scalar

Options = tuple[tuple[str, Scalar], ...]
SystemName = Annotated[str, OneOf(SYSTEM_OPTIONS)]


@dataclass(frozen=True)
class SystemEntry:
    """One item of ``systems:``; each variant holds the options that are not the defaults."""

    name: str
    variants: tuple[Options, ...]


def _as_meant(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Options are strict, except that ``yes`` may mean true and 1e3 a whole number."""
    reasons = []
    for reading in _readings(value):
        try:
            return handler(reading)
        except ValidationError as error:
            reasons += [allowed_text(reason) for reason in error.errors()]
    raise allowed(" or ".join(dict.fromkeys(reasons)))


def _readings(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, str) and value.lower() in ("yes", "no", "on", "off"):
        yield switch(value)
    if isinstance(value, float) and value.is_integer():
        yield int(value)


def _variants_model(options: type[SystemOptions]) -> type[BaseModel]:
    """Make a model of the same options, each a value or a list."""
    fields: dict[str, Any] = {}
    generic: Any = Many
    for name, field in options.model_fields.items():
        one = (field.annotation, *field.metadata, WrapValidator(_as_meant))
        many = generic[operator.getitem(Annotated, one)]
        default = field.get_default()
        fields[name] = (many, Field((default,), description=field.description))
    config = ConfigDict(extra="forbid", frozen=True, strict=True)
    name = f"{options.__name__}Variants"
    return create_model(name, __config__=config, __doc__=options.__doc__, **fields)


if TYPE_CHECKING:
    SystemWithOptions = BaseModel
else:
    SystemWithOptions = create_model(
        "SystemWithOptions",
        __base__=Section,
        __doc__="One system and its options.",
        **{name: (_variants_model(known) | None, None) for name, known in SYSTEM_OPTIONS.items()},
    )


def _read_choice(value: Any) -> Any:
    if isinstance(value, str):
        if value not in SYSTEM_OPTIONS:
            raise ValueError(f"unknown system {value!r}; {suggest(value, SYSTEM_OPTIONS)}")
        return {value: {}}
    if not isinstance(value, dict | BaseModel):
        raise allowed("a system's name, or name and options as in {mok: {block_m: [32, 64]}}")
    if isinstance(value, dict) and len(value) != 1:
        found = ", ".join(map(str, value)) or "nothing"
        raise ValueError(f"found {found}; allowed: one system a list item, as in - mok: {{...}}")
    return value


SystemChoice = Annotated[
    SystemWithOptions,
    BeforeValidator(_read_choice, json_schema_input_type=SystemName | SystemWithOptions),
]


def entry(choice: BaseModel) -> SystemEntry:
    """Every combination of the listed options. Raises ValidationError where one makes no sense."""
    (name,) = choice.model_fields_set
    listed = getattr(choice, name)
    given = {} if listed is None else {key: getattr(listed, key) for key in listed.model_fields_set}
    names = sorted(given)
    rows = itertools.product(*(given[key] for key in names))
    return SystemEntry(name, tuple(_differing(name, zip(names, row, strict=True)) for row in rows))


def _differing(system: str, options: Iterator[tuple[str, Scalar]]) -> Options:
    known = SYSTEM_OPTIONS[system]
    chosen = known(**dict(options)).model_dump()
    defaults = known().model_dump()
    return tuple((key, chosen[key]) for key in sorted(chosen) if chosen[key] != defaults[key])
