"""Which code was measured: one verdict of two commits is warned of, and no base takes another's."""

import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
from launches import gate, launches

from mokbench.code_version import CodeVersion
from mokbench.regression import confirm

CODE = [CodeVersion(version="1", commit=letter * 40, dirty=False) for letter in "abc"]


def said(history: Path, *arguments: object) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gate(*arguments, "--history", history)
    return [str(one.message) for one in caught if "states of the code" in str(one.message)]


def test_runs_of_two_commits_are_one_verdict_with_a_warning(history: Path, tmp_path: Path) -> None:
    launches(tmp_path, "old", 3, start=20, seed=2, code=[CODE[0]])
    launches(tmp_path, "new", 3, start=30, seed=3, code=[CODE[1]])
    (told,) = said(history, tmp_path / "*-*")
    assert told.startswith("one verdict is made of runs of 2 states of the code (mokbench 1, ")
    assert "commit aaaaaaaaaaaa" in told
    assert said(history, tmp_path / "new-*") == []
    gate(tmp_path / "old-*", "--history", history, "--record")
    assert said(history, tmp_path / "*-*") == []  # those that are base have their own code


def test_the_base_of_a_confirmation_is_not_named_after_the_candidate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MOKBENCH_COMMIT", "candidate")
    seen = {}

    def run(command: Sequence[str], env: dict[str, str], **_: object) -> object:
        seen[command[0]] = env.get("MOKBENCH_COMMIT")
        return type("Done", (), {"returncode": 0})()

    monkeypatch.setattr(confirm.subprocess, "run", run)
    for side in ("base", "candidate"):
        confirm._run(Path(side), side, tmp_path / "one.yaml", ["x"], tmp_path / side)
    assert seen == {"base": None, "candidate": "candidate"}
