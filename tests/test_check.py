import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from fake_run import fake_record
from launches import SLOW, cell, gate, h200, launches, verdicts, write_launch

from mokbench.errors import ConfigError
from mokbench.regression import output
from mokbench.regression.check import Checked, accept, check, record
from mokbench.regression.history import History, folder_of
from mokbench.regression.launch import Launch
from mokbench.regression.verdict import Verdict
from mokbench.results import RunFolder


def test_a_slowdown_of_5_percent_exits_1_and_names_the_cell(history: Path, tmp_path: Path) -> None:
    launches(tmp_path, "slow", 3, start=20, factors=SLOW, seed=2)
    done = gate(tmp_path / "slow-*", "--history", history, "--commit", "abc123")
    assert done.exit_code == 1, done.stderr
    (line,) = [text for text in done.stdout.splitlines() if text.startswith("SLOWER")]
    assert "tiny.push.r4.t128.balanced.bf16.isolated" in line
    assert "+5.6 %" in line
    assert done.stdout.splitlines()[-1].startswith("1 SLOWER, 2 SAME; commits (none recorded)..abc")


def test_the_same_history_without_it_exits_0_and_is_quiet(history: Path, tmp_path: Path) -> None:
    launches(tmp_path, "same", 3, start=20, seed=2)
    done = gate(tmp_path / "same-*", "--history", history, "--strict")
    assert done.exit_code == 0, done.stdout + done.stderr
    assert (done.stdout, done.stderr) == ("3 SAME\n", "")


def test_too_little_data_is_insufficient_and_only_strict_minds(tmp_path: Path) -> None:
    root = tmp_path / "history"
    launches(tmp_path, "first", 3, factors={"push": 3.0})
    for options, code in (((), 0), (("--strict",), 4)):
        done = gate(tmp_path / "first-*", "--history", root, *options)
        assert done.exit_code == code
        assert "3 INSUFFICIENT" in done.stdout
        assert "0 base and 3 candidate launches; needs 5 and 3 (new in the history)" in done.stdout


def test_the_h200_run_is_one_launch_and_its_shared_rows_never_gate(tmp_path: Path) -> None:
    run = RunFolder.open(Path(__file__).parents[1] / "results" / "h200" / "baselines")
    checked = check([run], tmp_path / "history")
    assert {one.call.verdict for one in checked.judged} == {Verdict.INSUFFICIENT}
    shared = [one for one in checked.judged if not one.gates]
    assert (len(checked.judged), len(shared)) == (62, 32)
    assert all("ratios do not predict NVLink" in one.words for one in shared)
    assert record(checked).recorded == 1
    (folder,) = (tmp_path / "history").iterdir()
    assert folder.name == "nvidia-h200-x1-4793c429db85"


def test_one_candidate_launch_is_too_little(history: Path, tmp_path: Path) -> None:
    runs = launches(tmp_path, "slow", 1, start=20, factors={"push": 1.5})
    assert set(verdicts(check(runs, history)).values()) == {Verdict.INSUFFICIENT}


def test_faster_is_said_and_is_no_new_base_until_accepted(history: Path, tmp_path: Path) -> None:
    fast = launches(tmp_path, "fast", 3, start=20, factors={"mok": 0.9}, seed=3)
    checked = check(fast, history)
    assert verdicts(checked) == {"mok": "FASTER", "push": "SAME", "alltoall": "SAME"}
    assert checked.exit_code(strict=True) == 0
    record(checked)
    more = launches(tmp_path, "more", 3, start=30, factors={"mok": 0.9}, seed=4)
    again = {one.series[0].split(".")[1]: one.call for one in check(more, history).judged}
    assert again["mok"].verdict == "FASTER"
    assert again["mok"].base_n == 10
    assert again["push"].base_n == 13


def test_an_improvement_that_nobody_accepted_is_counted_and_asks_for_it(
    history: Path, tmp_path: Path
) -> None:
    def told(name: str, factor: float, start: int) -> tuple[Checked, str]:
        factors = {"mok": factor}
        runs = launches(tmp_path, name, 3, start=start, factors=factors, seed=start)
        checked = record(check(runs, history))
        return checked, next(x.call.why for x in checked.judged if ".mok." in x.series[0])

    fast, why = told("fast", 0.9, 20)
    assert (fast.open_levels, "--accept it, or a slowdown" in why) == (1, True)
    assert "1 FASTER and not accepted" in output.headline(fast)
    back, why = told("back", 1.0, 30)
    assert (verdicts(back)["mok"], back.open_levels) == ("SAME", 1)
    assert "may be slower than they were" in why
    assert told("later", 1.0, 40)[0].open_levels == 0


