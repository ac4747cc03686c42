"""What a MoK kernel is compiled for, the memory it takes, and the choice of its tiles and rings.

Nothing here needs a GPU. The order of tiles and the smallest rings mirror kernels/mok/plan.h.
"""

from dataclasses import dataclass

from mokbench.gemm_config import (
    HALF_COLS,
    GemmConfig,
    gemm_cost,
    most_stages,
    planned_rows,
)
from mokbench.systems.options import MokOptions
from mokbench.workload import Model, Workload

SOURCE = "mok/forward.cuh"
THREADS = 512  # kMokThreads
BLOCK_K = 64
# Those of the grouped GEMM that leave a consumer the registers for two kinds of tiles.
TILE_ROWS = (32, 64, 128)
MAX_RANKS, MAX_TOP_K, MAX_LOCAL_EXPERTS = 128, 16, 1024
MAX_RING_TILES, MAX_HIDDEN_RING_TILES = (1 << 15) - 1, (1 << 16) - 1
MAX_ROUTES = 1 << 25  # kRouteBits
PULL_WARPS = (1, 2, 3, 4)
GROUP_WORDS = 4  # MokGroup
RINGS_WORDS = 4  # MokRings
# MokStamp: what a CTA stamps in a pass, ns of the GPU's clock; "waited" is a sum of ns.
STAMPS = (
    "begun",
    "staged",
    "entered",
    "scheduled",
    "pulled",
    "waited",
    "gemm1_begun",
    "gemm1_ended",
    "gemm2_begun",
    "gemm2_ended",
    "returned",
    "summed",
)
_COUNTER_BYTES = 128


def column_blocks(n: int) -> int:
    """mok_blocks: wide column blocks, and a narrow one where columns are left."""
    wide = (n + HALF_COLS - 1) // (2 * HALF_COLS)
    return wide + (wide * 2 * HALF_COLS < n)


