"""A history that was renamed, or is there twice, is exit 2: it must not pass for a new one."""

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from launches import SLOW, gate, h200, launches, verdicts

from mokbench import gate_command
from mokbench.cli import main
from mokbench.regression.check import check, record
from mokbench.regression.history import folder_of


def refused(*arguments: str | Path) -> str:
    done = CliRunner().invoke(main, [*map(str, arguments)])
    assert (done.exit_code, done.stdout) == (2, ""), repr(done.exception)
    return done.stderr


@pytest.mark.parametrize("name", ["old", "{name}.bak", "backup-{name}"])
@pytest.mark.parametrize("kept", ["all", "no machine.json", "no launches.jsonl"])
def test_a_renamed_history_is_said_and_nothing_is_judged_or_recorded(
    history: Path, tmp_path: Path, name: str, kept: str
) -> None:
    launches(tmp_path, "slow", 3, start=20, factors=SLOW)
    own = folder_of(history, h200())
    renamed = own.rename(own.with_name(name.format(name=own.name)))
    if kept != "all":
        (renamed / kept.removeprefix("no ")).unlink()
    for options in ([], ["--record"], ["--accept", "so be it"]):
        said = refused("check", tmp_path / "slow-*", "--history", history, *options)
        assert str(renamed) in said
        assert f"machine {h200().key}, which its name does not say: has it been renamed" in said
    assert not own.exists()
    if kept == "all":
        assert f"call it {own.name}, or move it out" in refused("report", "--history", history)
    renamed.rename(own)
    if kept != "no launches.jsonl":
        assert gate(tmp_path / "slow-*", "--history", history).exit_code == 1


def test_a_renamed_history_beside_a_new_one_is_said(history: Path, tmp_path: Path) -> None:
    launches(tmp_path, "slow", 3, start=20, factors=SLOW)
    own = folder_of(history, h200())
    renamed = own.rename(own.with_name("before"))
    shutil.copytree(renamed, own)
    lines = (own / "launches.jsonl").read_bytes().splitlines(keepends=True)
    (own / "launches.jsonl").write_bytes(b"".join(lines[-2:]))
    said = refused("check", tmp_path / "slow-*", "--history", history)
    assert said.startswith(f"{renamed}: holds launches of machine {h200().key}, which its name")


def test_launches_that_were_moved_to_another_machines_history_are_said(
    history: Path, tmp_path: Path
) -> None:
    other = h200(driver="999")
    record(check(launches(tmp_path, "other", 3, machine=other), history))
    launches(tmp_path, "slow", 3, start=20, factors=SLOW)
    own, file = folder_of(history, h200()), folder_of(history, other) / "launches.jsonl"
    file.write_bytes(file.read_bytes() + (own / "launches.jsonl").read_bytes())
    shutil.rmtree(own)
    said = refused("check", tmp_path / "slow-*", "--history", history)
    assert said.startswith(f"{file}: holds launches of 2 machines")
    assert "holds launches of 2 machines" in refused("report", "--history", history)


def test_the_good_commit_is_not_looked_for_past_a_renamed_history(
    history: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_command, "describe", h200)
    own = folder_of(history, h200())
    own.rename(own.with_name("old"))
    assert "has it been renamed" in refused("check", "--good-commit", "--history", history)


def test_what_else_lies_in_a_history_is_let_be(history: Path, tmp_path: Path) -> None:
    record(check(launches(tmp_path, "other", 3, machine=h200(driver="999")), history))
    (history / "README.md").write_text("which machine is whose")
    (history / "notes").mkdir()
    (history / "gone").symlink_to("nowhere")
    (history / "newest").symlink_to(folder_of(history, h200()).name)
    # Another machine's check is just writing this one.
    file = folder_of(history, h200(driver="999")) / "launches.jsonl"
    file.write_bytes(file.read_bytes() + b'{"history_version":2,"launch":"12')
    runs = launches(tmp_path, "slow", 3, start=20, factors=SLOW, seed=2)
    assert verdicts(check(runs, history))["push"] == "SLOWER"


def test_links_that_lead_nowhere_beside_a_history_are_no_bug(history: Path, tmp_path: Path) -> None:
    launches(tmp_path, "slow", 3, start=20, factors=SLOW)
    (history / "loop").symlink_to("loop")
    assert gate(tmp_path / "slow-*", "--history", history).exit_code == 1
    own = folder_of(history, h200())
    own.rename(own.with_name("old"))
    own.symlink_to(own.name)
    assert "has it been renamed" in refused("check", tmp_path / "slow-*", "--history", history)
