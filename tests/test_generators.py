import numpy as np
import pytest

from mokbench import generators, metrics
from mokbench.routing import RoutingSpec, generate
from mokbench.workload import Dtype, Model, Workload


def average_imbalance(spec: object, ranks: int, draws: int = 12) -> metrics.Imbalance:
    """Over seeds, 4096 tokens in all, E = 256, k = 8, as in the published calibration."""
    found = []
    for seed in range(draws):
        work = Workload(
            model=Model("test", 64, 64, 256, 8),
            ranks=ranks,
            tokens_per_rank=4096 // ranks,
            dtype=Dtype.BF16,
            routing=RoutingSpec.model_validate(spec),
            seed=seed,
        )
        found.append(metrics.imbalance(generate(work), 256, ranks))
    means = {
        name: float(np.mean([getattr(i, name) for i in found]))
        for name in ("expert_max_over_mean", "rank_max_over_mean", "gini")
    }
    return metrics.Imbalance(pair_max_over_mean=None, cv=None, empty_experts=0, **means)


# Expected: an independent script's averages over 20 draws, placement at random.
@pytest.mark.parametrize(
    "spec, ranks, expert, gini, rank",
    [
        ("balanced", 8, 1.27, 0.05, 1.02),
        ("balanced", 32, 1.27, 0.05, 1.06),
        ("extreme", 32, 11.9, 0.40, 2.56),
        ({"zipf": 0.8}, 8, 17.9, 0.51, 1.50),
        ({"lognormal": 0.5}, 32, 3.5, 0.27, 1.42),
        ({"lognormal": 0.7}, 8, 5.2, 0.37, 1.21),
        ({"dirichlet": 5}, 8, 2.8, 0.25, 1.11),
        ({"dirichlet": 1}, 32, 6.4, 0.49, 1.88),
    ],
    ids=str,
)
def test_calibration(spec: object, ranks: int, expert: float, gini: float, rank: float) -> None:
    found = average_imbalance(spec, ranks)
    assert found.expert_max_over_mean == pytest.approx(expert, rel=0.12)
    assert found.gini == pytest.approx(gini, rel=0.06, abs=0.01)
    assert found.rank_max_over_mean is not None
    assert found.rank_max_over_mean - 1 == pytest.approx(rank - 1, rel=0.3, abs=0.01)


def test_choice_without_replacement_has_the_right_odds() -> None:
    # Rates 3, 2, 1 and K = 2: P(first, second) = r1 / 6 * r2 / (6 - r1).
    rates = np.array([3.0, 2.0, 1.0])
    routes = generators.weighted_choice(np.random.default_rng(0), rates, 200_000, 2)
    for first, second in [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]:
        share = ((routes[:, 0] == first) & (routes[:, 1] == second)).mean()
        expected = rates[first] / 6 * rates[second] / (6 - rates[first])
        assert share == pytest.approx(expected, abs=0.005)


def test_popularity_of_each_generator() -> None:
    rng = np.random.default_rng(0)
    zipf = generators.popularity(rng, "zipf", 0.5, 4, 0)
    assert sorted(zipf) == pytest.approx([4**-0.5, 3**-0.5, 2**-0.5, 1])
    assert not np.array_equal(zipf, np.sort(zipf)[::-1])  # permuted
    normal = np.log(generators.popularity(rng, "lognormal", 0.6, 20_000, 0))
    assert normal.std() == pytest.approx(0.6, rel=0.03)
    gamma = generators.popularity(rng, "dirichlet", 4.0, 20_000, 0)
    assert gamma.std() / gamma.mean() == pytest.approx(4.0**-0.5, rel=0.03)
    assert generators.popularity(rng, "balanced", 0, 5, 2).tolist().count(0.0) == 2


def test_popularity_never_leaves_fewer_experts_than_needed() -> None:
    rates = generators.popularity(np.random.default_rng(0), "dirichlet", 0.01, 64, 10)
    assert (rates > 0).sum() == 54
    assert rates.max() == 1
    assert rates[rates > 0].min() >= 1e-9
