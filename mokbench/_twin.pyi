"""The host twin: kernels/host compiled with the same protocol.h that the GPU kernels use."""

from collections.abc import Callable
from typing import Any

__version__: str
ROLES: tuple[str, ...]  # every value of a fault record's "role"
SITES: tuple[str, ...]  # every value of its "site"

class SharedMemory:
    """A POSIX shared-memory object, mapped here.

    Creating reserves every page, so a full /dev/shm is an OSError (ENOSPC, with the needed and the
    available bytes) and never a SIGBUS. Attaching to a name of another size is a ValueError.
    """

    def __init__(self, name: str, size: int, create: bool) -> None: ...
    @property
    def size(self) -> int: ...
    def unlink(self) -> None:
        """Remove the name; the memory lives until nobody maps it."""

    def close(self) -> None:
        """Let go of the mapping; ranks built on it keep it until they are closed."""

class TwinConfig:
    """Shape of one twin workspace; the same object sizes every rank's segment.

    hidden and intermediate are multiples of 8. A value out of range is a ValueError that names it.
    """

    def __init__(
        self,
        *,
        num_ranks: int,
        num_experts: int,
        top_k: int,
        max_tokens: int,
        hidden: int,
        intermediate: int,
        element_bytes: int,
        block_m: int = 64,
        ring_tiles: int = 4,
        hidden_ring_tiles: int = 2,
        pull_workers: int = 1,
    ) -> None: ...
    num_ranks: int
    num_experts: int
    top_k: int
    max_tokens: int
    hidden: int
    intermediate: int
    element_bytes: int
    block_m: int
    ring_tiles: int
    hidden_ring_tiles: int
    pull_workers: int

def layout(protocol: str, config: TwinConfig) -> dict[str, tuple[int, int]]:
    """Field -> (offset, bytes) inside one rank's segment; ``protocol`` is mok, push or signal."""

def segment_bytes(protocol: str, config: TwinConfig) -> int:
    """Bytes of one rank's segment; a workspace of N ranks is N of them, one behind another."""

class Fault(RuntimeError):  # noqa: N818
    """A bounded wait expired, or a peer faulted. ``args[0]`` is the message.

    ``record`` holds rank, role, site, slot, expected, observed, late_rank, epoch and waited_s.
    ``late_rank`` is the rank at the end of the chain of ranks that wait for one another.
    """

    record: dict[str, Any]

# (expert index local to the rank, first row of input buffer, first row of output buffer, rows)
# Called by role threads (mok) or by the caller's thread (push), holding the GIL.
Gemm = Callable[[int, int, int, int], None]

class MokRank:
    """One rank of the MoK protocol. Its role threads live from construction to close().

    Every rank constructs, then all pass a barrier of the caller, then run() may be called.
    wait_bound_s must exceed the longest layer pass: a rank waits that long for a peer's next sign
    of progress, and twice as long for its own other roles.
    """

    def __init__(
        self,
        memory: SharedMemory,
        config: TwinConfig,
        rank: int,
        gemm1: Gemm,
        gemm2: Gemm,
        x_ring: Any,  # [ring_tiles * block_m, hidden]: gemm1's input
        hidden_ring: Any,  # [hidden_ring_tiles * block_m, intermediate]: gemm1's output
        y_tile: Any,  # [block_m, hidden]: gemm2's output, pushed from here
        wait_bound_s: float,
        initial_epoch: int = 0,  # where every counter starts, for tests of the wrap
        max_delay_us: float = 0.0,  # random delays at every protocol step, for stress tests
        delay_seed: int = 0,
    ) -> None: ...
    def run(self, x: Any, topk_idx: Any, topk_weights: Any, y: Any) -> None:
        """One pass; y [T, H] is complete when it returns. Lets go of the GIL.

        x [T, H], topk_idx [T, K] int32 (-1 is masked), topk_weights [T, K] float32; T may differ
        per rank and pass, from 0 to max_tokens.
        Raises ValueError (nothing was published yet), Fault, or what a GEMM raised; after the last
        two every rank must be reset().
        """

    def stats(self) -> dict[str, float]:
        """Sums since the last call: pull_bytes, pull_copy_s, push_bytes, push_copy_s.

        Rows of all ranks count, this rank's own included; copy_s is CPU time of the copying thread.
        """

    def reset(self) -> None:
        """After a fault, between two barriers of the caller: counters back to their start."""

    def close(self) -> None: ...

