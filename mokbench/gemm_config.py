"""Tile shapes of the project's grouped GEMM, and the cost model that picks one.

Nothing here needs a GPU. The layout of shared memory mirrors gemm_layout of kernels/gemm/plan.h.
"""

from dataclasses import dataclass
from math import ceil, sqrt

from mokbench.workload import Workload

SOURCE = "gemm/grouped.cuh"
HALF_COLS = 128  # kHalfCols
ROW_UNIT = 16  # kRowUnit
BLOCK_K = 64  # kBlockK
MAX_EXPERTS = 512  # kMaxGemmExperts
MAX_GROUP_TILES = 65_536
PARTS_A_CTA = 2  # TileQueue::kPartsACta
PART_BYTES = 2 * HALF_COLS * 128 * 4  # kPartBytes
TILE_ROWS = (32, 64, 128, 144)
# What a CTA of sm_90 may have.
MAX_SHARED_BYTES = 232_448
_LINE_BYTES = 128
_WORK_SLOTS, _WORK_BYTES, _COUNT_WORDS = 1, 32, 16
_STAGING_BUFFERS = 4
_MAX_STAGES = 10
# Rows of a half that the staging buffers hold at once. Taller tiles are staged in shorter chunks.
_ROWS_AT_ONCE, _TALL_CHUNK = 128, 48
# Handing over a tile's sums pays where a CTA's share of its k-blocks takes longer.
_SPLIT_K_ROWS, _SPLIT_K_FROM = 128, 96 * BLOCK_K
_COLUMN_STEP = 64

# The cost model's constants, in SM cycles a 64-wide k-block. Tensor cores do 64 x 8 x 16 BF16
# products in 4 cycles, so 16 rows of 256 columns take 128. A k-block's operands reach an SM at
# about 48 bytes a cycle while it multiplies (128 rows just hide it, fewer do not), and the weights
# come from memory at 18 when rows are few (4.1 TB/s over 132 SMs at 1.75 GHz).
_CYCLES_A_UNIT = 128.0
_L2_BYTES_A_CYCLE = 48.0
_HBM_BYTES_A_CYCLE = 18.0
# Between two tiles; what 144 rows have more is that a third of a half waits in registers.
_CYCLES_A_TILE = 1200.0
_CYCLES_A_TALL_TILE = 1900.0


@dataclass(frozen=True)
class GemmConfig:
    """The kernel's template argument; see GemmConfig of kernels/gemm/plan.h."""

    tile_rows: int = 128
    stages: int = 4
    group_tiles: int = 8
    swiglu: bool = False
    row_weights: bool = False
    split_k: bool = False

    def __post_init__(self) -> None:
        if self.tile_rows not in TILE_ROWS:
            raise ValueError(f"tile_rows is {self.tile_rows}; allowed are {TILE_ROWS}")
        most = most_stages(self.tile_rows)
        if not 2 <= self.stages <= most:
            raise ValueError(
                f"stages is {self.stages}; with tile_rows {self.tile_rows} 2 to {most} fit"
            )
        if self.split_k and self.tile_rows != _SPLIT_K_ROWS:
            raise ValueError(f"split_k needs tile_rows {_SPLIT_K_ROWS}, found {self.tile_rows}")
        if not 1 <= self.group_tiles <= MAX_GROUP_TILES:
            raise ValueError(f"group_tiles is {self.group_tiles}; 1 to {MAX_GROUP_TILES} go")

    @property
    def expression(self) -> str:
        """The kernel's C++ name."""
        flags = ",".join(f".{name}={str(value).lower()}" for name, value in vars(self).items())
        return f"mokbench::grouped_gemm<mokbench::GemmConfig{{{flags}}}>"

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return _shared_bytes(self.tile_rows, self.stages)

    @property
    def store_rows(self) -> int:
        """chunk_rows: rows of one store's box."""
        return _TALL_CHUNK if self.tile_rows > _ROWS_AT_ONCE else min(64, self.tile_rows)

    @property
    def row_boxes(self) -> range:
        """Heights of the boxes by which rows are loaded."""
        return range(ROW_UNIT, self.tile_rows + 1, ROW_UNIT)

    @property
    def store_columns(self) -> int:
        """Columns of one store's box: a consumer warpgroup's, half of them after SwiGLU."""
        return 32 if self.swiglu else 64


def _shared_bytes(tile_rows: int, stages: int) -> int:
    staging = _STAGING_BUFFERS * (_TALL_CHUNK if tile_rows > _ROWS_AT_ONCE else 64) * _LINE_BYTES
    barriers = stages * (2 * HALF_COLS + tile_rows) * _LINE_BYTES + staging
    work = barriers + 16 * (stages + _WORK_SLOTS + _STAGING_BUFFERS)
    return work + _WORK_SLOTS * _WORK_BYTES + 4 * (MAX_EXPERTS + _COUNT_WORDS)


