"""Prints docs/metrics.md's table of the generators' imbalance: seeded, so the same anywhere.

    python scripts/imbalance_table.py

Averages over seeds 0 to 39 of 4096 tokens in all, 256 experts, top-8, contiguous placement.
"""

from statistics import mean
from typing import Any

from mokbench import metrics
from mokbench.routing import RoutingSpec, generate
from mokbench.workload import Dtype, Model, Workload

NUM_SEEDS = 40
TOKENS = 4096
MODEL = Model("table", hidden=64, intermediate=64, experts=256, top_k=8)
ROUTINGS: dict[str, Any] = {
    "balanced": "balanced",
    "typical": "typical",
    "lognormal 0.5": {"lognormal": 0.5},
    "skewed": "skewed",
    "dirichlet 1": {"dirichlet": 1},
    "extreme": "extreme",
    "zipf 0.8": {"zipf": 0.8},
}


def draws(spec: Any, ranks: int) -> list[metrics.Imbalance]:
    """One imbalance a seed."""
    found = []
    for seed in range(NUM_SEEDS):
        work = Workload(
            model=MODEL,
            ranks=ranks,
            tokens_per_rank=TOKENS // ranks,
            dtype=Dtype.BF16,
            routing=RoutingSpec.model_validate(spec),
            seed=seed,
        )
        found.append(metrics.imbalance(generate(work), MODEL.experts, ranks))
    return found


def main() -> None:
    """The table's rows, and the spread of the rank figure from seed to seed at 32 ranks."""
    print("| | expert max/mean | gini | rank max/mean, 8 ranks | 32 ranks (least to most) |")
    print("|---|---|---|---|---|")
    for name, spec in ROUTINGS.items():
        few, many = draws(spec, 8), draws(spec, 32)
        expert = mean(i.expert_max_over_mean or 0 for i in few)
        gini = mean(i.gini or 0 for i in few)
        rank = mean(i.rank_max_over_mean or 0 for i in few)
        wide = [i.rank_max_over_mean or 0 for i in many]
        spread = f"{mean(wide):.2f} ({min(wide):.2f} to {max(wide):.2f})"
        print(f"| {name} | {expert:.2f} | {gini:.2f} | {rank:.2f} | {spread} |", flush=True)


if __name__ == "__main__":
    main()
