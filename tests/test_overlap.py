"""What the self-test of a shared GPU demands; tests/gpu has the kernels themselves."""

from types import SimpleNamespace

import pytest

from mokbench.errors import UnsupportedError
from mokbench.fabric import overlap

FABRIC = SimpleNamespace(num_sms=33, ranks_per_gpu=4)


def found(monkeypatch, seconds):
    monkeypatch.setattr(overlap, "overlap_s", lambda fabric, num_ctas: seconds)
    return overlap.require_overlap(FABRIC)


@pytest.mark.parametrize("seconds", [0.0401, 0.0498])
def test_most_of_the_spin_is_enough(monkeypatch, seconds):
    assert found(monkeypatch, seconds) == seconds


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.0001, "at the same time for 0.1 of 50 ms only"),
        (0.039, "at the same time for 39.0 of 50 ms only"),
        (0.0, "one after the other"),
        (-0.05, r"one after the other \(50.0 ms apart\)"),
    ],
)
def test_kernels_that_hardly_met_are_refused(monkeypatch, seconds, text):
    with pytest.raises(UnsupportedError, match=text):
        found(monkeypatch, seconds)
