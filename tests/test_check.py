import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fake_run import fake_record
from launches import cell, h200, launches, write_launch
from runs import command

from mokbench.cli import main
from mokbench.errors import ConfigError, ResultsError
from mokbench.regression import output
from mokbench.regression.check import accept, check, record
from mokbench.regression.history import History, folder_of
from mokbench.regression.judge import judge_sides
from mokbench.regression.launch import Launch
from mokbench.regression.verdict import Limits, Verdict
from mokbench.results import RunFolder

SLOW = {"push": 1.05}


@pytest.fixture(scope="module")
def ten(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """History of ten launches at 1 % noise, and the first of them."""
    folder = tmp_path_factory.mktemp("ten")
    for run in launches(folder, "base", 10, seed=1):
        record(check([run], folder / "history"))
    return folder


@pytest.fixture
def history(ten: Path, tmp_path: Path) -> Path:
    return shutil.copytree(ten / "history", tmp_path / "history")


def verdicts(checked) -> dict[str, str]:
    return {one.series[0].split(".")[1]: one.call.verdict for one in checked.judged}


def gate(*arguments: str | Path, **environment: str) -> Result:
    clean = {
        name: environment.get(name) for name in ("MOKBENCH_COMMIT", "GITHUB_SHA", "CI_COMMIT_SHA")
    }
    return CliRunner().invoke(main, ["check", *map(str, arguments)], env=clean)


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
    assert (len(checked.judged), len(shared)) == (34, 16)
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
    for confirmed, kept in ((True, 13), (False, 10)):
        own = tmp_path / f"history-{confirmed}"
        shutil.copytree(history, own)
        again = replace(check(runs, own), judged=left_open, confirmed=confirmed)
        record(again)
        later = check(launches(tmp_path, f"later-{confirmed}", 3, start=40, seed=3), own)
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
        write_launch(tmp_path / f"o{i}", [cell("push", 2000.0, cell_digest="other")], 20 + i)
        for i in range(3)
    ]
    one = next(j for j in check(runs, history).judged if ".push." in j.series[0])
    assert one.call.verdict == "INSUFFICIENT"
    assert "options or routing are not what the history measured" in one.call.why


def test_a_run_is_recorded_once(history: Path, ten: Path) -> None:
    path = folder_of(history, h200()) / "launches.jsonl"
    before = path.read_bytes()
    runs = [RunFolder.open(ten / "base-0")]
    assert record(check(runs, history)).recorded == 0
    assert path.read_bytes() == before


# What is broken must be said; it must never lead to a verdict.


def test_runs_of_two_machines_or_methods_are_refused(history: Path, tmp_path: Path) -> None:
    (one,) = launches(tmp_path, "one", 1)
    (other,) = launches(tmp_path, "two", 1, machine=h200(driver="999"))
    with pytest.raises(ResultsError, match="two machines"):
        check([one, other], history)
    (newer,) = launches(tmp_path, "new", 1, method_version=2)
    with pytest.raises(ResultsError, match=r"method version 1 and .* 2"):
        check([one, newer], history)


def test_another_machine_has_a_history_of_its_own(history: Path, tmp_path: Path) -> None:
    runs = launches(tmp_path, "two", 3, machine=h200(driver="999"), factors={"push": 2.0})
    assert set(verdicts(check(runs, history)).values()) == {"INSUFFICIENT"}


def test_another_gpu_of_the_kind_shares_the_history(history: Path, tmp_path: Path) -> None:
    runs = launches(tmp_path, "uuid", 3, machine=h200(gpu_uuids=["GPU-1"]), factors=SLOW, seed=2)
    assert verdicts(check(runs, history))["push"] == "SLOWER"