class PushRank:
    """One rank of the push baseline: dispatch(), compute(), combine() in this order, or run().

    Constructed, reset and bounded like MokRank; everything runs in the caller's thread.
    """

    def __init__(
        self,
        memory: SharedMemory,
        config: TwinConfig,
        rank: int,
        gemm1: Gemm,
        gemm2: Gemm,
        x_rows: Any,  # [capacity_rows, hidden]: expert-sorted input of gemm1
        hidden_tile: Any,  # [block_m, intermediate]
        y_rows: Any,  # [capacity_rows, hidden]: output of gemm2
        wait_bound_s: float,
        initial_epoch: int = 0,
        max_delay_us: float = 0.0,
        delay_seed: int = 0,
    ) -> None: ...
    @staticmethod
    def capacity_rows(config: TwinConfig) -> int:
        """num_ranks * max_tokens * min(top_k, local experts)."""

    def dispatch(self, x: Any, topk_idx: Any, topk_weights: Any) -> None:
        """Push rows, wait for every peer's, sort them by expert into x_rows."""

    def compute(self) -> None:
        """The GEMMs, x_rows to y_rows; waits for nobody."""

    def combine(self, y: Any) -> None:
        """Push weighted partial sums back, wait for those of this rank's tokens, sum them."""

    def run(self, x: Any, topk_idx: Any, topk_weights: Any, y: Any) -> None: ...
    def stats(self) -> dict[str, float]:
        """push_* is the dispatch, sort_* the copies into x_rows, pull_* is 0."""

    def reset(self) -> None: ...
    def close(self) -> None: ...

class SignalRank:
    """Aligns ranks and measures signaling; each rank makes the same calls.

    Constructed and reset like MokRank. Samples are microseconds.
    """

    def __init__(
        self,
        memory: SharedMemory,
        num_ranks: int,
        rank: int,
        wait_bound_s: float,
        initial_epoch: int = 0,
        max_delay_us: float = 0.0,
        delay_seed: int = 0,
    ) -> None: ...
    def align(self) -> None:
        """Bounded barrier over all ranks: all leave it at one agreed time (spin, then yield)."""

    def hop(self, rounds: int) -> list[float]:
        """signal_hop_us, rank 0 <-> rank 1, round trip / 2 of each round; empty on other ranks."""

    def local_hop(self, rounds: int) -> list[float]:
        """local_hop_us between two threads of this rank."""

    def entry(self, rounds: int, ranks: int) -> list[float]:
        """signal_entry_us among the first ``ranks`` ranks; empty on the others."""

    def ready(self, protocol: str, rounds: int, ranks: int) -> tuple[list[float], list[float]]:
        """signal_ready_us and its part after the payload's arrival, for pull or push, per round.

        Empty on ranks beyond the first ``ranks``, and for fewer than 2 ranks.
        """

    def reset(self) -> None: ...
    def close(self) -> None: ...

def copy_rate(kind: str, row_bytes: int, num_rows: int, repeats: int) -> list[float]:
    """GB/s of copying num_rows rows: memcpy as one block, pull gathering, or push scattering."""

GEMM_PARTS_A_CTA: int
GEMM_PART_BYTES: int

def gemm_tiles(
    row_ends: list[int],
    n: int,
    k_blocks: int,
    *,
    num_ctas: int,
    tile_rows: int,
    group_tiles: int,
    split_k: bool,
) -> list[dict[str, int]]:
    """The GPU's grouped GEMM as its CTAs take it: GemmWork of kernels/gemm/plan.h, item by item.

    Units are 16 rows, the last one's cut by the expert's end; a piece without units is skipped.
    """

def gemm_layout(tile_rows: int, stages: int) -> dict[str, int]:
    """Offsets in that kernel's dynamic shared memory, and its size as ``bytes``."""

def mok_order(
    *, tile_rows: int, group_tiles: int, hidden: int, intermediate: int, num_ctas: int
) -> dict[str, int]:
    """MokOrder of kernels/mok/plan.h, and the fewest tiles of its rings."""

MOK_PULL_ROWS: int

def mok_pass(
    expert_rows: list[int],
    layer: TwinConfig,
    *,
    group_tiles: int,
    num_ctas: int,
    x_at: tuple[int, int],
    hidden_at: tuple[int, int],
) -> dict[str, Any]:
    """A pass over so many rows an expert: its items, row tiles, and where the next one begins."""

def mok_items(
    group_tiles: list[int], *, lag: int, gemm1_blocks: int, gemm2_blocks: int
) -> list[tuple[int, int, int, int]]:
    """(GEMM, group, row tile of the group, column block) in the order that CTAs take them."""
