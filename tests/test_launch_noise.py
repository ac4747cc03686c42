"""compare --launch-noise: a noise that is told stands in where launches show no larger one."""

import numpy as np
import pytest
from scipy.stats import norm

from mokbench.regression.shift import between


def test_launches_that_differ_by_more_are_judged_by_themselves() -> None:
    rng = np.random.default_rng(0)
    a, b = (100 * np.exp(rng.normal(0, 0.02, (4000, 2))) for _ in range(2))
    own, told = between(a, b), between(a, b, 0.001)
    assert np.array_equal(own.p_above(), told.p_above())
    # As if known, the spread of two and two launches would raise an alarm in 5 % of pairs.
    assert np.mean((told.p_above() <= 0.01) & (told.ratio >= 1.02)) < 0.015


def test_a_larger_noise_and_that_of_one_launch_is_taken_as_known() -> None:
    for a, b in (([100.0, 100.1], [104.0, 104.1]), ([100.0], [104.0])):
        found = between([a], [b], 0.02)
        error = 0.02 * np.sqrt(2 / len(a))
        assert found.spread[0] == 0.02
        assert found.p_above()[0] == pytest.approx(norm.sf(found.log_ratio[0] / error), rel=1e-3)
    assert np.isnan(between([[np.nan]], [[100.0]], 0.02).p_above()[0])