def least_hidden_ring_tiles(model: Model, group_tiles: int, num_sms: int) -> int:
    """The smallest legal ring of hidden rows; that of dispatched rows is group_tiles."""
    return -(-2 * num_sms // column_blocks(2 * model.intermediate)) + 2 * group_tiles


@dataclass(frozen=True)
class MokConfig:
    """One rank's kernel on ``num_sms`` SMs: BF16, at most ``max_tokens`` a rank."""

    model: Model
    ranks: int
    max_tokens: int
    tiles: GemmConfig
    ring_tiles: int
    hidden_ring_tiles: int
    pull_warps: int
    num_sms: int
    stamps: bool = False

    def __post_init__(self) -> None:
        least = least_hidden_ring_tiles(self.model, self.tiles.group_tiles, self.num_sms)
        for name, found, fewest, most in (
            ("ring_tiles", self.ring_tiles, self.tiles.group_tiles, MAX_RING_TILES),
            ("hidden_ring_tiles", self.hidden_ring_tiles, least, MAX_HIDDEN_RING_TILES),
        ):
            if not fewest <= found <= most:
                raise ValueError(
                    f"{name} is {found}; with group_tiles {self.tiles.group_tiles} on "
                    f"{self.num_sms} SMs {fewest} to {most} go"
                )

    @property
    def local_experts(self) -> int:
        """Experts of each rank."""
        return self.model.experts // self.ranks

    @property
    def capacity_rows(self) -> int:
        """The most rows that one rank's experts can get."""
        return self.ranks * self.max_tokens * min(self.model.top_k, self.local_experts)

    @property
    def most_groups(self) -> int:
        """most_groups of plan.h."""
        rows_of_group = self.tiles.tile_rows * self.tiles.group_tiles
        return self.capacity_rows // rows_of_group + self.local_experts

    @property
    def expression(self) -> str:
        """The kernel's C++ name."""
        model, tiles = self.model, self.tiles
        layer = (
            f"mokbench::Config{{.num_ranks={self.ranks},.num_experts={model.experts},"
            f".top_k={model.top_k},.max_tokens={self.max_tokens},.hidden={model.hidden},"
            f".intermediate={model.intermediate},.block_m={tiles.tile_rows},"
            f".ring_tiles={self.ring_tiles},.hidden_ring_tiles={self.hidden_ring_tiles}}}"
        )
        gemm = (
            f"mokbench::GemmConfig{{.tile_rows={tiles.tile_rows},.stages={tiles.stages},"
            f".group_tiles={tiles.group_tiles}}}"
        )
        return (
            f"mokbench::mok_forward<mokbench::MokConfig{{.layer={layer},.tiles={gemm},"
            f".pull_warps={self.pull_warps},.stamps={str(self.stamps).lower()}}}>"
        )

    @property
    def segment_bytes(self) -> int:
        """At least mok_layout's segment: staged x, combine slots, gathered ids, counters."""
        routes = self.max_tokens * self.model.top_k
        counters = 2 * self.ranks + 1 + 2 * (self.ring_tiles + self.hidden_ring_tiles)
        return (
            (self.max_tokens + routes) * self.model.hidden * 2
            + 8 * self.ranks * (routes + 1)
            + counters * _COUNTER_BYTES
            + (1 << 14)
        )

    @property
    def ring_bytes(self) -> tuple[int, int]:
        """Of dispatched and of hidden rows."""
        rows = self.tiles.tile_rows
        return (
            self.ring_tiles * rows * self.model.hidden * 2,
            self.hidden_ring_tiles * rows * self.model.intermediate * 2,
        )

    def scratch_words(self) -> dict[str, int]:
        """32-bit words of each array in which a rank keeps what is its own."""
        return {
            "epoch": 1,
            "staged": 1,
            "barrier": 1,
            "next_item": 1,
            "finished": 1,
            "rings": RINGS_WORDS,
            "num_groups": 1,
            "chunk_rows": self.num_sms * self.local_experts,
            "table": self.capacity_rows,
            "tile_ends": self.most_groups,
            "groups": self.most_groups * GROUP_WORDS,
        }

    @property
    def workspace_bytes(self) -> int:
        """Segment, rings, scratch, packed gate and up, and y."""
        model = self.model
        packed = self.local_experts * 2 * model.intermediate * model.hidden * 2
        scratch = 4 * sum(self.scratch_words().values())
        return (
            self.segment_bytes
            + sum(self.ring_bytes)
            + scratch
            + packed
            + self.max_tokens * model.hidden * 2
        )

    @property
    def note(self) -> str:
        """What was chosen, for the reader of a row."""
        x, hidden = (f"{size / 2**20:.0f} MiB" for size in self.ring_bytes)
        return (
            f"mok: tiles of {self.tiles.tile_rows} rows, {self.tiles.stages} stages, groups of "
            f"{self.tiles.group_tiles}; rings of {self.ring_tiles} ({x}) and "
            f"{self.hidden_ring_tiles} tiles ({hidden}); {self.pull_warps} pull warps a CTA on "
            f"{self.num_sms} SMs"
        )


def mok_problem(model: Model, ranks: int, max_tokens: int) -> str | None:
    """Why the kernel cannot take a shape, or None."""
    for name, found, most in (
        ("ranks", ranks, MAX_RANKS),
        ("top_k", model.top_k, MAX_TOP_K),
        ("experts a rank", model.experts // ranks, MAX_LOCAL_EXPERTS),
        ("routes of a rank", max_tokens * model.top_k, MAX_ROUTES),
    ):
        if found > most:
            return f"mok's kernel takes at most {most} {name}, found {found}"
    for name, size in (("hidden", model.hidden), ("intermediate", model.intermediate)):
        if size % BLOCK_K or size < 2 * BLOCK_K:
            return (
                f"mok's kernel needs {name} to be a multiple of {BLOCK_K} from {2 * BLOCK_K} on, "
                f"found {size}"
            )
    return None


def layer_cycles(work: Workload, tile_rows: int, num_sms: int) -> float:
    """What the GEMMs' cost model expects of both GEMMs with balanced routing."""
    model, experts = work.model, work.model.experts // work.ranks
    rows = planned_rows(work)
    shapes = ((2 * model.intermediate, model.hidden), (model.hidden, model.intermediate))
    return sum(gemm_cost(tile_rows, rows, experts, n, k, num_sms).cycles for n, k in shapes)


def choose_mok(work: Workload, options: MokOptions, max_tokens: int, num_sms: int) -> MokConfig:
    """The cheapest tile height, all stages that fit, rings with room to run ahead.

    Raises ValueError where the options ask for what does not go together.
    """
    heights = {height: layer_cycles(work, height, num_sms) for height in TILE_ROWS}
    best = min(heights, key=lambda height: (heights[height], height))
    tile_rows = best if options.tile_rows == "auto" else options.tile_rows
    stages = most_stages(tile_rows) if options.stages == "auto" else options.stages
    tiles = GemmConfig(tile_rows, stages, options.group_tiles)
    least = least_hidden_ring_tiles(work.model, tiles.group_tiles, num_sms)
    ring, hidden = options.ring_tiles, options.hidden_ring_tiles
    return MokConfig(
        model=work.model,
        ranks=work.ranks,
        max_tokens=max(1, max_tokens),
        tiles=tiles,
        # One group at work, one behind it, two on their way.
        ring_tiles=4 * tiles.group_tiles if ring == "auto" else ring,
        hidden_ring_tiles=least + 2 * tiles.group_tiles if hidden == "auto" else hidden,
        pull_warps=options.pull_warps,
        num_sms=num_sms,
        stamps=options.stamps,
    )
