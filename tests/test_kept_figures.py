"""What the scripts keep beside their figures: which code, machine and versions they are of."""

import json
import sys
from pathlib import Path

import pytest

from mokbench.code_version import code_version


@pytest.fixture
def steps(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "scripts"))
    import steps

    yield steps
    sys.modules.pop("steps", None)


def test_figures_are_kept_with_the_commit_and_whether_it_was_changed(steps, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["scripts/some.py", str(tmp_path), "one"])
    steps.run_steps({"one": lambda out: {"figure": 1}}, "found.json")
    kept = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert kept["code"] == code_version().model_dump(mode="json")
    assert set(kept["code"]) >= {"commit", "dirty"}
    assert kept["figures"] == {"one": {"figure": 1}}
