import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_run import fake_meta
from launches import CELLS, cell, gate, h200, launches, write_launch

import mokbench
from mokbench import gate_command, machine
from mokbench.cells import expand
from mokbench.config import parse
from mokbench.errors import ConfigError, MokbenchError, ResultsError
from mokbench.record import Record
from mokbench.regression import confirm
from mokbench.regression.check import accept, check, record
from mokbench.regression.confirm import Confirmation, config_of
from mokbench.regression.history import History, folder_of
from mokbench.regression.launch import Launch
from mokbench.regression.levels import good_commit, was_good
from mokbench.results import RunFolder

ONE_CELL = """\
name: one-cell
fabric: host
ranks: 1
model: {name: tiny, hidden: 64, intermediate: 64, experts: 8, top_k: 2}
systems: [local]
sweep: {tokens_per_rank: [4]}
measure: {regimes: [isolated], noise: 20%, blocks: 2, max_time: 100ms, deadline: 20s,
  signals: false, min_step: false}
"""


def base_python(folder: Path) -> Path:
    """A python whose mokbench is another copy than this one's."""
    home = Path(mokbench.__file__).parent
    shutil.copytree(home, folder / "mokbench", ignore=shutil.ignore_patterns("__pycache__"))
    if not (home / "kernels").exists():
        (folder / "kernels").symlink_to(home.parent / "kernels")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return python


@pytest.fixture
def slow(tmp_path: Path) -> tuple[list[RunFolder], Path]:
    """Three launches in which push is 6 % slower, and the history of ten they are held against."""
    root = tmp_path / "history"
    for run in launches(tmp_path, "base", 10, seed=1):
        record(check([run], root))
    return launches(tmp_path, "slow", 3, start=20, factors={"push": 1.06}, seed=2), root