def test_launches_of_an_older_method_are_no_base(tmp_path: Path) -> None:
    root = tmp_path / "history"
    for run in launches(tmp_path, "old", 10, method_version=2):
        record(check([run], root))
    runs = launches(tmp_path, "now", 3, factors={"push": 2.0})
    assert set(verdicts(check(runs, root)).values()) == {"INSUFFICIENT"}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text.replace('"mok"', "", 1).replace("[", "", 1), "launches.jsonl:1"),
        (lambda text: text.replace('"history_version":1', '"history_version":0', 1), "version 0"),
        (lambda text: text.replace('"history_version":1', '"history_version":7', 1), "version 7"),
        (lambda text: text.replace('"clock_mhz":[1500.0', '"clock_mhz":[NaN', 1), "clock_mhz"),
        (lambda text: text.replace('"clock_mhz":[1500.0,', '"clock_mhz":[', 1), "lengths"),
        (lambda text: "[" * 100_000 + "\n" + text, "launches.jsonl:1"),
        (lambda text: "null\n" + text, "NoneType"),
        (lambda text: "\n" + text, "launches.jsonl:1"),
        (lambda text: text.replace('"machine":"', '"machine":"x', 1), "2 machines"),
    ],
)
def test_a_damaged_history_is_an_error_with_its_line(
    history: Path, tmp_path: Path, damage, said: str
) -> None:
    path = folder_of(history, h200()) / "launches.jsonl"
    path.write_text(damage(path.read_text(encoding="utf-8")), encoding="utf-8")
    launches(tmp_path, "slow", 3, start=20, factors=SLOW, seed=2)
    done = gate(tmp_path / "slow-*", "--history", history)
    assert done.exit_code == 2, done.stdout + done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_torn_last_line_is_left_out_and_said(history: Path, tmp_path: Path) -> None:
    path = folder_of(history, h200()) / "launches.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    runs = launches(tmp_path, "slow", 3, start=20, factors=SLOW, seed=2)
    with pytest.warns(UserWarning, match="cut short"):
        checked = check(runs, history)
    assert checked.judged[0].call.base_n == 9
    assert checked.judged[0].call.verdict == "SLOWER"
    record(checked)
    assert len(History.read(path.parent).launches) == 12


def test_a_history_copied_over_another_machines_is_refused(history: Path, tmp_path: Path) -> None:
    other = h200(driver="999")
    folder_of(history, h200()).rename(folder_of(history, other))
    runs = launches(tmp_path, "two", 3, machine=other)
    with pytest.raises(ResultsError, match="copied over another"):
        check(runs, history)


def test_the_folder_of_one_machine_is_no_history(history: Path, tmp_path: Path) -> None:
    runs = launches(tmp_path, "slow", 3, start=20, factors=SLOW, seed=2)
    with pytest.raises(ResultsError, match="give the folder that it is in"):
        check(runs, folder_of(history, h200()))


