"""A resumed run measures the same routes as before, or says that it cannot."""

import json
import re

import numpy as np
import pytest
from runs import mokbench, statuses

from mokbench import __version__, trace

pytestmark = pytest.mark.slow

CONFIG = """\
ranks: 2
model: {name: tiny, hidden: 64, intermediate: 64, experts: 8, top_k: 2}
systems: [mok, push]
tokens_per_rank: 4
routing: {trace: t.npz}
measure: {regimes: [isolated], noise: 50%, blocks: 1, max_time: 20ms, signals: false,
  min_step: false}
"""


def write_trace(path, shift):
    ids = (np.arange(16).reshape(1, 8, 2) + shift) % 8
    trace.write(path, ids.astype(np.int32))


def test_another_trace_under_the_same_name_is_refused(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text(CONFIG, encoding="utf-8")
    write_trace(tmp_path / "t.npz", 0)
    out = tmp_path / "run"
    first = mokbench("run", config, "--out", out, "--no-charts", "--only", "system=mok")
    assert first.returncode == 0, first.stderr
    write_trace(tmp_path / "t.npz", 1)
    again = mokbench("run", config, "--resume", out, "--no-charts")
    assert again.returncode == 3
    assert "its routing differs" in again.stderr
    assert len(statuses(out)) == 1
    write_trace(tmp_path / "t.npz", 0)
    assert mokbench("run", config, "--resume", out, "--no-charts").returncode == 0
    assert set(statuses(out).values()) == {"ok"}


def test_a_relative_trace_is_found_from_another_folder(tmp_path):
    home, elsewhere = tmp_path / "configs", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    (home / "c.yaml").write_text(CONFIG, encoding="utf-8")
    write_trace(home / "t.npz", 0)
    keep = ("--no-charts", "--only", "system=mok")
    first = mokbench("run", "c.yaml", "--out", "../run", *keep, cwd=home)
    assert first.returncode == 0, first.stderr
    left = mokbench("run", "--resume", "../run", "--dry-run", cwd=elsewhere)
    assert left.returncode == 0, left.stderr
    assert "1 cell, about" in left.stdout
    assert ".push." in left.stdout
    assert ".mok." not in left.stdout
    again = mokbench("run", "--resume", "../run", "--no-charts", cwd=elsewhere)
    assert again.returncode == 0, again.stderr
    assert set(statuses(tmp_path / "run").values()) == {"ok"}
    # Where the whole tree went somewhere else, the run folder still finds its config's folder.
    (tmp_path / "moved").mkdir()
    for name in ("configs", "run"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    moved = mokbench("run", "--resume", tmp_path / "moved" / "run", "--dry-run", cwd=elsewhere)
    assert moved.returncode == 0, moved.stderr


def test_a_torn_last_row_is_a_plain_warning(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text(CONFIG.replace("{trace: t.npz}", "balanced"), encoding="utf-8")
    out = tmp_path / "run"
    assert mokbench("run", config, "--out", out, "--no-charts").returncode == 0
    with (out / "records.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"id": "torn')
    again = mokbench("run", "--resume", out, "--no-charts")
    assert again.returncode == 0
    told = [line for line in again.stderr.splitlines() if "cut short" in line]
    assert told == [f"warning: {out}: removed a row that a crash cut short"]
    assert "warnings.warn" not in again.stderr


def test_a_run_whose_systems_have_other_options_now_is_not_mixed(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text(CONFIG.replace("{trace: t.npz}", "balanced"), encoding="utf-8")
    out = tmp_path / "run"
    keep = ("--no-charts", "--only", "system=mok")
    assert mokbench("run", config, "--out", out, *keep).returncode == 0
    before = (out / "run.json").read_bytes()
    (code,) = json.loads(before)["code"]
    assert code["version"] == __version__
    rows = out / "records.jsonl"
    measured = rows.read_text(encoding="utf-8")
    for digest, said in (("all-other", "a default may have changed"), ("other", "by an older")):
        rows.write_text(
            re.sub('"cell_digest": ?"[^"]*"', f'"cell_digest":"{digest}"', measured), "utf-8"
        )
        again = mokbench("run", "--resume", out, "--no-charts")
        assert again.returncode == 2
        assert said in again.stderr
        assert (out / "run.json").read_bytes() == before