@pytest.fixture
def rerun(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Replaces the confirming runs by made-up ones; returns the order in which they ran."""

    def install(push: float, noise: float = 0.005, **changes: object) -> list[str]:
        order: list[str] = []
        rng = np.random.default_rng(5)

        def run(_python: Path, side: str, _config: Path, ids: Sequence[str], out: Path) -> None:
            order.append(side)
            assert [name.split(".")[1] for name in ids] == ["push"]
            value = CELLS["push"] * (push if side == "candidate" else 1.0)
            own = changes if side == "candidate" else {}
            step = value * float(np.exp(rng.normal(0, noise)))
            records = [cell("push", step).model_copy(update=own)]
            write_launch(out, records, 30 + len(order))

        monkeypatch.setattr(confirm, "_run", run)
        monkeypatch.setattr(confirm, "_check", lambda _: None)
        return order

    return install


def plan(tmp_path: Path, **changes: object) -> Confirmation:
    made = Confirmation(Path("/base/python"), tmp_path / "config.yaml", tmp_path / "confirm")
    return replace(made, **changes)


def push_of(checked) -> object:
    return next(one.call for one in checked.judged if ".push." in one.series[0])


def test_a_regression_that_repeats_is_confirmed(slow, rerun, tmp_path: Path) -> None:
    runs, root = slow
    order = rerun(push=1.06)
    checked = check(runs, root, confirmation=plan(tmp_path))
    assert order == ["base", "candidate", "candidate", "base", "base", "candidate"]
    assert push_of(checked).verdict == "SLOWER"
    assert "in 3 interleaved rounds +5.6 %" in push_of(checked).why
    assert checked.exit_code(strict=False) == 1


def test_one_that_does_not_repeat_is_ambiguous_and_no_base_is_lost(
    slow, rerun, tmp_path: Path
) -> None:
    runs, root = slow
    rerun(push=1.0)
    checked = check(runs, root, confirmation=plan(tmp_path))
    assert push_of(checked).verdict == "AMBIGUOUS"
    assert push_of(checked).why.startswith("not confirmed, no base yet: +")
    assert (checked.exit_code(strict=False), checked.exit_code(strict=True)) == (0, 4)
    record(checked)
    flags = [x.flags for x in History.read(folder_of(root, h200())).launches]
    assert [bool(one) for one in flags] == [False] * 10 + [True] * 3


@pytest.mark.parametrize(
    ("commit", "push", "noise", "clear"),
    [
        ("good", 1.0, 0.005, True),
        ("other", 1.0, 0.005, False),  # may be as slow
        (None, 1.0, 0.005, False),
        ("good", 1.0, 0.04, False),  # not confirmed, and not the same either
    ],
)
def test_only_a_good_base_that_is_the_same_clears_a_suspect(
    rerun, tmp_path: Path, commit: str | None, push: float, noise: float, clear: bool
) -> None:
    root = tmp_path / "history"
    for run in launches(tmp_path, "base", 10, seed=1):
        record(check([run], root, commit="good"))
    runs = launches(tmp_path, "slow", 3, start=20, factors={"push": 1.06}, seed=2)
    rerun(push=push, noise=noise)
    checked = record(
        check(runs, root, commit="new", confirmation=plan(tmp_path, baseline_commit=commit))
    )
    assert push_of(checked).verdict == "AMBIGUOUS"
    history = History.read(folder_of(root, h200()))
    assert good_commit(history.launches, history.levels) == ("new" if clear else "good")
    assert bool(history.launches[-1].flags) is not clear


@pytest.mark.parametrize("follows", [True, False], ids=["last good commit", "24 hours ago"])
def test_a_slowdown_never_becomes_the_base_of_a_nightly_gate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, follows: bool
) -> None:
    root = tmp_path / "history"
    for run in launches(tmp_path, "base", 10, seed=1):
        record(check([run], root, commit="good"))
    told = []
    for night in range(1, 9):
        history = History.read(folder_of(root, h200()))
        good = good_commit(history.launches, history.levels)
        base = good if follows else f"slow-{night - 1}" if night > 1 else "good"
        factor = 1.0 if base == "good" else 1.06

        def measure(_plan, _ids, night: int = night, factor: float = factor):
            sides = []
            for side, push in (("a", factor), ("b", 1.06)):
                seed, own = 100 * night + ord(side), tmp_path / f"again-{night}"
                made = launches(own, side, 3, start=500, seed=seed, factors={"push": push})
                sides.append([Launch.of(run) for run in made])
            return tuple(sides)

        monkeypatch.setattr(confirm, "measure", measure)
        monkeypatch.setattr(confirm, "_check", lambda _: None)
        runs = launches(
            tmp_path, f"n{night}", 3, start=20 + 5 * night, factors={"push": 1.06}, seed=night
        )
        how = plan(tmp_path, baseline_commit=base)
        checked = record(check(runs, root, commit=f"slow-{night}", confirmation=how))
        assert push_of(checked).base_n == 10
        told.append(str(push_of(checked).verdict))
    # Against a base that is as slow, the first night is red and the rest are left open.
    assert set(told[0 if follows else 1 :]) == ({"SLOWER"} if follows else {"AMBIGUOUS"})


def test_a_good_commit_of_an_older_level_clears_nothing(tmp_path: Path) -> None:
    root = tmp_path / "history"
    series = ("tiny.push.r4.t128.balanced.bf16.isolated", "step_time_us")
    for run in launches(tmp_path, "base", 10, seed=1):
        record(check([run], root, commit="old"))
    fast = launches(tmp_path, "fast", 5, start=20, factors={"push": 0.9}, seed=2)
    accept(check(fast, root, commit="fast"), "better tiles")
    history = History.read(folder_of(root, h200()))
    assert [was_good(x, series, history.launches, history.levels) for x in ("old", "fast")] == [
        False,
        True,
    ]
    assert good_commit(history.launches, history.levels) == "fast"


def test_check_prints_the_last_good_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gate_command, "describe", h200)
    root = tmp_path / "history"
    assert gate("--history", root, "--good-commit").output == ""
    for run in launches(tmp_path, "base", 5, seed=1):
        record(check([run], root, commit="good"))
    slow = launches(tmp_path, "slow", 3, start=20, factors={"push": 1.2}, seed=2)
    record(check(slow, root, commit="slow"))
    assert gate("--history", root, "--good-commit").output == "good\n"
    nothing = gate("--history", root)
    assert (nothing.exit_code, "give the RUNS" in nothing.stderr) == (2, True)


def test_a_suspect_that_fails_to_run_again_is_no_green(slow, rerun, tmp_path: Path) -> None:
    runs, root = slow
    rerun(push=1.0, status="failed", reason="rank 1 died", step_time_us=None)
    checked = check(runs, root, confirmation=plan(tmp_path))
    assert push_of(checked).verdict == "FAILED"
    assert "could not be confirmed" in push_of(checked).why
    assert checked.exit_code(strict=False) == 3


def test_without_suspects_nothing_is_run(rerun, tmp_path: Path) -> None:
    order = rerun(push=1.0)
    root = tmp_path / "history"
    for run in launches(tmp_path, "base", 10, seed=1):
        record(check([run], root))
    same = launches(tmp_path, "same", 3, start=20, seed=3)
    assert check(same, root, confirmation=plan(tmp_path)).exit_code(strict=True) == 0
    assert order == []


def test_a_confirming_run_on_another_machine_is_refused(
    slow, rerun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, root = slow
    rerun(push=1.06)
    inner = confirm._run

    def elsewhere(python: Path, side: str, config: Path, ids: Sequence[str], out: Path) -> None:
        if side == "candidate":
            inner(python, side, config, ids, out)
        else:
            write_launch(out, [cell("push", 1000.0)], 1, machine=h200(torch="2.12.0"))

    monkeypatch.setattr(confirm, "_run", elsewhere)
    with pytest.raises(ResultsError, match="two machines"):
        check(runs, root, confirmation=plan(tmp_path))


def test_the_base_must_be_another_mokbench(slow, tmp_path: Path) -> None:
    runs, root = slow
    for python, said in (
        (Path(sys.executable), r"no mokbench that can be imported|candidate's own mokbench"),
        (tmp_path / "nothing", "cannot be run"),
        (Path("/bin/false"), "no mokbench that can be imported"),
    ):
        with pytest.raises(ConfigError, match=said):
            check(runs, root, confirmation=plan(tmp_path, baseline_python=python))


def test_the_config_is_found_again_or_asked_for(tmp_path: Path) -> None:
    text = ONE_CELL.replace("[4]}", "[4], routing: [{trace: a.npz}]}")
    (tmp_path / "c.yaml").write_text(text)
    run = write_launch(tmp_path / "run", [], 0, config_text=text, config={"from_run": "../c.yaml"})
    assert config_of(run) == tmp_path / "c.yaml"
    (tmp_path / "c.yaml").write_text("name: changed\n")
    with pytest.raises(ConfigError, match="give --config"):
        config_of(run)
    plain = write_launch(tmp_path / "plain", [], 0, config_text=ONE_CELL)
    assert config_of(plain).read_text() == ONE_CELL


@pytest.mark.slow
def test_base_and_candidate_really_run_in_turn(tmp_path: Path) -> None:
    """A history that says "twice as fast" makes a suspect; two equal mokbench clear it."""
    suite = tmp_path / "one.yaml"
    suite.write_text(ONE_CELL)
    (only,) = expand(parse(ONE_CELL, suite))
    here = machine.describe()
    confirm._run(Path(sys.executable), "candidate", suite, [only.id], tmp_path / "real")
    (real,) = RunFolder.open(tmp_path / "real").records()
    same = {"routing_digest": real.routing_digest, "oversubscribed": real.oversubscribed}

    def launch(name: str, value: float, hour: int) -> RunFolder:
        step = dict.fromkeys(("median", "p95", "min", "ci_low", "ci_high"), value) | {"n": 9}
        made = Record.from_cell(only, status="ok", step_time_us=step, link="none", **same)
        told = {"machine": here, "config_text": ONE_CELL, "config": {"from_run": "../one.yaml"}}
        return write_launch(tmp_path / name, [made], hour, **told)

    root = tmp_path / "history"
    for i in range(6):
        record(check([launch(f"base-{i}", 1.0, i)], root))
    runs = [launch(f"slow-{i}", 2.0, 10 + i) for i in range(3)]
    assert check(runs, root).exit_code(strict=False) == 1
    found = plan(
        tmp_path,
        baseline_python=base_python(tmp_path / "base"),
        config=config_of(runs[0]),
        rounds=2,
    )
    (one,) = check(runs, root, confirmation=found).judged
    for side in ("base-1", "candidate-1", "base-2", "candidate-2"):
        measured = RunFolder.open(tmp_path / "confirm" / side)
        assert [r.status for r in measured.records()] == ["ok"]
    assert "in 2 interleaved rounds" in one.call.why
    assert fake_meta().method_version == measured.meta.method_version
    with pytest.raises(MokbenchError, match="the confirming run of the base failed"):
        check(runs, root, confirmation=found)  # its folders are there already
