"""Which tiles the two GEMMs of the expert MLPs get, asked without importing torch."""

from dataclasses import dataclass, replace

from mokbench.gemm_config import (
    PART_BYTES,
    PARTS_A_CTA,
    SOURCE,
    TILE_ROWS,
    GemmConfig,
    choose_gemm,
    gemm_cost,
    gemm_problem,
    may_split,
    planned_rows,
)
from mokbench.systems.options import GemmOptions
from mokbench.workload import Cell, Dtype, Model, Workload

# For what does not depend on the SMs.
_SOME_SMS = 132
# For what a plan must count without asking a GPU: more than any has.
_MANY_SMS = 256


def gemm_reason(cell: Cell, options: GemmOptions) -> str | None:
    """Why the cell's grouped GEMM cannot be had as the options ask for it, or None."""
    if options.gemm == "torch":
        if options.tunes_gemm:
            return (
                "gemm_tile_rows, gemm_stages and gemm_group_tiles are of gemm: ours; leave them out"
            )
        return None
    work = cell.workload
    if work.dtype is not Dtype.BF16:
        return f"our grouped GEMM multiplies bf16, not {work.dtype}; set dtype: bf16"
    model, local_experts = work.model, work.model.experts // work.ranks
    for n, k in ((2 * model.intermediate, model.hidden), (model.hidden, model.intermediate)):
        if problem := gemm_problem(local_experts, n, k):
            return (
                f"{problem} (hidden {model.hidden}, intermediate {model.intermediate}); "
                "set gemm: torch"
            )
    try:
        choose(work, options, _SOME_SMS)
    except ValueError as error:
        return str(error)
    return None


def host_gemm_reason(options: GemmOptions, default: str) -> str | None:
    """The reason for a host cell with options that only the cuda fabric has, or None."""
    if options.gemm != default or options.tunes_gemm:
        return "gemm and gemm_... are of the cuda fabric; the host has one matmul: leave them out"
    return None


def expert_gemm_bytes(rows: int, experts: int, hidden: int, intermediate: int) -> int:
    """What an ExpertGemms holds beyond its weights: packed w13, rows in between, sums of parts."""
    parts = sum(
        PARTS_A_CTA * _MANY_SMS * PART_BYTES for k in (hidden, intermediate) if may_split(k)
    )
    return 2 * (2 * experts * intermediate * hidden + rows * (intermediate + hidden)) + parts


def expanded_bytes(model: Model, local_experts: int, capacity: int, gemm: str) -> int:
    """What ExpandedExperts holds or allocates in a call, beyond weights and x_rows."""
    if gemm == "ours":
        return expert_gemm_bytes(capacity, local_experts, model.hidden, model.intermediate)
    return 2 * capacity * (model.hidden + 3 * model.intermediate)


@dataclass(frozen=True)
class GemmChoice:
    """Configs of gate-and-up (with SwiGLU) and down, and how they came about, a line each."""

    gate_up: GemmConfig
    down: GemmConfig
    notes: tuple[str, ...]

    @property
    def weighted(self) -> "GemmChoice":
        """The same, with a weight for each row behind SwiGLU."""
        return replace(self, gate_up=replace(self.gate_up, row_weights=True))

    @property
    def kernels(self) -> list[tuple[str, str]]:
        """Source and C++ expression of both, for jit.build_all."""
        return [(SOURCE, config.expression) for config in (self.gate_up, self.down)]


def choose(work: Workload, options: GemmOptions, num_sms: int) -> GemmChoice:
    """For one rank: ``planned_rows`` of each expert, on ``num_sms`` SMs."""
    model = work.model
    rows = planned_rows(work)
    experts = model.experts // work.ranks
    found: dict[str, GemmConfig] = {}
    notes = []
    shapes = {
        "gate_up": (2 * model.intermediate, model.hidden),
        "down": (model.hidden, model.intermediate),
    }
    for name, (n, k) in shapes.items():
        config = _config(options, rows, experts, n, k, num_sms)
        found[name] = replace(config, swiglu=name == "gate_up")
        costs = [gemm_cost(height, rows, experts, n, k, num_sms) for height in TILE_ROWS]
        model_says = ", ".join(f"{c.tile_rows}: {c.cycles / 1e3:.0f}" for c in costs)
        notes.append(
            f"{name} GEMM: tiles of {config.tile_rows} rows, {config.stages} stages, groups of "
            f"{config.group_tiles}; model, thousand cycles by tile rows: {model_says}"
        )
    return GemmChoice(found["gate_up"], found["down"], tuple(notes))


def _config(
    options: GemmOptions, rows: float, experts: int, n: int, k: int, num_sms: int
) -> GemmConfig:
    config = choose_gemm(
        rows,
        experts,
        n,
        k,
        num_sms,
        tile_rows=None if options.gemm_tile_rows == "auto" else options.gemm_tile_rows,
        stages=None if options.gemm_stages == "auto" else options.gemm_stages,
    )
    return replace(config, group_tiles=options.gemm_group_tiles)
