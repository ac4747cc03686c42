"""The gate's statistics by simulation; scripts/regression_power.py has models and all tables."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from mokbench.regression import change_points
from mokbench.regression.shift import against_history, between, median_variance
from mokbench.regression.verdict import Limits, Verdict, decide

_PATH = Path(__file__).parents[1] / "scripts" / "regression_power.py"
_SPEC = importlib.util.spec_from_file_location("regression_power", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
power = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(power)

TRIALS = 4000
ONE_PERCENT = power.MACHINES["1 %"]


def at_most(share: float) -> float:
    """What a share may come out as in TRIALS draws, once in a thousand times."""
    return float(stats.binom.ppf(0.999, TRIALS, share)) / TRIALS


@pytest.mark.parametrize(("base", "candidate"), [(5, 3), (10, 1), (10, 3), (10, 5), (30, 3)])
def test_false_alarms_are_at_most_1_percent_at_1_percent_noise(base: int, candidate: int) -> None:
    found = power.gate(ONE_PERCENT, base, candidate, 1.0, TRIALS)
    assert found[Verdict.SLOWER] <= at_most(0.01)
    assert found[Verdict.FASTER] <= at_most(0.01)


def test_a_5_percent_slowdown_is_found_with_10_and_3_launches() -> None:
    assert power.gate(ONE_PERCENT, 10, 3, 1.05, TRIALS)[Verdict.SLOWER] >= 0.99
    assert power.gate(ONE_PERCENT, 10, 3, 1 / 1.05, TRIALS)[Verdict.FASTER] >= 0.99


def test_unchanged_series_are_called_the_same() -> None:
    assert power.gate(ONE_PERCENT, 10, 3, 1.0, TRIALS)[Verdict.SAME] >= 0.97


def test_noise_of_5_percent_is_ambiguous_and_not_called_the_same() -> None:
    found = power.gate(power.Machine(0.05), 10, 3, 1.0, TRIALS)
    assert found[Verdict.SLOWER] <= at_most(0.02)
    assert found[Verdict.SAME] <= 0.01
    assert found[Verdict.AMBIGUOUS] >= 0.9


def test_bad_launches_of_a_dirty_machine_cost_little() -> None:
    dirty = power.MACHINES["1 %, dirty"]
    assert power.gate(dirty, 10, 3, 1.0, TRIALS)[Verdict.SLOWER] <= at_most(0.018)
    assert power.gate(dirty, 10, 3, 1.05, TRIALS)[Verdict.SLOWER] >= 0.76
    assert power.confirmed(dirty, 10, 1.05, TRIALS) >= 0.65
    assert power.confirmed(dirty, 10, 1.0, TRIALS) <= at_most(0.0015)


@pytest.mark.parametrize("base", [10, 20, 30])
@pytest.mark.parametrize("bad", [0.03, 0.05, 0.1, 0.2])
@pytest.mark.parametrize("share", [0.1, 0.2, 0.3, 0.5])
def test_a_machine_with_two_modes_is_not_called_slower(share: float, bad: float, base: int) -> None:
    found = power.gate(power.Machine(0.005, share, bad), base, 3, 1.0, TRIALS)
    assert found[Verdict.SLOWER] <= at_most(0.02)
    assert found[Verdict.FASTER] <= at_most(0.01)


def test_a_base_that_was_often_there_makes_a_suspect_and_not_a_slowdown() -> None:
    quiet = list(np.exp(np.random.default_rng(0).normal(0, 0.005, 9)))
    for bad, verdict in ((1.1, Verdict.AMBIGUOUS), (1.5, Verdict.SLOWER)):
        shifts = against_history([[*quiet, bad]], [[1.1, 1.1, 1.105]])
        (call,) = decide(shifts, None, Limits())
        assert call.verdict is verdict
        assert call.p is not None
        assert call.p <= Limits().alpha  # measured again by --confirm, and no base until then
    (five,) = decide(against_history([[*quiet, 1.1]], [[1.1] * 5]), None, Limits())
    assert five.verdict is Verdict.SLOWER


def test_confirmation_keeps_what_is_real() -> None:
    assert power.confirmed(ONE_PERCENT, 10, 1.0, TRIALS) <= at_most(0.0005)
    assert power.confirmed(ONE_PERCENT, 10, 1.05, TRIALS) >= 0.9


def test_a_report_of_100_series_has_a_false_alarm_in_1_percent_of_reports() -> None:
    false, found = power.reports(ONE_PERCENT, 30, 100, 100)
    assert false <= 0.05
    assert found >= 0.9


def test_pooled_iterations_cry_wolf_which_is_why_launches_are_the_unit() -> None:
    assert power.pooled(ONE_PERCENT, 10, 3, 100) > 0.2


def test_compare_of_launches_holds_its_level() -> None:
    assert float(np.mean(power.sides(ONE_PERCENT, 3, 1.0, TRIALS, alpha=0.01))) <= at_most(0.01)
    assert float(np.mean(power.sides(ONE_PERCENT, 5, 1.05, TRIALS, alpha=0.01))) >= 0.97


def test_two_groups_are_students_t() -> None:
    a, b = [10.0, 10.1, 9.9, 10.05], [10.4, 10.6, 10.5]
    shifts = between([a], [b])
    expected = stats.ttest_ind(np.log(b), np.log(a), alternative="greater")
    assert shifts.p_above()[0] == pytest.approx(expected.pvalue)
    low, high = (float(x[0]) for x in shifts.interval(0.95))
    both = stats.ttest_ind(np.log(b), np.log(a)).confidence_interval(0.95)
    assert np.log([low, high]) == pytest.approx([both.low, both.high])


def test_a_clock_read_with_noise_does_not_hide_a_slowdown() -> None:
    rng = np.random.default_rng(8)
    base, base_clock = np.exp(rng.normal(0, 0.01, (2, 2000, 10)))
    found, clock = np.exp(rng.normal(0, 0.01, (2, 2000, 3)))
    base_clock, clock = base_clock**2, clock**2  # 2 % from launch to launch
    for slower, clock_ratio, verdict, least in (
        (1.05, 1.0, Verdict.SLOWER, 0.92),
        (1.08, 1 / 1.03, Verdict.SLOWER, 0.72),
        (1.05, 1 / 1.05, Verdict.CLOCK, 0.92),
    ):
        time = slower * found
        cycles = against_history(base * base_clock, time * clock * clock_ratio)
        calls = decide(against_history(base, time), cycles, Limits(), together=False)
        share = np.mean([call.verdict is verdict for call in calls])
        assert share >= least, (slower, clock_ratio, share)


def test_a_prediction_interval_without_outliers_is_the_textbooks() -> None:
    base = np.exp(np.random.default_rng(0).normal(0, 0.01, 12))
    shifts = against_history([base], [[1.03]])
    logs = np.log(base)
    t = (np.log(1.03) - logs.mean()) / (logs.std(ddof=1) * np.sqrt(1 + 1 / 12))
    assert shifts.p_above()[0] == pytest.approx(stats.t.sf(t, 11))


def test_one_bad_launch_moves_neither_base_nor_candidate() -> None:
    base = np.exp(np.random.default_rng(0).normal(0, 0.01, 12))
    clean = against_history([base], [[1.0, 1.005, 0.995]])
    dirty = against_history([[*base, 1.5]], [[1.0, 1.005, 1.5]])
    assert dirty.spread[0] == pytest.approx(clean.spread[0])
    assert dirty.ratio[0] == pytest.approx(clean.ratio[0], abs=0.006)


def test_missing_launches_are_left_out() -> None:
    full = against_history([[1.0, 1.01, 0.99, 1.02, 1.0]], [[1.1, 1.11, 1.12]])
    gaps = against_history([[1.0, np.nan, 1.01, 0.99, 1.02, 1.0]], [[np.nan, 1.1, 1.11, 1.12]])
    assert gaps.p_above()[0] == pytest.approx(full.p_above()[0])
    assert (gaps.base_n[0], gaps.candidate_n[0]) == (5, 3)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.inf])
def test_values_that_are_no_times_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        against_history([[1.0, 1.0, bad]], [[1.0]])
    with pytest.raises(ValueError, match="positive"):
        change_points.find([1.0] * 6 + [bad])


def test_equal_values_do_not_divide_by_zero() -> None:
    calls = decide(against_history([[5.0] * 10] * 2, [[5.0] * 3, [5.2] * 3]), None, Limits())
    assert [call.verdict for call in calls] == ["SAME", "SLOWER"]
    assert calls[1].spread == 0.0025


def test_the_median_of_three_varies_as_the_formula_says() -> None:
    draws = np.random.default_rng(0).normal(size=(200_000, 5))
    for k in (1, 3, 5):
        assert np.median(draws[:, :k], axis=1).var() == pytest.approx(
            float(median_variance(k)), rel=0.03
        )


def test_change_points_are_found_where_they_are_and_spikes_are_none() -> None:
    rng = np.random.default_rng(3)
    values = np.exp(rng.normal(0, 0.01, 40))
    values[15:] *= 1.06
    values[30:] *= 0.9
    assert change_points.find(values) == [15, 30]
    assert change_points.levels(values, [15, 30]) == pytest.approx([1.0, 1.06, 0.954], rel=0.01)
    assert power.spiked(60) <= 0.05
    assert change_points.find([1.0, 1.0, 2.0, 2.0]) == []


@pytest.mark.parametrize("seed", range(8))
def test_the_fit_is_the_best_of_all_pairs_of_levels(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 1, 9 + seed % 2)
    x[5:] += 20

    def cost(at: int) -> float:
        return float(sum(np.abs(s - np.median(s)).sum() for s in (x[:at], x[at:])))

    best = min(range(3, len(x) - 2), key=cost)
    assert change_points.find(np.exp(x / 100)) == [best]


def test_change_points_in_quiet_series_are_rare() -> None:
    assert power.changes(0.01, 100, 0, 1.0, 100) <= 0.05
    assert power.changes(0.01, 30, 4, 1.05, 60) >= 0.9