def most_stages(tile_rows: int) -> int:
    """As many k-blocks as shared memory holds."""
    stages = 1
    while stages < _MAX_STAGES and _shared_bytes(tile_rows, stages + 1) <= MAX_SHARED_BYTES:
        stages += 1
    return stages


def gemm_problem(experts: int, n: int, k: int) -> str | None:
    """Why the kernel cannot take weights [experts, n, k], or None."""
    if experts > MAX_EXPERTS:
        return f"our grouped GEMM takes at most {MAX_EXPERTS} experts a rank, found {experts}"
    if n % _COLUMN_STEP or k % BLOCK_K or k < 2 * BLOCK_K:
        return (
            f"our grouped GEMM needs output columns in multiples of {_COLUMN_STEP} and inner "
            f"sizes in multiples of {BLOCK_K} from {2 * BLOCK_K} on, found {n} and {k}"
        )
    return None


@dataclass(frozen=True)
class GemmCost:
    """What the model expects of one tile height: ``cycles`` of the busiest SM."""

    tile_rows: int
    tiles: int
    cycles: float


def with_spread(mean: float) -> float:
    """Rows of an expert where random routing gives ``mean`` on the average: a deviation more."""
    return mean + sqrt(mean)


def planned_rows(work: Workload) -> float:
    """Rows of an expert to choose tiles for: what balanced routing gives, and a deviation more.

    One standard deviation of random routing: of tiles that just fit the mean, half of the experts
    need a second one, which takes as long as the first where reading the weights does.
    """
    mean = work.tokens_per_rank * work.ranks * work.model.top_k / work.model.experts
    return with_spread(mean)


def gemm_cost(tile_rows: int, rows: float, experts: int, n: int, k: int, num_sms: int) -> GemmCost:
    """Of ``experts`` experts with ``rows`` rows each, on the average; weights [n, k] each."""
    units = max(1, ceil(rows / ROW_UNIT))
    most = tile_rows // ROW_UNIT
    row_tiles = ceil(units / most)
    base, taller = divmod(units, row_tiles)
    # Columns that are left over, at most a half, are a block with tiles of twice the rows.
    wide_blocks = (n + HALF_COLS - 1) // (2 * HALF_COLS)
    narrow_tiles = ceil(units / (2 * most)) if wide_blocks * 2 * HALF_COLS < n else 0
    tiles = experts * (row_tiles * wide_blocks + narrow_tiles)
    weight_bytes = 2 * HALF_COLS * _LINE_BYTES
    # Each expert's weights come from memory once, whatever the number of row tiles, and SMs without
    # a tile leave the others their share.
    busy = min(tiles, num_sms) / num_sms
    from_memory = weight_bytes / _HBM_BYTES_A_CYCLE / row_tiles * busy

    def block_cycles(tile_units: int) -> float:
        loaded = (weight_bytes + tile_units * ROW_UNIT * _LINE_BYTES) / _L2_BYTES_A_CYCLE
        return max(_CYCLES_A_UNIT * tile_units, loaded, from_memory)

    # An expert's units are shared out evenly: some tiles have one more than the others.
    tallest = block_cycles(base + (taller > 0))
    block = (taller * tallest + (row_tiles - taller) * block_cycles(base)) / row_tiles
    between = _CYCLES_A_TALL_TILE if tile_rows > _ROWS_AT_ONCE else _CYCLES_A_TILE
    rounds = tiles / num_sms
    if tiles <= num_sms:
        rounds, block = 1.0, tallest
    return GemmCost(tile_rows, tiles, rounds * (k / BLOCK_K * block + between))


def may_split(k: int) -> bool:
    """Whether sharing a tile's k-blocks out can pay."""
    return k >= _SPLIT_K_FROM


def choose_gemm(
    rows: float,
    experts: int,
    n: int,
    k: int,
    num_sms: int,
    tile_rows: int | None = None,
    stages: int | None = None,
) -> GemmConfig:
    """The cheapest tile height by ``gemm_cost``, the shortest of equals, and all stages that fit.

    ``rows`` is the average per expert; ``tile_rows`` and ``stages`` are taken as they are given.
    """
    heights = [height for height in TILE_ROWS if most_stages(height) >= (stages or 2)]
    costs = [gemm_cost(height, rows, experts, n, k, num_sms) for height in heights or TILE_ROWS]
    best = tile_rows or min(costs, key=lambda cost: (cost.cycles, cost.tile_rows)).tile_rows
    return GemmConfig(
        tile_rows=best,
        stages=stages or most_stages(best),
        split_k=best == _SPLIT_K_ROWS and may_split(k),
    )
