"""The options a config may give each system; one pydantic model a system, defaults included.

A config may give a list for any option; each value then is a variant of its own.
"""

from typing import Annotated, Literal

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


class GemmOptions(TiledOptions):
    """Options of systems that can run on the project's grouped GEMM on the cuda fabric.

    What is left at auto the cost model of mokbench/gemm_config.py picks, for each GEMM of its own.
    """

    gemm: Literal["ours", "torch"] = Field("ours", description="grouped GEMM (cuda)")
    gemm_tile_rows: Literal["auto", 32, 64, 128] = Field(
        "auto", description="rows of one tile of our grouped GEMM (cuda)"
    )
    gemm_stages: Annotated[int, Field(ge=2, le=10)] | Literal["auto"] = Field(
        "auto", description="k-blocks in flight of our grouped GEMM (cuda)"
    )
    gemm_group_tiles: int = Field(
        8,
        ge=1,
        le=65_536,
        description="row tiles that share their weights in turn (cuda)",
    )

    @property
    def tunes_gemm(self) -> bool:
        """Whether anything about our grouped GEMM was chosen by hand."""
        chosen = (self.gemm_tile_rows, self.gemm_stages, self.gemm_group_tiles)
        return chosen != ("auto", "auto", 8)


class PushOptions(GemmOptions):
    """Push baseline: push dispatch, grouped GEMMs, push combine."""

    num_sms: PositiveInt | Literal["auto"] = Field("auto", description="SMs (cuda) that move rows")


class CompiledOptions(TiledOptions):
    """Options of systems that are plain PyTorch on the cuda fabric."""

    compile: bool = Field(True, description="torch.compile what it can (cuda)")


class AlltoallOptions(CompiledOptions):
    """all_to_all_single and grouped GEMMs."""


class LocalOptions(CompiledOptions, GemmOptions):
    """One rank, no exchange."""

    gemm: Literal["ours", "torch"] = Field("torch", description="grouped GEMM (cuda)")


class DeepepOptions(GemmOptions):
    """DeepEP dispatch and combine around grouped GEMMs (cuda)."""

    api: Literal["auto", "elastic", "normal", "low_latency"] = Field(
        "auto",
        description="ElasticBuffer, or a mode of the legacy Buffer; auto: the newest there is",
    )
    num_sms: PositiveInt | Literal["auto", "best"] = Field(
        "auto",
        description="SMs that move rows; auto: as DeepEP advises, best: the fastest of some here",
    )
    cpu_sync: bool = Field(False, description="the CPU waits for row counts, outputs fit exactly")
    dispatch_dtype: Literal["bf16", "fp8"] = Field(
        "bf16", description="what rows travel as; fp8 is quantised inside dispatch"
    )
    deterministic: bool = Field(False, description="ask DeepEP for a stable row order")


SYSTEM_OPTIONS: dict[str, type[SystemOptions]] = {
    "mok": MokOptions,
    "push": PushOptions,
    "deepep": DeepepOptions,
    "alltoall": AlltoallOptions,
    "local": LocalOptions,
}
