"""What every part of a config shares: strict keys, and lists that may be written as one value."""

from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from mokbench.quantity import allowed

T = TypeVar("T")


class Section(BaseModel):
    """A mapping of a config: unknown keys are errors, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class OneOrMany:
    """Marks a tuple that may be given as one value, but not as an empty list."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(_as_tuple, handler(source))

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        array = handler(core)
        return {"anyOf": [array["items"], {**array, "minItems": 1}]}


class OneOf:
    """Marks text that is one of a fixed set of names."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(names)

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.literal_schema(self.names)


Many = Annotated[tuple[T, ...], OneOrMany()]


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        return (value,)
    if not value:
        raise allowed("at least one value; leave the key out to get its default")
    return tuple(value)