def test_an_accepted_level_is_the_new_base_and_its_reason_is_kept(
    history: Path, tmp_path: Path
) -> None:
    slow = launches(tmp_path, "slow", 5, start=20, factors=SLOW, seed=3)
    checked = accept(check(slow, history, commit="abc"), "exact sums cost 5 %, agreed in review")
    assert checked.accepted == ["tiny.push.r4.t128.balanced.bf16.isolated step_time_us"]
    assert checked.exit_code(strict=False) == 0
    folder = folder_of(history, h200())
    (level,) = History.read(folder).levels
    assert level.reason == "exact sums cost 5 %, agreed in review"
    same = launches(tmp_path, "same", 3, start=40, factors=SLOW, seed=5)
    assert verdicts(check(same, history))["push"] == "SAME"
    back = launches(tmp_path, "back", 3, start=50, seed=6, factors={"push": 0.95})
    assert verdicts(check(back, history))["push"] == "FASTER"
    with pytest.raises(ConfigError, match="nothing to accept"):
        accept(check(same, history), "why")
    with pytest.raises(ConfigError, match="needs a reason"):
        accept(check(back, history), "  ")


def test_a_clock_that_fell_is_not_called_slower(history: Path, tmp_path: Path) -> None:
    hot = launches(
        tmp_path,
        "hot",
        3,
        start=20,
        clock=1500 / 1.06,
        seed=2,
        factors=dict.fromkeys(("mok", "push", "alltoall"), 1.06),
    )
    checked = check(hot, history)
    assert set(verdicts(checked).values()) == {"CLOCK"}
    assert (checked.exit_code(strict=False), checked.exit_code(strict=True)) == (0, 4)
    assert "the clock moved, not the work" in checked.judged[0].call.why
    both = launches(tmp_path, "both", 3, start=30, clock=1500 / 1.02, seed=2, factors={"push": 1.1})
    assert verdicts(check(both, history))["push"] == "SLOWER"


def test_a_suspect_among_many_series_does_not_become_base(history: Path, tmp_path: Path) -> None:
    runs = launches(tmp_path, "slow", 3, start=20, seed=2, factors={"push": 1.05})
    checked = check(runs, history)
    series = ("tiny.push.r4.t128.balanced.bf16.isolated", "step_time_us")
    left_open = [
        replace(one, call=replace(one.call, verdict=Verdict.AMBIGUOUS))
        if one.series == series
        else one
        for one in checked.judged
    ]
    for cleared, kept in ((True, 13), (False, 10)):
        own = tmp_path / f"history-{cleared}"
        shutil.copytree(history, own)
        judged = [replace(one, cleared=cleared and one.series == series) for one in left_open]
        record(replace(check(runs, own), judged=judged, confirmed=True))
        later = check(launches(tmp_path, f"later-{cleared}", 3, start=40, seed=3), own)
        counts = {one.series: one.call.base_n for one in later.judged}
        assert counts == {one: kept if one == series else 13 for one in counts}


@pytest.mark.parametrize(
    "mark", [{"ranks_per_gpu": 4, "link": "hbm"}, {"fabric": "host", "oversubscribed": True}]
)
def test_shared_and_oversubscribed_rows_are_shown_and_never_gate(tmp_path: Path, mark) -> None:
    root = tmp_path / "history"
    for i in range(8):
        run = write_launch(tmp_path / f"b{i}", [cell("push", 100.0 + 0.1 * i, **mark)], i)
        record(check([run], root))
    slow = [
        write_launch(tmp_path / f"s{i}", [cell("push", 150.0, **mark)], 10 + i) for i in (0, 1, 2)
    ]
    checked = check(slow, root)
    (one,) = checked.judged
    assert one.call.verdict == "SLOWER"
    assert not one.gates
    assert "NVLink" in one.words or "more busy threads than cores" in one.words
    assert (checked.exit_code(strict=False), checked.exit_code(strict=True)) == (0, 4)
    assert "1 shown only" in output.headline(checked)


