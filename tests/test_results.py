import json
import os
from pathlib import Path
from typing import Any

import pytest
from fake_run import fake_machine, fake_meta, fake_record, fake_samples, measured

from mokbench.errors import ResultsError
from mokbench.figures import SignalPoint
from mokbench.record import METHOD_VERSION, RECORD_VERSION
from mokbench.results import RunFolder, open_runs


def start(path: Path, **changes: Any) -> RunFolder:
    return RunFolder.create(path, fake_meta(**changes))


def failed(system: str = "mok") -> Any:
    return fake_record(system=system, status="failed", reason="rank 2 was killed by signal 9")


def test_a_run_reads_back_as_it_was_written(tmp_path: Path) -> None:
    run = start(tmp_path / "run", config={"ranks": 4})
    record, samples = measured(fake_record(), 100.0)
    stored = run.append(record, samples)
    run.finish("done")
    again = RunFolder.open(tmp_path / "run")
    assert again.records() == [stored]
    assert stored.step_time_us == record.step_time_us
    assert again.meta.config == {"ranks": 4}
    assert again.meta.status == "done"
    assert again.meta.finished is not None
    assert again.meta.machine == fake_machine()
    frame = again.samples(stored)
    assert frame is not None
    assert frame["duration_us"].tolist() == samples["duration_us"].tolist()
    assert list(frame.columns) == [
        "block", "iteration", "rank", "start_us", "duration_us",
        "sm_clock_mhz", "accepted",
    ]  # fmt: skip
    assert again.samples(failed()) is None


def test_each_row_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    run = start(tmp_path)
    for number, system in enumerate(["mok", "push", "alltoall"], 1):
        run.append(fake_record(system=system))
        lines = (tmp_path / "records.jsonl").read_text().splitlines()
        assert len(lines) == number
        assert json.loads(lines[-1])["system"] == system
    assert RunFolder.open(tmp_path).meta.status == "running"


def test_create_refuses_a_folder_with_something_in_it(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ResultsError, match=r"not empty; give another --out.*--resume"):
        start(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_create_takes_an_empty_folder_and_makes_parents(tmp_path: Path) -> None:
    start(tmp_path)
    start(tmp_path / "samples" / "a" / "b")
    assert (tmp_path / "samples/a/b/run.json").is_file()


def test_create_refuses_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ResultsError, match="is a file, not a folder"):
        start(tmp_path / "file")
    with pytest.raises(ResultsError, match=r"making the run folder failed: Not a directory"):
        start(tmp_path / "file" / "run")
    assert (tmp_path / "file").read_text() == "mine"


def test_create_leaves_nothing_behind_where_it_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, content: bytes) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("mokbench.results.replace_file", refuse)
    with pytest.raises(ResultsError, match=r"run.json: .* failed: Permission denied"):
        start(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_create_in_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ResultsError, match=r"Permission denied; give an --out"):
        start(tmp_path / "run")