def test_a_full_disk_leaves_the_history_as_it_was(history: Path, tmp_path: Path) -> None:
    path = folder_of(history, h200()) / "launches.jsonl"
    before = path.read_bytes()
    launches(tmp_path, "same", 3, start=20)
    limit = f'ulimit -f {len(before) // 1024 + 1}; exec "$@"'
    arguments = command("check", tmp_path / "same-*", "--history", history, "--record")
    done = subprocess.run(
        ["bash", "-c", limit, "_", *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "free some space" in done.stderr
    assert path.read_bytes().startswith(before)
    assert path.read_bytes().endswith(b"\n")


@pytest.mark.parametrize(
    ("file", "damage", "said"),
    [
        ("records.jsonl", lambda text: text.replace('"id"', '"identity"', 1), "records.jsonl:1"),
        ("records.jsonl", lambda text: text.replace('_version":1', '_version":0', 1), "older"),
        ("records.jsonl", lambda text: text.replace('_version":1', '_version":9', 1), "newer"),
        ("records.jsonl", lambda _: "", "no rows"),
        ("records.jsonl", lambda text: re.sub('(an":)[0-9.]+', r"\g<1>9e999", text), "infinite"),
        ("run.json", lambda text: text[: len(text) // 2], "not a run description"),
        ("run.json", lambda text: text.replace('"done"', '"interrupted"'), "--resume"),
        ("run.json", lambda text: text.replace('"done"', '"running"'), "--resume"),
    ],
)
def test_broken_and_unfinished_runs_are_refused(
    history: Path, tmp_path: Path, file: str, damage, said: str
) -> None:
    launches(tmp_path, "slow", 3, start=20, factors=SLOW)
    path = tmp_path / "slow-1" / file
    path.write_text(damage(path.read_text(encoding="utf-8")), encoding="utf-8")
    done = gate(*(tmp_path / f"slow-{i}" for i in range(3)), "--history", history)
    assert done.exit_code == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert "SLOWER" not in done.stdout


# What it writes for others.


def test_copies_of_one_launch_are_not_three_launches(history: Path, tmp_path: Path) -> None:
    (run,) = launches(tmp_path, "slow", 1, start=20, factors={"push": 1.2})
    for name in ("copy-1", "copy-2"):
        shutil.copytree(run.path, tmp_path / name)
    done = gate(run.path, tmp_path / "copy-*", "--history", history)
    assert done.exit_code == 2
    assert "copies of one launch" in done.stderr
    assert "SLOWER" not in done.stdout


def test_junit_and_summaries_name_what_is_wrong(history: Path, tmp_path: Path) -> None:
    launches(tmp_path, "slow", 3, start=20, factors=SLOW, seed=2)
    summary = tmp_path / "summary.md"
    summary.write_text("before\n", encoding="utf-8")
    files = ["--junit", tmp_path / "j.xml", "--summary", summary, "--comment", tmp_path / "c.md"]
    done = gate(tmp_path / "slow-*", "--history", history, *files, GITHUB_SHA="f00d")
    assert done.exit_code == 1
    root = ElementTree.parse(tmp_path / "j.xml").getroot()
    assert {k: root.get(k) for k in ("tests", "failures", "errors", "skipped")} == {
        "tests": "3",
        "failures": "1",
        "errors": "0",
        "skipped": "0",
    }
    (failure,) = root.iter("failure")
    assert "SLOWER: +5.6 %" in failure.attrib["message"]
    assert failure.text == "commits (none recorded)..f00d"
    text = summary.read_text(encoding="utf-8")
    assert text.startswith("before\n## mokbench check: SLOWER\n")
    first = next(line for line in text.splitlines() if line.startswith("| SLOWER"))
    assert "tiny.push.r4.t128.balanced.bf16.isolated" in first
    assert (tmp_path / "c.md").read_text(encoding="utf-8").startswith("## mokbench check: SLOWER")


def test_a_pipe_is_written_to_and_not_replaced(history: Path, ten: Path, tmp_path: Path) -> None:
    pipe, link, told = tmp_path / "pipe", tmp_path / "link", tmp_path / "told.md"
    os.mkfifo(pipe)
    link.symlink_to(told)
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        runs = [ten / f"base-{i}" for i in range(3)]
        done = gate(*runs, "--history", history, "--junit", pipe, "--comment", link)
        assert done.exit_code == 0, done.stderr
        assert os.read(descriptor, 1 << 16).startswith(b"<?xml")
    finally:
        os.close(descriptor)
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert told.read_text(encoding="utf-8").startswith("## mokbench check")


def test_markdown_stays_within_the_limits_and_keeps_the_worst(tmp_path: Path) -> None:
    judged = many_judged(tmp_path, 600)
    for unit, size in (("chars", len), ("bytes", lambda text: len(text.encode()))):
        text = output.markdown("check", "head", judged, 20_000, unit)
        assert 19_000 < size(text) <= 20_000
        lines = [line for line in text.splitlines() if line.startswith("| ")][1:]
        assert lines[0].startswith("| SLOWER")
        left = int(text.splitlines()[-1].split()[0])
        assert len(lines) + left == 600
    assert "@\u200b" in output.escaped("@everyone")


def many_judged(tmp_path: Path, count: int) -> list:
    names = [f"r{i}" for i in range(count)]
    sides = []
    for side, factor in (("a", 1.0), ("b", 1.5)):
        records = [
            cell("push", 100.0 * (factor if i == 7 else 1.0), routing=name)
            for i, name in enumerate(names)
        ]
        run = write_launch(tmp_path / side, records, 0)
        sides.append([Launch.of(run)] * 3)
    return judge_sides(*sides, ["step_time_us"], Limits(least_base=2, least_candidate=2))


def test_the_json_form_has_every_series(history: Path, tmp_path: Path) -> None:
    launches(tmp_path, "slow", 3, start=20, factors=SLOW, seed=2)
    done = gate(tmp_path / "slow-*", "--history", history, "--format", "json")
    told = json.loads(done.stdout)
    assert (done.exit_code, told["exit_code"]) == (1, 1)
    (slow, *_) = told["series"]
    assert slow["verdict"] == "SLOWER"
    assert slow["ratio"] == pytest.approx(1.05, abs=0.02)
    assert slow["low"] < slow["ratio"] < slow["high"]
    assert (slow["base_n"], slow["candidate_n"], slow["gates"]) == (10, 3, True)
    assert told["limits"]["floor"] == 0.02


def test_bad_options_are_bad_usage(history: Path, tmp_path: Path) -> None:
    launches(tmp_path, "same", 3)
    for options, said in (
        (["--metric", "speed"], "allowed: step_time_us"),
        (["--floor", "200%"], "a share such as 2%"),
        (["--confirm"], "--baseline-python"),
        (["--baseline-python", sys.executable], "goes with --confirm"),
    ):
        done = gate(tmp_path / "same-*", "--history", history, *options)
        assert done.exit_code == 2
        assert said in done.stderr


def test_a_launch_of_another_size_is_refused(tmp_path: Path) -> None:
    run = launches(tmp_path, "one", 1)[0]
    whole = Launch.of(run).model_dump()
    for change in ({"ids": whole["ids"][:1] * 3}, {"marks": [""]}):
        with pytest.raises(ValueError, match=r"twice|lengths"):
            Launch.model_validate(whole | change)
