"""Which mokbench may be the base of a confirmation: a nightly gate must get past a new version."""

from pathlib import Path

import pytest
from launches import gate, h200, launches

from mokbench import gate_command, record
from mokbench.regression import check

METHOD, RECORD = record.METHOD_VERSION, record.RECORD_VERSION


@pytest.mark.parametrize(
    ("versions", "code"),
    [
        (f"{METHOD} {RECORD}", 0),
        (f"{METHOD} {RECORD - 1}", 0),  # a field was added since: its figures mean the same
        (f"{METHOD} {RECORD + 1}", 2),
        (f"{METHOD + 1} {RECORD}", 2),
        ("Segmentation fault", 2),
    ],
)
def test_a_base_with_older_records_confirms(
    history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, versions: str, code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    base = tmp_path / "base"
    base.write_text(f"#!/bin/sh\necho /base/mokbench/record.py\necho {versions}\n")
    base.chmod(0o755)
    launches(tmp_path, "same", 3, start=20, seed=2)
    done = gate("same-*", "--history", history, "--confirm", "--baseline-python", base)
    assert done.exit_code == code, done.stderr
    assert ("their figures do not compare" in done.stderr) is (code == 2)


def test_a_good_commit_of_an_older_method_is_no_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version in (("old", METHOD), ("new", METHOD + 1)):
        for module in ("run_checks", "regression.levels"):
            monkeypatch.setattr(f"mokbench.{module}.METHOD_VERSION", version)
        assert _good(tmp_path, monkeypatch) == ""
        told = {"start": 10 * version, "method_version": version}
        for run in launches(tmp_path, name, 5, seed=1, **told):
            check.record(check.check([run], tmp_path / "history", commit=name))
        assert _good(tmp_path, monkeypatch) == f"{name}\n"


def _good(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(gate_command, "describe", h200)
    return gate("--history", folder / "history", "--good-commit").stdout
