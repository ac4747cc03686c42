"""The harness-against-a-bare-loop figure of scripts/h200_fabric.py: its interval, and its power."""

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "scripts"))
    import h200_fabric

    yield h200_fabric
    sys.modules.pop("h200_fabric", None)


@pytest.mark.parametrize("overhead", [1.0, 1.03])
def test_the_interval_tells_three_percent_at_the_noise_that_was_seen(script, overhead):
    # results/h200/fabric/fabric.json: blocks of one side spread by 2.5 %, before by 4 to 7.
    rng = np.random.default_rng(0)
    bare, harness = rng.normal(9700, 0.05 * 9700, (2, script._BLOCKS))
    found = script.overhead_figures(
        {"bare": bare.tolist(), "harness": (overhead * harness).tolist()}
    )
    low, high = found["local_harness_over_bare_95"]
    assert low < found["local_harness_over_bare"] < high
    assert high - low < 0.03
    assert (low > 1.0) == (overhead > 1.0)
    assert found["block_pairs"] == script._BLOCKS
