"""Figures and words that nothing can have measured or said: one line and exit 2, never a bug's."""

import errno
import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from launches import SLOW, gate, h200, launches

from mokbench.cli import main
from mokbench.record import parse_record
from mokbench.regression.history import folder_of
from mokbench.results import open_runs

HUGE = 10**400
PHASE = {
    "rank": 0,
    "clock": 0,
    "num_ctas": 1,
    "spans": [],
    "waited_us_median": 0.0,
    "waited_us_max": 0.0,
}
TRAFFIC = dict.fromkeys(
    (f"{phase}_{kind}_bytes" for phase in ("dispatch", "combine") for kind in ("useful", "wire")), 0
)
RESULTS = Path(__file__).parents[1] / "results"


def refused(path: Path, *arguments: str | Path) -> str:
    """What a command says of ``path``, whose content it refuses with exit 2 and nothing else."""
    done = CliRunner().invoke(main, [*map(str, arguments)])
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    said = done.stderr.removesuffix("\n")
    assert str(path) in said
    assert "\n" not in said
    assert len(said) < 500
    return said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"wire_bytes": HUGE}, "wire_bytes is 10000"),
        ({"peak_memory_bytes": HUGE}, "peak_memory_bytes is 10000"),
        ({"expert_counts": [HUGE]}, "expert_counts[0] is 10000"),
        ({"nan_count": HUGE}, "nan_count is 10000"),
        ({"tokens_per_rank": HUGE}, "tokens_per_rank is 10000"),
        ({"ranks": 10**12, "kernel_phases": [PHASE]}, "ranks is 1000000000000"),
        ({"ranks": 10**9, "kernel_phases": [PHASE]}, "kernel_phases are of ranks [0]"),
        ({"kernel_phases": [PHASE | {"num_ctas": HUGE}]}, "kernel_phases.0.num_ctas"),
        ({"traffic": TRAFFIC | {"combine_wire_bytes": -1}}, "traffic.combine_wire_bytes is -1"),
        ({"seed": HUGE}, "seed is 10000"),
        ({"record_version": HUGE}, "record_version 10000"),
        ({"hidden": -5}, "hidden is -5, 1 to"),
        ({"intermediate": 0}, "intermediate is 0, 1 to"),
        ({"tokens_per_rank": -16}, "tokens_per_rank is -16, 0 to"),
        ({"experts": 0}, "experts is 0, 1 to"),
        ({"top_k": -1}, "top_k is -1, 1 to"),
        ({"ranks_per_gpu": -4}, "ranks_per_gpu is -4, 1 to"),
        ({"attempt": 0}, "attempt is 0, 1 to"),
        ({"num_sms": -9}, "num_sms is -9, 0 to"),
        ({"timer_step_us": -3.0}, "timer_step_us is -3.0"),
        ({"mma_utilization": -1.0}, "mma_utilization is -1.0"),
        ({"hold_expired_share": 5.0}, "hold_expired_share is 5.0, a share is 0 to 1"),
        ({"rejected_samples": -5}, "rejected_samples is -5, 0 to"),
        ({"started": "soon"}, "started: Value error, 'soon' is no date and time"),
        ({"elapsed_s": -0.5}, "elapsed_s is -0.5"),
        ({"measured_s": -1e9}, "measured_s is -1000000000.0"),
        ({"peak_sm_clock_mhz": -1.0}, "peak_sm_clock_mhz is -1.0"),
    ],
)
def test_a_number_that_cannot_be_is_refused_where_rows_are_read(
    history: Path, tmp_path: Path, changes: dict, said: str
) -> None:
    launches(tmp_path, "slow", 3, start=20, factors=SLOW)
    path = tmp_path / "slow-1" / "records.jsonl"
    first, *rest = path.read_text(encoding="utf-8").splitlines()
    rows = [json.dumps(json.loads(first) | changes), *rest]
    path.write_text("".join(row + "\n" for row in rows), encoding="utf-8")
    for arguments in (
        ["check", tmp_path / "slow-*", "--history", history],
        ["report", path.parent, "--format", "html"],
    ):
        assert said in refused(path, *arguments)


