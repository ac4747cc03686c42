"""Phases inside of a kernel as run folders keep them: what cannot be is refused by name."""

import json

import pytest
from fake_run import CUDA, fake_meta, row
from mok_stamps_data import stamps

from mokbench.errors import ResultsError
from mokbench.kernel_phases import phases_by_rank
from mokbench.mok_stamps import mok_phase_times
from mokbench.record import Record
from mokbench.results import RunFolder


def stored_line(tmp_path, **changes):
    run = RunFolder.create(tmp_path / "run", fake_meta())
    phases = phases_by_rank([mok_phase_times(stamps()), mok_phase_times(stamps())], 1)
    run.append(row("mok", 100.0, ranks=2, kernel_phases=phases, **CUDA))
    run.finish("done")
    path = run.path / "records.jsonl"
    data = json.loads(path.read_text())
    data["kernel_phases"][1] |= changes.pop("rank1", {})
    data |= changes
    path.write_text(json.dumps(data) + "\n")
    return run.path


SPAN = {"name": "stage", "begin_us": 0.0, "end_us": 1.0}


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"rank1": {"spans": [SPAN | {"end_us": -1.0}]}}, "end_us: Input should be greater"),
        ({"rank1": {"spans": [SPAN | {"begin_us": 2.0}]}}, "stage ends at 1.0, before 2.0"),
        ({"rank1": {"spans": [SPAN | {"end_us": 1e300}]}}, "end_us: Input should be less"),
        ({"rank1": {"spans": [SPAN | {"end_us": float("nan")}]}}, "end_us is nan"),
        ({"rank1": {"spans": [SPAN | {"end_us": float("inf")}]}}, "end_us is inf"),
        ({"rank1": {"spans": [SPAN | {"end_us": "1"}]}}, "end_us: Input should be a valid number"),
        ({"rank1": {"spans": [SPAN | {"name": "<script>"}]}}, "name: Input should be 'stage'"),
        ({"rank1": {"spans": [SPAN, SPAN]}}, "rank 1 has a phase twice"),
        ({"rank1": {"spans": None}}, "spans: Input should be a valid array"),
        ({"rank1": {"rank": 7}}, "kernel_phases are of ranks [0, 7]"),
        ({"rank1": {"rank": 0}}, "kernel_phases are of ranks [0, 0]"),
        ({"rank1": {"rank": -1}}, "rank: Input should be greater"),
        ({"rank1": {"waited_us_max": 0.1}}, "waited_us_median is above"),
        ({"rank1": {"num_ctas": 0}}, "num_ctas: Input should be greater"),
        ({"rank1": {"more": 1}}, "more: Extra inputs"),
        ({"kernel_phases": "all"}, "kernel_phases: Input should be a valid array"),
        ({"ranks": 3}, "those of 3 ranks are needed"),
        ({"status": "failed", "reason": "late", "step_time_us": None}, "may not carry"),
    ],
)
@pytest.mark.parametrize("how", ["table", "json"])
def test_stored_phases_that_cannot_be_are_refused_by_name(tmp_path, changes, said, how):
    from click.testing import CliRunner

    from mokbench.cli import main

    path = stored_line(tmp_path, **json.loads(json.dumps(changes)))
    with pytest.raises(ResultsError):
        RunFolder.open(path).records()
    done = CliRunner().invoke(main, ["report", str(path), "--format", how, "--no-charts"])
    assert done.exit_code == 2, done.output
    assert "records.jsonl:1: " in done.stderr
    assert said in done.stderr
    assert done.stdout == ""


def test_a_row_of_before_has_no_phases_and_opens(tmp_path):
    data = row("mok", 100.0, **CUDA).to_dict()
    del data["kernel_phases"]
    run = RunFolder.create(tmp_path / "run", fake_meta())
    run.close()
    line = json.dumps(data | {"record_version": 2})
    (tmp_path / "run" / "records.jsonl").write_text(line + "\n")
    (record,) = RunFolder.open(tmp_path / "run").records()
    assert record.kernel_phases == []
    assert record.step_time_us.median == 100.0


def test_a_failed_row_carries_no_phases():
    phases = phases_by_rank([mok_phase_times(stamps())], 1)
    with pytest.raises(ValueError, match="kernel_phases"):
        Record.model_validate(
            row("mok", 1.0, ranks=1).to_dict()
            | {"status": "failed", "reason": "x", "step_time_us": None, "kernel_phases": phases}
        )
