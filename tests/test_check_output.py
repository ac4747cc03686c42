"""What check writes for others: JUnit, summaries, comments, JSON."""

import errno
import json
import os
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from launches import SLOW, cell, gate, launches, write_launch

from mokbench.regression import output
from mokbench.regression.judge import judge_sides
from mokbench.regression.launch import Launch
from mokbench.regression.verdict import Limits
from mokbench.shown_text import escaped

ROOT = Path(__file__).parents[1]


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


def test_what_is_accepted_fails_in_no_junit(history: Path, tmp_path: Path) -> None:
    launches(tmp_path, "slow", 5, start=20, factors=SLOW, seed=2)
    options = ["--history", history, "--accept", "agreed", "--junit", tmp_path / "j.xml"]
    assert gate(tmp_path / "slow-*", *options).exit_code == 0
    root = ElementTree.parse(tmp_path / "j.xml").getroot()
    assert (root.get("failures"), root.get("skipped")) == ("0", "1")
    assert "SLOWER: +" in next(root.iter("skipped")).attrib["message"]


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


def test_a_summary_that_cannot_be_read_is_bad_usage(
    history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches(tmp_path, "slow", 3, start=20, factors=SLOW, seed=2)
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    read = Path.read_bytes

    def may_not(path: Path) -> bytes:
        if path == summary:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", may_not)
    done = gate(tmp_path / "slow-*", "--history", history, "--summary", summary)
    assert done.exit_code == 2, done.stderr
    assert f"{summary}: reading failed: Permission denied; name a file that can be" in done.stderr


def test_the_comment_workflow_takes_no_line_away() -> None:
    text = (ROOT / "docs/ci/github-comment.yml").read_text(encoding="utf-8")
    assert f"head -c {output.COMMENT_BYTES} " in text


def test_markdown_stays_within_the_limits_and_keeps_the_worst(tmp_path: Path) -> None:
    judged = many_judged(tmp_path, 600)
    text = output.markdown("check", "head", judged, 20_000)
    assert 19_000 < len(text.encode()) <= 20_000
    lines = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert lines[0].startswith("| SLOWER")
    left = int(text.splitlines()[-1].split()[0])
    assert len(lines) + left == 600
    assert "@\u200b" in escaped("@everyone")


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