def test_a_rank_may_have_no_tokens(tmp_path: Path) -> None:
    (run,) = launches(tmp_path, "one", 1)
    row = json.loads((run.path / "records.jsonl").read_text().splitlines()[0])
    line = json.dumps(row | {"tokens_per_rank": 0, "num_sms": 0}).encode()
    assert parse_record("here", line).tokens_per_rank == 0


@pytest.mark.parametrize(
    "changes",
    [{"memory_bytes": HUGE}, {"gpus": -1}, {"gpu_memory_bytes": HUGE}, {"cores": -3}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_machine_that_cannot_be_is_refused(history: Path, tmp_path: Path, changes: dict) -> None:
    (run, *_) = launches(tmp_path, "slow", 3, start=20, factors=SLOW)
    file = run.path / "run.json"
    meta = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(meta | {"machine": meta["machine"] | changes}), encoding="utf-8")
    for arguments in (
        ["check", tmp_path / "slow-*", "--history", history],
        ["report", run.path, "--no-charts"],
    ):
        assert f"machine.{next(iter(changes))}: Input should be" in refused(file, *arguments)


@pytest.mark.parametrize(
    ("ranks", "n", "said"),
    [
        (HUGE, 1, "0.ranks: Input should be less"),
        (-5, 1, "0.ranks: Input should be greater"),
        (2, -1, "signal_hop_us.n is -1"),
        (2, HUGE, "signal_hop_us.n is 10000"),
    ],
)
def test_signaling_that_cannot_be_is_refused(tmp_path: Path, ranks: int, n: int, said: str) -> None:
    (run,) = launches(tmp_path, "one", 1)
    quantity = {"median": 1.0, "p99": 1.0, "ci_low": None, "ci_high": None, "n": n}
    point = {"ranks": ranks, "fabric": "cuda", "link": "nvlink"}
    file = run.path / "signals.json"
    file.write_text(json.dumps([point | {"quantities": {"signal_hop_us": quantity}}]))
    assert said in refused(file, "report", run.path, "--no-charts")


def test_all_committed_runs_still_open() -> None:
    runs = [path.parent for path in RESULTS.glob("*/*/run.json")]
    assert len(runs) >= 3
    for run in open_runs(runs):
        assert run.records()
        run.signals()


def test_a_history_that_may_not_be_read_is_not_a_new_one(
    history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches(tmp_path, "slow", 3, start=20, factors=SLOW)
    folder, stat = folder_of(history, h200()), os.stat

    def refusing(path, **options):
        if Path(path).parent == folder:
            raise PermissionError(errno.EACCES, "Permission denied")
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refusing)
    monkeypatch.setattr(os, "lstat", lambda path: refusing(path, follow_symlinks=False))
    monkeypatch.setattr(Path, "lstat", lambda path: refusing(path, follow_symlinks=False))
    said = refused(folder, "check", tmp_path / "slow-*", "--history", history)
    assert "launches.jsonl: reading failed: Permission denied" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--record", "--commit", "\udcff\udcfe"], "--commit: '\\udcff\\udcfe' is no UTF-8 text"),
        (["--commit", "\udcff"], "--commit: '\\udcff' is no UTF-8 text"),
        (["--accept", "\udcff"], "--accept: '\\udcff' is no UTF-8 text"),
    ],
)
def test_words_that_are_no_text_are_refused_before_anything_is_recorded(
    history: Path, tmp_path: Path, options: list[str], said: str
) -> None:
    launches(tmp_path, "slow", 3, start=20, factors=SLOW)
    file = folder_of(history, h200()) / "launches.jsonl"
    before = file.read_bytes()
    done = gate(tmp_path / "slow-*", "--history", history, *options)
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", f"{said}\n")
    assert file.read_bytes() == before


def test_a_run_folder_whose_name_is_no_text_is_judged_and_not_recorded(
    history: Path, tmp_path: Path
) -> None:
    for run in launches(tmp_path, "same", 3, start=20, seed=2):
        run.path.rename(os.fsdecode(os.fsencode(run.path) + b"\xff"))
    assert gate(tmp_path / "same-*", "--history", history).exit_code == 0
    done = gate(tmp_path / "same-*", "--history", history, "--record")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "run folder 1: 'same-0\\udcff' is no UTF-8 text" in done.stderr
