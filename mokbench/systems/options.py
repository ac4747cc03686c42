"""The options a config may give each system; one pydantic model a system, defaults included.

A config may give a list for any option; each value then is a variant of its own.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt


class SystemOptions(BaseModel):
    """Base of all: unknown options are errors, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TiledOptions(SystemOptions):
    """Options of every system whose GEMMs run tile by tile."""

    block_m: int = Field(64, ge=1, le=256, description="rows of one GEMM tile")


class MokOptions(TiledOptions):
    """MoK: pull dispatch into a ring, GEMMs, push combine."""

    ring_tiles: int = Field(4, ge=1, le=64, description="tiles in the ring of dispatched rows")
    hidden_ring_tiles: int = Field(2, ge=1, le=64, description="tiles between the two GEMMs")
    pull_workers: int = Field(1, ge=1, le=16, description="threads (host) that pull rows")


class PushOptions(TiledOptions):
    """Push baseline: push dispatch, grouped GEMMs, push combine."""

    num_sms: PositiveInt | Literal["auto"] = Field("auto", description="SMs (cuda) that move rows")


class CompiledOptions(TiledOptions):
    """Options of systems that are plain PyTorch on the cuda fabric."""

    compile: bool = Field(True, description="torch.compile what it can (cuda)")


class AlltoallOptions(CompiledOptions):
    """all_to_all_single and grouped GEMMs."""


class LocalOptions(CompiledOptions):
    """One rank, no exchange."""


class DeepepOptions(SystemOptions):
    """DeepEP dispatch and combine around grouped GEMMs."""

    num_sms: int | Literal["auto"] = Field("auto", description="SMs for communication")
    gemm: Literal["ours", "torch"] = Field("ours", description="grouped GEMM between the two")
    deterministic: bool = Field(False, description="ask DeepEP for a stable row order")


SYSTEM_OPTIONS: dict[str, type[SystemOptions]] = {
    "mok": MokOptions,
    "push": PushOptions,
    "deepep": DeepepOptions,
    "alltoall": AlltoallOptions,
    "local": LocalOptions,
}
