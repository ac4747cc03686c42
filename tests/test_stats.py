import math

import numpy as np
import pytest
from scipy.stats import binom

from mokbench.stats import (
    STABLE_WINDOW,
    Ratio,
    StopRule,
    block_medians,
    interval_ranks,
    linear_fit,
    median_interval,
    noise,
    paired_ratio,
    percentile,
    quantity,
    separate_ratio,
    summarize,
)


@pytest.mark.parametrize(
    "n, ranks",
    # Tables of the sign test's interval: n = 6 needs [min, max], n = 10 the 2nd, n = 20 the 6th.
    [(1, None), (5, None), (6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (10, (2, 9)), (20, (6, 15))],
)
def test_interval_ranks_are_those_of_the_sign_test(n: int, ranks: tuple[int, int] | None) -> None:
    assert interval_ranks(n) == ranks


@pytest.mark.parametrize("n", [6, 7, 23, 100, 1001, 20_000])
def test_interval_ranks_are_the_narrowest_that_reach_the_confidence(n: int) -> None:
    low, high = interval_ranks(n) or (0, 0)
    assert low + high == n + 1
    assert 1 - 2 * binom.cdf(low - 1, n, 0.5) >= 0.95
    assert 1 - 2 * binom.cdf(low, n, 0.5) < 0.95


@pytest.mark.parametrize("n", [6, 15, 60])
def test_interval_covers_the_median_of_a_skewed_distribution(n: int) -> None:
    rng = np.random.default_rng(11)
    covered = 0
    for _ in range(2000):
        low, high = median_interval(rng.exponential(1.0, n)) or (math.nan, math.nan)
        covered += low <= math.log(2) <= high
    # Exact coverage is at least 95 %; 2000 trials leave a standard error of 0.5 %.
    assert covered / 2000 > 0.935


def test_summary_of_few_samples_has_no_interval() -> None:
    step = summarize([5.0, 1.0, 3.0])
    assert (step.median, step.p95, step.min, step.n) == (3.0, 5.0, 1.0, 3)
    assert step.ci_low is None
    assert step.ci_high is None


def test_summary_by_hand() -> None:
    step = summarize([float(i) for i in range(1, 21)])
    assert (step.median, step.p95, step.min, step.n) == (10.5, 19.0, 1.0, 20)
    assert (step.ci_low, step.ci_high) == (6.0, 15.0)


def test_interval_from_blocks_is_wider_when_blocks_drift() -> None:
    rng = np.random.default_rng(3)
    block = np.repeat(np.arange(8), 50)
    samples = 100 + np.repeat(rng.normal(0, 5, 8), 50) + rng.normal(0, 0.5, 400)
    pooled, blocked = summarize(samples), summarize(samples, block)
    assert pooled.ci_high is not None
    assert pooled.ci_low is not None
    assert blocked.ci_high is not None
    assert blocked.ci_low is not None
    assert blocked.ci_high - blocked.ci_low > 1.5 * (pooled.ci_high - pooled.ci_low)
    medians = block_medians(samples, block)
    assert blocked.ci_low == min(medians)
    assert blocked.ci_low <= blocked.median <= blocked.ci_high


def test_few_blocks_have_no_interval_however_many_samples() -> None:
    assert summarize(np.arange(1.0, 101.0), np.repeat(np.arange(5), 20)).ci_low is None


def test_block_medians_by_hand() -> None:
    assert block_medians([1, 2, 9, 4, 6], [0, 0, 0, 3, 3]) == [2.0, 5.0]
    with pytest.raises(ValueError, match="2 samples but 3 block"):
        block_medians([1, 2], [0, 0, 0])


@pytest.mark.parametrize("bad", [[], [[1.0]], [1.0, math.nan], [math.inf]])
def test_what_is_no_sample_is_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match=r"at least one number|must be finite"):
        summarize(bad)


def test_noise_is_half_the_interval_over_the_median() -> None:
    assert noise([100.0] * 8) == 0.0
    assert noise([90, 95, 100, 100, 105, 110]) == pytest.approx(0.1)
    assert noise([100.0] * 5) is None


def test_percentile_is_a_sample() -> None:
    assert percentile(range(1, 101), 0.99) == 99
    assert percentile([1, 2], 0.5) == 1


def test_quantity_by_hand() -> None:
    found = quantity(range(1, 101))
    assert (found.median, found.p99, found.n) == (50.5, 99.0, 100)
    assert (found.ci_low, found.ci_high) == (40.0, 61.0)
    assert quantity([2.0]).ci_low is None