def test_failed_and_missing_cells_are_no_silent_green(history: Path, tmp_path: Path) -> None:
    records = [
        cell("mok", 900.0, sm_clock_mhz=1500.0),
        fake_record(system="push", status="failed", reason="rank 1 died", fabric="cuda"),
    ]
    runs = [write_launch(tmp_path / f"f{i}", records, 20 + i) for i in range(3)]
    checked = check(runs, history)
    assert verdicts(checked) == {"mok": "SAME", "push": "FAILED", "alltoall": "MISSING"}
    assert checked.exit_code(strict=False) == 3


def test_other_options_under_one_id_are_another_series(history: Path, tmp_path: Path) -> None:
    runs = [
        write_launch(tmp_path / f"o{i}", [cell("push", 2000.0, cell_digest="all-other")], 20 + i)
        for i in range(3)
    ]
    one = next(j for j in check(runs, history).judged if ".push." in j.series[0])
    assert one.call.verdict == "INSUFFICIENT"
    assert "options or routing are not what the history measured" in one.call.why


def test_digests_without_defaults_compare_with_nothing(tmp_path: Path) -> None:
    """Of an older mokbench: not even with one another, since a default may lie between them."""
    old = [
        write_launch(tmp_path / f"a{i}", [cell("push", 1000.0, cell_digest="0123456789abcdef")], i)
        for i in range(10)
    ]
    root = tmp_path / "history"
    for run in old[:5]:
        record(check([run], root))
    new = [write_launch(tmp_path / f"b{i}", [cell("push", 2000.0)], 20 + i) for i in range(3)]
    for candidates in (new, old[5:8]):
        (one,) = check(candidates, root).judged
        assert one.call.verdict == "INSUFFICIENT"
        assert "stored by an older mokbench" in one.call.why


def test_a_run_is_recorded_once(history: Path, ten: Path) -> None:
    path = folder_of(history, h200()) / "launches.jsonl"
    before = path.read_bytes()
    runs = [RunFolder.open(ten / "base-0")]
    assert record(check(runs, history)).recorded == 0
    assert path.read_bytes() == before


def test_a_reading_is_of_one_cell_as_it_was_measured_then(tmp_path: Path) -> None:
    row = cell("push", 1000.0, sm_clock_mhz=1500.0, min_step_us=20.0)
    launch = Launch.of(write_launch(tmp_path / "one", [row], 0))
    (digest,) = launch.digests
    assert launch.reading(row.id, "step_time_us", digest) == (1000.0, 1500.0)
    value, clock = launch.reading(row.id, "min_step_us", digest) or (0.0, 0.0)
    assert (value, math.isnan(clock)) == (20.0, True)  # the row's clock is not that of min_step_us
    for other in (
        ("gone", "step_time_us", digest),
        (row.id, "dispatch_us", digest),
        (row.id, "step_time_us", "other"),
    ):
        assert launch.reading(*other) is None


@pytest.mark.parametrize(("count", "lacks"), [(3, 2), (5, 0)])
def test_a_level_of_too_few_launches_is_warned_of(
    history: Path, tmp_path: Path, count: int, lacks: int
) -> None:
    launches(tmp_path, "slow", count, start=20, factors=SLOW, seed=3)
    comment = tmp_path / "comment.md"
    options = ("--accept", "agreed", "--comment", comment)
    done = gate(tmp_path / "slow-*", "--history", history, *options)
    assert done.exit_code == 0, done.stderr
    said = "has 3 of the 5 launches that a base needs: its series are INSUFFICIENT, and pass, until"
    assert (said in done.stderr) == bool(lacks)
    assert (said in comment.read_text(encoding="utf-8")) == bool(lacks)
    # What it warns of, and what ends it.
    same = launches(tmp_path, "same", 3, start=40, factors=SLOW, seed=5)
    assert verdicts(check(same, history))["push"] == ("INSUFFICIENT" if lacks else "SAME")
    if lacks:
        for run in launches(tmp_path, "more", lacks, start=60, factors=SLOW, seed=6):
            record(check([run], history))
        assert verdicts(check(same, history))["push"] in ("SAME", "AMBIGUOUS")