def test_readers_and_finished_runs_cannot_append(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.finish("done")
    for folder in (run, RunFolder.open(tmp_path)):
        with pytest.raises(ResultsError, match="opened for reading, or already finished"):
            folder.append(fake_record())


def test_the_latest_attempt_counts_in_first_order(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.append(failed("mok"))
    run.append(fake_record(system="push"))
    record, samples = measured(fake_record(), 50.0)
    second = run.append(record, samples)
    assert second.attempt == 2
    assert [(r.system, r.status, r.attempt) for r in run.records()] == [
        ("mok", "ok", 2),
        ("push", "ok", 1),
    ]
    assert (tmp_path / f"samples/{record.id}.a2.parquet").is_file()


def test_resume_knows_what_is_done(tmp_path: Path) -> None:
    run = start(tmp_path)
    ok, bad = run.append(fake_record()), run.append(failed("push"))
    deepep = fake_record(system="deepep", status="unsupported", reason="needs GPUs")
    run.append(deepep)
    run.finish("failed")
    again = RunFolder.resume(tmp_path, fake_machine())
    assert again.meta.status == "running"
    assert again.completed_ids(include_failed=True) == {ok.id, bad.id, deepep.id}
    assert again.completed_ids(include_failed=False) == {ok.id, deepep.id}
    assert again.append(fake_record(system="push")).attempt == 2


def test_resume_refuses_another_machine_or_method(tmp_path: Path) -> None:
    start(tmp_path / "a").close()
    with pytest.raises(ResultsError, match=r"another machine \(torch 2.13.0\+cpu against 2.14.0\)"):
        RunFolder.resume(tmp_path / "a", fake_machine(torch="2.14.0"))
    start(tmp_path / "b", method_version=0).close()
    with pytest.raises(ResultsError, match=f"method version 0, this mokbench has {METHOD_VERSION}"):
        RunFolder.resume(tmp_path / "b", fake_machine())


def test_a_torn_last_row_is_ignored_and_cut_on_resume(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.append(fake_record())
    run.append(fake_record(system="push"))
    run.close()
    file = tmp_path / "records.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.warns(UserWarning, match="ignored a last row that was cut short"):
        assert [r.system for r in RunFolder.open(tmp_path).records()] == ["mok"]
    with pytest.warns(UserWarning, match="removed a row that a crash cut short"):
        again = RunFolder.resume(tmp_path, fake_machine())
    again.append(fake_record(system="push"))
    assert [r.system for r in again.records()] == ["mok", "push"]


@pytest.mark.parametrize(
    "line, problem",
    [
        (b'{"id": "x"', r"records.jsonl:2: not a row: Expecting"),
        (b'"text"', r"records.jsonl:2: not a row: found a str, a JSON object is needed"),
        (b"\xff\xfe", r"records.jsonl:2: not a row: "),
        (b"", r"records.jsonl:2: not a row: Expecting value"),
        (b'{"id": "x"}', r"records.jsonl:2: not a row: system: Field required"),
    ],
)
def test_a_corrupt_middle_row_is_an_error_that_names_its_line(
    tmp_path: Path, line: bytes, problem: str
) -> None:
    run = start(tmp_path)
    run.append(fake_record())
    with (tmp_path / "records.jsonl").open("ab") as file:
        file.write(line + b"\n")
    run.append(fake_record(system="push"))
    with pytest.raises(ResultsError, match=problem):
        RunFolder.open(tmp_path).records()


@pytest.mark.parametrize("change, age", [(1, "a newer"), (-RECORD_VERSION, "an older")])
def test_other_record_versions_are_refused(tmp_path: Path, change: int, age: str) -> None:
    run = start(tmp_path)
    run.append(fake_record(record_version=RECORD_VERSION + change))
    with pytest.raises(ResultsError, match=rf"records.jsonl:1: written by {age} mokbench"):
        run.records()
    meta = json.loads((tmp_path / "run.json").read_text())
    meta |= {"record_version": RECORD_VERSION + change, "a_field_of_that_version": 1}
    (tmp_path / "run.json").write_text(json.dumps(meta))
    with pytest.raises(ResultsError, match=rf"run.json: written by {age} mokbench"):
        RunFolder.open(tmp_path)


def test_what_is_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="no such run folder"):
        RunFolder.open(tmp_path / "nowhere")
    start(tmp_path / "runs" / "one").close()
    with pytest.raises(ResultsError, match=r"it has no run.json\); it holds 1 runs"):
        RunFolder.open(tmp_path / "runs")
    (tmp_path / "runs" / "one" / "run.json").write_text("{")
    with pytest.raises(ResultsError, match=r"run\.json: not a run description"):
        RunFolder.open(tmp_path / "runs" / "one")


def test_paths_and_globs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a-1", "a-2", "b-1"):
        start(tmp_path / name).close()
    (tmp_path / "a-3").mkdir()
    names = [run.path.name for run in open_runs([tmp_path / "b-1", f"{tmp_path}/a-*"])]
    assert names == ["b-1", "a-1", "a-2"]
    monkeypatch.chdir(tmp_path)
    assert [run.path.name for run in open_runs(["a-1", "./a-1", "a-?"])] == ["a-1", "a-2"]
    with pytest.raises(ResultsError, match=r"c-\*: no such run folder, and as a glob"):
        open_runs(["c-*"])
    with pytest.raises(ResultsError, match="a-3: not a run folder"):
        open_runs(["a-3"])
    with pytest.raises(ResultsError, match="no run folder given"):
        open_runs([])


def test_signals(tmp_path: Path) -> None:
    run = start(tmp_path)
    assert run.signals() == []
    quantity = {"median": 1.5, "p99": 3.0, "ci_low": 1.4, "ci_high": 1.6, "n": 400}
    point = SignalPoint.model_validate(
        {"ranks": 2, "fabric": "host", "link": "shm", "quantities": {"signal_hop_us": quantity}}
    )
    run.write_signals([point])
    assert RunFolder.open(tmp_path).signals() == [point]
    (tmp_path / "signals.json").write_text('[{"ranks": 2}]')
    with pytest.raises(ResultsError, match=r"signals.json: not a signaling file: 0.fabric"):
        run.signals()
    whole = point.model_dump_json().replace("1.5", "NaN", 1)
    (tmp_path / "signals.json").write_text(f"[{whole}]")
    with pytest.raises(ResultsError, match=r"2 ranks: signal_hop_us.median is nan"):
        run.signals()


def test_long_ids_fit_file_names(tmp_path: Path) -> None:
    run = start(tmp_path)
    samples = fake_samples(10.0, 2, 0)
    first = run.append(fake_record(id="m" * 400 + "a"), samples)
    second = run.append(fake_record(id="m" * 400 + "b"), samples)
    assert first.samples_file != second.samples_file
    assert run.samples(second) is not None
    (tmp_path / str(second.samples_file)).write_bytes(b"no parquet")
    with pytest.raises(ResultsError, match="cannot be read"):
        run.samples(second)


def test_a_glob_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="glob"):
        open_runs([tmp_path / "a**b"])


def test_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(ResultsError, match="reading the folder failed: Permission denied"):
        start(tmp_path)
    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(ResultsError, match="reading failed: Permission denied"):
        RunFolder.open(tmp_path)