def test_paired_ratio_cancels_what_both_blocks_suffer() -> None:
    drift = np.array([1.0, 1.5, 0.7, 2.0, 1.1, 0.9, 1.3])
    ratio = paired_ratio(80 * drift, 100 * drift)
    assert ratio.value == pytest.approx(0.8)
    assert ratio.low == pytest.approx(0.8)
    assert ratio.high == pytest.approx(0.8)
    assert ratio.n == 7


def test_paired_ratio_of_unequal_lengths_uses_common_blocks() -> None:
    assert paired_ratio([1.0, 2.0, 100.0], [2.0, 2.0]) == Ratio(0.75, None, None, 2)
    with pytest.raises(ValueError, match="no time"):
        paired_ratio([1.0], [0.0])


def test_paired_interval_covers_the_true_ratio() -> None:
    rng = np.random.default_rng(5)
    covered = 0
    for _ in range(1000):
        drift = rng.lognormal(0, 0.3, 12)
        found = paired_ratio(
            90 * drift * rng.lognormal(0, 0.02, 12), 100 * drift * rng.lognormal(0, 0.02, 12)
        )
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 0.9 <= found.high
    assert covered / 1000 > 0.93


def test_separate_ratio_takes_both_intervals_at_their_worst() -> None:
    a, b = summarize([8.0, 9, 10, 10, 11, 12]), summarize([16.0, 18, 20, 20, 22, 24])
    found = separate_ratio(a, b)
    assert (found.value, found.low, found.high) == (0.5, 8 / 24, 12 / 16)
    assert separate_ratio(summarize([1.0]), b) == Ratio(1 / 20, None, None, 1)


def test_fit_by_hand() -> None:
    fit = linear_fit([2, 4, 8], [3.0, 5.0, 9.0])
    assert fit.alpha == pytest.approx(1.0)
    assert fit.beta == pytest.approx(1.0)
    assert fit.r2 == pytest.approx(1.0)
    assert fit.at(72) == pytest.approx(73.0)


def test_fit_matches_numpy() -> None:
    rng = np.random.default_rng(2)
    x, y = rng.uniform(0, 10, 30), rng.normal(0, 1, 30)
    beta, alpha = np.polyfit(x, y, 1)
    fit = linear_fit(x.tolist(), y.tolist())
    assert fit.alpha == pytest.approx(alpha)
    assert fit.beta == pytest.approx(beta)
    assert fit.r2 == pytest.approx(np.corrcoef(x, y)[0, 1] ** 2)


def test_fit_without_evidence_has_no_r2() -> None:
    assert linear_fit([2, 4], [1.0, 2.0]).r2 is None
    assert linear_fit([2, 4, 8], [1.0, 1.0, 1.0]).r2 is None
    with pytest.raises(ValueError, match="two different n, got 1"):
        linear_fit([4, 4], [1.0, 2.0])


def test_stop_on_noise_only_after_the_least_blocks() -> None:
    rule = StopRule(noise=0.02, min_blocks=8, max_time_s=10)
    assert rule.decide([100.0] * 7, 1.0) is None
    assert rule.decide([100.0] * 8, 1.0) == "noise"


def test_stop_at_the_time_limit_even_without_an_interval() -> None:
    rule = StopRule(noise=0.02, min_blocks=6, max_time_s=10)
    six = [100.0, 300.0] * 3
    assert rule.decide(six, 9.9) is None
    assert rule.decide(six, 10.0) == "time"
    # Short of its least blocks a row gets twice the time, and no more.
    assert rule.decide([100.0, 300.0], 19.9) is None
    assert rule.decide([100.0, 300.0], 20.0) == "time"
    assert rule.decide([], 20.0) == "time"


def test_stop_when_the_spread_is_known_and_the_target_out_of_reach() -> None:
    blocks = [90.0, 110.0] * STABLE_WINDOW
    rule = StopRule(noise=0.001, min_blocks=6, max_time_s=10)
    assert rule.decide(blocks[: STABLE_WINDOW + 2], 1.0) is None
    assert rule.decide(blocks, 1.0) == "stable"


def test_go_on_when_the_target_is_within_reach() -> None:
    rng = np.random.default_rng(9)
    blocks = (100 * rng.normal(1, 0.05, 64)).tolist()
    now = noise(blocks)
    assert now is not None
    # A hundred times the time makes the interval ten times narrower.
    assert StopRule(now / 5, 6, 100.0).decide(blocks, 1.0) is None
    assert StopRule(now / 50, 6, 100.0).decide(blocks, 1.0) == "stable"


def test_unstable_spread_goes_on_until_the_time_limit() -> None:
    blocks = [95.0, 105.0] * STABLE_WINDOW + [105.0, 900.0, 95.0, 2000.0]
    assert StopRule(1e-4, 6, 10.0).decide(blocks, 1.0) is None
    assert StopRule(1e-4, 6, 10.0).decide(blocks, 10.0) == "time"
