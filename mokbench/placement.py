"""Which rank holds which expert: by a rule, or as a config lists it."""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property
from hashlib import sha256
from itertools import chain
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationInfo,
    field_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from mokbench.quantity import WHOLE, FileSafeName

RULES = ("contiguous", "round_robin")
_FORM = "{explicit: [[0, 3], [1, 2]]}, a list of experts for each rank"
_MOST_EXPERTS = 1024
_MOST_SHOWN = 5


class ExplicitPlacement(BaseModel):
    """Experts of each rank, rank after rank: every expert once, as many on each rank.

    Two that place alike are equal only with the same ``name``; ``label`` tells any two apart.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    explicit: tuple[tuple[Annotated[int, WHOLE], ...], ...] = Field(
        description="experts of rank 0, of rank 1, ..."
    )
    name: FileSafeName = Field("explicit", description="what ids and reports call it")

    @field_validator("explicit", mode="before")
    @classmethod
    def _lists(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple) or not all(
            isinstance(each, list | tuple) for each in value
        ):
            raise ValueError(f"found no list of lists; allowed: {_FORM}")
        return value

    @field_validator("explicit")
    @classmethod
    def _partition(
        cls, ranks: tuple[tuple[int, ...], ...], info: ValidationInfo
    ) -> tuple[tuple[int, ...], ...]:
        sizes = [len(experts) for experts in ranks]
        if not any(sizes) or sum(sizes) > _MOST_EXPERTS:
            raise ValueError(f"found {sum(sizes)} experts; allowed: 1 to {_MOST_EXPERTS}")
        if len(set(sizes)) > 1:
            uneven = next((r for r, size in enumerate(sizes) if size != sizes[0]), 0)
            raise ValueError(
                f"rank {uneven} has {sizes[uneven]} experts and rank 0 has {sizes[0]}; allowed: as "
                "many on every rank"
            )
        tally = Counter(chain.from_iterable(ranks))
        if twice := [expert for expert, count in tally.items() if count > 1]:
            raise ValueError(f"expert {_some(twice)} is placed twice; allowed: every expert once")
        num_experts = len(tally)
        if beyond := [expert for expert in tally if not 0 <= expert < num_experts]:
            missing = [expert for expert in range(num_experts) if expert not in tally]
            raise ValueError(
                f"expert {_some(beyond)} is none of {num_experts}, and {_some(missing)} is on no "
                f"rank; allowed: each of 0 to {num_experts - 1} once"
            )
        return ranks

    @cached_property
    def label(self) -> str:
        """Its name and 8 hex digits of what it places: ``eplb-1a2b3c4d``."""
        return f"{self.name}-{sha256(repr(self.explicit).encode()).hexdigest()[:8]}"

    @property
    def experts(self) -> int:
        """How many experts it places."""
        return len(self.explicit) * len(self.explicit[0])


Placement = str | ExplicitPlacement


class PlacementEntry:
    """Marks a placement in a config: the name of a rule, or a mapping with ``explicit``."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(
            _rule_or_explicit,
            handler.generate_schema(ExplicitPlacement),
            serialization=core_schema.plain_serializer_function_ser_schema(_dumped),
        )

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        rules = {"type": "string", "enum": list(RULES)}
        return {"anyOf": [rules, handler(core["schema"])]}


def _rule_or_explicit(value: Any, explicit: Callable[[Any], ExplicitPlacement]) -> Placement:
    if isinstance(value, dict | ExplicitPlacement):
        return explicit(value)
    if isinstance(value, str) and value in RULES:
        return value
    allowed = ", ".join(f"'{name}'" for name in (*RULES, "{explicit: [[0, 3], [1, 2]]}"))
    raise PydanticKnownError("literal_error", {"expected": allowed})


def _dumped(value: Placement) -> Any:
    return value if isinstance(value, str) else value.model_dump(mode="json")


def label(placement: Placement) -> str:
    """What ids, rows and reports call it."""
    return placement if isinstance(placement, str) else placement.label


def problem(placement: Placement, ranks: int, experts: int) -> str | None:
    """Why so many experts cannot be placed so on so many ranks, or None."""
    if isinstance(placement, str):
        found = None if placement in RULES else repr(placement)
        return found and f"found {found}; allowed: {', '.join(RULES)}, or {_FORM}"
    own = len(placement.explicit), placement.experts
    if own == (ranks, experts):
        return None
    return (
        f"{placement.label} is for ranks: {own[0]} and {own[1]} experts, found ranks: {ranks} and "
        f"{experts} experts"
    )


def new_ids(placement: Placement, ranks: int, experts: int) -> NDArray[np.int32]:
    """Id of each of the router's experts, [experts], such that id // (experts / ranks) is its rank.

    ``problem`` has nothing against it. Systems then need to know one rule.
    """
    e = np.arange(experts, dtype=np.int32)
    if placement == "contiguous":
        return e
    if placement == "round_robin":
        return (e % ranks * (experts // ranks) + e // ranks).astype(np.int32)
    assert isinstance(placement, ExplicitPlacement)
    renamed = np.empty(experts, dtype=np.int32)
    renamed[list(chain.from_iterable(placement.explicit))] = e
    return renamed


def _some(experts: Iterable[int]) -> str:
    listed = list(experts)
    more = f" and {len(listed) - _MOST_SHOWN} more" if len(listed) > _MOST_SHOWN else ""
    return ", ".join(map(str, listed[:_MOST_SHOWN])) + more
