import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from launches import cell, h200, launches, write_launch

from mokbench.cli import main
from mokbench.record import METHOD_VERSION


def compare(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["compare", *map(str, arguments)])


def series(*arguments: str | Path) -> dict[str, dict]:
    done = compare(*arguments, "--format", "json")
    assert done.exit_code == 0, done.output
    return {one["id"].split(".")[1]: one for one in json.loads(done.stdout)["series"]}


def test_five_launches_a_side_find_a_slowdown_and_what_stayed(tmp_path: Path) -> None:
    launches(tmp_path, "a", 5, noise=0.004, seed=1)
    launches(tmp_path, "b", 5, noise=0.004, seed=2, factors={"push": 1.05, "alltoall": 0.9})
    found = series(tmp_path / "a-*", tmp_path / "b-*")
    assert {k: one["verdict"] for k, one in found.items()} == {
        "push": "SLOWER",
        "alltoall": "FASTER",
        "mok": "SAME",
    }
    push = found["push"]
    assert push["low"] < 1.05 < push["high"]
    assert push["base"] == pytest.approx(1000, rel=0.01)
    assert (push["base_n"], push["candidate_n"]) == (5, 5)


def test_a_launch_on_both_sides_is_refused_or_forced(tmp_path: Path) -> None:
    """Counted on both sides it draws them together, and a slowdown passes for the same."""
    launches(tmp_path, "a", 3, noise=0.004, seed=1)
    launches(tmp_path, "b", 3, noise=0.004, seed=2, factors={"push": 1.05})
    done = compare(tmp_path / "[ab]-*", tmp_path / "b-*")
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert "b-0 and b-0 are copies of one launch" in done.stderr
    assert compare(tmp_path / "[ab]-*", tmp_path / "b-*", "--force").exit_code == 0


def test_what_launches_differ_by_anyway_is_ambiguous(tmp_path: Path) -> None:
    launches(tmp_path, "a", 3, noise=0.05, seed=1)
    launches(tmp_path, "b", 3, noise=0.05, seed=2, factors={"push": 1.05})
    assert {one["verdict"] for one in series(tmp_path / "a-*", tmp_path / "b-*").values()} == {
        "AMBIGUOUS"
    }


def test_one_launch_a_side_decides_nothing_unless_the_noise_is_told(tmp_path: Path) -> None:
    launches(tmp_path, "a", 1, noise=0)
    launches(tmp_path, "b", 1, noise=0, factors={"push": 1.06})
    done = compare(tmp_path / "a-0", tmp_path / "b-0")
    assert "3 INSUFFICIENT" in done.stdout
    assert "1.060" in done.stdout
    assert "--launch-noise 1%" in done.stdout
    told = series(tmp_path / "a-0", tmp_path / "b-0", "--launch-noise", "1%")
    assert {k: one["verdict"] for k, one in told.items()} == {
        "push": "SLOWER",
        "mok": "SAME",
        "alltoall": "SAME",
    }
    assert told["push"]["spread"] == 0.01


def test_a_clock_that_fell_is_named(tmp_path: Path) -> None:
    slow = dict.fromkeys(("mok", "push", "alltoall"), 1.08)
    launches(tmp_path, "a", 4, noise=0.003, seed=1)
    launches(tmp_path, "b", 4, noise=0.003, seed=2, factors=slow, clock=1500 / 1.08)
    assert {one["verdict"] for one in series(tmp_path / "a-*", tmp_path / "b-*").values()} == {
        "CLOCK"
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"machine": h200(driver="999")}, "two machines"),
        ({"method_version": METHOD_VERSION - 1}, "method version"),
    ],
)
def test_other_machines_and_methods_are_refused_or_forced(
    tmp_path: Path, changes: dict, said: str
) -> None:
    launches(tmp_path, "a", 3)
    launches(tmp_path, "b", 3, **changes)
    sides = (tmp_path / "a-*", tmp_path / "b-*")
    refused = compare(*sides)
    assert refused.exit_code == 2
    assert said in refused.stderr
    assert refused.stdout == ""
    forced = compare(*sides, "--force")
    assert forced.exit_code == 0
    assert f"warning: a-0 {'and' if 'two' in said else 'has'}" in forced.stderr


def test_explain_says_why_of_every_series(tmp_path: Path) -> None:
    launches(tmp_path, "a", 5, noise=0.004, seed=1)
    launches(tmp_path, "b", 5, noise=0.004, seed=2, factors={"push": 1.05})
    brief = compare(tmp_path / "a-*", tmp_path / "b-*").stdout
    assert brief.count("SAME") == 1  # the tally
    full = compare(tmp_path / "a-*", tmp_path / "b-*", "--explain").stdout
    assert full.count("is excluded") == 2
    assert ", p " in full


def test_every_metric_that_both_have_is_compared(tmp_path: Path) -> None:
    sides = {"a": 1.0, "b": 1.2}
    for side, factor in sides.items():
        for i in range(3):
            write_launch(
                tmp_path / f"{side}-{i}",
                [cell("push", 100.0 + i, min_step_us=20.0 * factor, peak_memory_bytes=1 << 30)],
                i,
            )
    done = compare(tmp_path / "a-*", tmp_path / "b-*", "--format", "json")
    found = {one["metric"]: one["verdict"] for one in json.loads(done.stdout)["series"]}
    assert found == {"min_step_us": "SLOWER", "step_time_us": "SAME", "peak_memory_bytes": "SAME"}
    one = compare(tmp_path / "a-*", tmp_path / "b-*", "--metric", "min_step_us")
    assert "min_step_us" in one.stdout
    assert "peak_memory" not in one.stdout


def test_cells_of_one_side_and_changed_cells_are_said(tmp_path: Path) -> None:
    both = [cell("mok", 10.0), cell("push", 10.0)]
    other = [cell("mok", 99.0, cell_digest="all-other"), cell("local", 10.0)]
    for i in range(3):
        write_launch(tmp_path / f"a-{i}", both, i)
        write_launch(tmp_path / f"b-{i}", other, i)
    done = compare(tmp_path / "a-*", tmp_path / "b-*")
    assert "its options or routing are not what A measured under this id" in done.stdout
    assert "1 cell only in A" in done.stdout
    assert "1 cell only in B" in done.stdout
    assert "SLOWER" not in done.stdout


def test_a_digest_without_defaults_is_not_compared(tmp_path: Path) -> None:
    for i in range(3):
        write_launch(tmp_path / f"a-{i}", [cell("push", 10.0, cell_digest="0123456789abcdef")], i)
        write_launch(tmp_path / f"b-{i}", [cell("push", 99.0)], i)
    for sides in (("a-*", "b-*"), ("b-*", "a-*"), ("a-0", "a-[12]")):
        done = compare(*(tmp_path / side for side in sides))
        assert "not comparable: stored by an older mokbench" in done.stdout
        assert "SLOWER" not in done.stdout


@pytest.mark.parametrize("names", [["nowhere", "a-0"], ["a-0", "a-0/records.jsonl"]])
def test_what_is_no_run_is_said(tmp_path: Path, names: Sequence[str]) -> None:
    launches(tmp_path, "a", 1)
    done = compare(*(tmp_path / name for name in names))
    assert done.exit_code == 2
    assert "run" in done.stderr
