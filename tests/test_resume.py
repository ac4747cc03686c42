"""A resumed run measures the same routes as before, or says that it cannot."""

import numpy as np
import pytest
from runs import mokbench, statuses

from mokbench import trace

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
