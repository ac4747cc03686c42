"""What the self-test of a shared GPU demands; tests/gpu has the kernels themselves."""

from types import SimpleNamespace

import pytest

from mokbench.errors import UnsupportedError
from mokbench.fabric import overlap

FABRIC = SimpleNamespace(num_sms=33, ranks_per_gpu=4, gather=lambda value: [0.05, value])


def found(monkeypatch, *tries):
    left = list(tries)
    monkeypatch.setattr(overlap, "overlap_s", lambda *_: left.pop(0) if len(left) > 1 else left[0])
    return overlap.require_overlap(FABRIC)


@pytest.mark.parametrize("seconds", [0.0401, 0.0498])
def test_most_of_the_spin_is_enough(monkeypatch, seconds):
    assert found(monkeypatch, seconds) == seconds


def test_one_late_launch_is_no_refusal(monkeypatch):
    assert found(monkeypatch, 0.02, 0.0499) == 0.0499
    with pytest.raises(UnsupportedError):
        found(monkeypatch, 0.02, -0.01, 0.03, 0.0499)


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
