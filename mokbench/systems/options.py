"""The options a config may give each system; one pydantic model a system, defaults included.

A config may give a list for any option; each value then is a variant of its own.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

_TWIN_TILES = 64  # kMaxRingTiles


class SystemOptions(BaseModel):
    """Base of all: unknown options are errors, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TiledOptions(SystemOptions):
    """Options of every system whose GEMMs run tile by tile."""

    block_m: int = Field(64, ge=1, le=256, description="rows of one GEMM tile")


RingTiles = Annotated[int, Field(ge=1, le=4096)] | Literal["auto"]


class MokOptions(TiledOptions):
    """MoK: pull dispatch into a ring, GEMMs, push combine.

    What is left at auto mokbench/mok_config.py picks on the cuda fabric.
    """

    ring_tiles: RingTiles = Field("auto", description="tiles in the ring of dispatched rows")
    hidden_ring_tiles: RingTiles = Field("auto", description="tiles between the two GEMMs")
    pull_workers: int = Field(1, ge=1, le=16, description="threads (host) that pull rows")
    tile_rows: Literal["auto", 32, 64, 128] = Field("auto", description="rows of a tile (cuda)")
    stages: Annotated[int, Field(ge=2, le=10)] | Literal["auto"] = Field(
        "auto", description="k-blocks in flight (cuda)"
    )
    group_tiles: int = Field(
        8, ge=1, le=64, description="row tiles that share their weights in turn (cuda)"
    )
    pull_warps: int = Field(4, ge=1, le=4, description="warps of a CTA (cuda) that pull rows")
    num_sms: PositiveInt | Literal["auto"] = Field("auto", description="SMs (cuda) of the pass")
    zero_copy: bool = Field(
        False, description="tokens lie in the segment from an x's first pass on (cuda)"
    )
    stamps: bool = Field(False, description="record when each role did what (cuda)")

    @property
    def twin_tiles(self) -> dict[str, int]:
        """TwinConfig's own sizes."""
        ring = 4 if self.ring_tiles == "auto" else self.ring_tiles
        hidden = 2 if self.hidden_ring_tiles == "auto" else self.hidden_ring_tiles
        return {
            "block_m": self.block_m,
            "ring_tiles": ring,
            "hidden_ring_tiles": hidden,
            "pull_workers": self.pull_workers,
        }

    @property
    def cuda_options_reason(self) -> str | None:
        """Why the host fabric cannot have these options, or None."""
        if max(self.twin_tiles["ring_tiles"], self.twin_tiles["hidden_ring_tiles"]) > _TWIN_TILES:
            return f"rings of the host fabric have at most {_TWIN_TILES} tiles"
        tiles = ("tile_rows", "stages", "group_tiles")
        names = (*tiles, "pull_warps", "num_sms", "zero_copy", "stamps")
        return self._reason(names, "the cuda fabric")

    @property
    def host_options_reason(self) -> str | None:
        """Why the cuda fabric cannot have these options, or None."""
        return self._reason(("block_m", "pull_workers"), "the host fabric")

    def _reason(self, names: tuple[str, ...], fabric: str) -> str | None:
        for name in names:
            if getattr(self, name) != type(self).model_fields[name].default:
                return f"{name} is an option of {fabric}; leave it out here"
        return None


class GemmOptions(TiledOptions):
    """Options of systems that can run on the project's grouped GEMM on the cuda fabric.

    What is left at auto the cost model of mokbench/gemm_config.py picks, for each GEMM of its own.
    """

    gemm: Literal["ours", "torch"] = Field("ours", description="grouped GEMM (cuda)")
    gemm_tile_rows: Literal["auto", 32, 64, 128, 144] = Field(
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
