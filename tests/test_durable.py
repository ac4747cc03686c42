import fcntl
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
from fake_run import fake_machine, fake_meta, fake_record, fake_samples

from mokbench.durable import Lock, append_line, cut_torn_line, is_locked, replace_file, whole_lines
from mokbench.errors import ResultsError
from mokbench.results import RunFolder


def start(path: Path) -> RunFolder:
    return RunFolder.create(path, fake_meta())


def full_after(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let os.write accept that many bytes in all, then fail as a full disk does."""
    real, left = os.write, [num_bytes]

    def write(descriptor: int, content: Any) -> int:
        if left[0] == 0:
            raise OSError(28, "No space left on device")
        written = real(descriptor, bytes(content)[: left[0]])
        left[0] -= written
        return written

    monkeypatch.setattr(os, "write", write)


def test_a_line_that_does_not_fit_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows"
    append_line(file, "first")
    full_after(3, monkeypatch)
    with pytest.raises(OSError, match="No space left"):
        append_line(file, "second")
    assert file.read_bytes() == b"first\n"


def test_ctrl_c_during_the_sync_keeps_a_whole_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows"

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            append_line(file, "whole")
    assert file.read_bytes() == b"whole\n"
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            append_line(file, "not begun")
    assert file.read_bytes() == b"whole\n"


def test_a_replaced_file_keeps_its_old_content_until_the_new_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "meta"
    replace_file(file, b"old")
    replace_file(file, b"newer")
    full_after(2, monkeypatch)
    with pytest.raises(OSError, match="No space left"):
        replace_file(file, b"newest")
    assert file.read_bytes() == b"newer"
    assert [path.name for path in tmp_path.iterdir()] == ["meta"]


def test_lines_of_a_file_cut_short(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    assert whole_lines(file) == ([], 0)
    file.write_bytes(b"one\ntwo\nthr")
    assert whole_lines(file) == ([b"one", b"two"], 3)
    assert cut_torn_line(file) == 3
    assert file.read_bytes() == b"one\ntwo\n"
    assert cut_torn_line(file) == 0
    file.write_bytes(b"thr")
    assert whole_lines(file) == ([], 3)


def test_samples_go_when_their_row_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(tmp_path)
    run.append(fake_record(system="push"))

    def refuse(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mokbench.results.append_line", refuse)
    with pytest.raises(ResultsError, match="No space left on device; the 1 rows stored before"):
        run.append(fake_record(), fake_samples(10.0, 2, 0))
    assert list((tmp_path / "samples").iterdir()) == []
    assert [r.system for r in run.records()] == ["push"]


def test_two_writers_are_refused_and_readers_are_not(tmp_path: Path) -> None:
    run = start(tmp_path)
    with pytest.raises(ResultsError, match=rf"\(pid {os.getpid()}\) is writing here"):
        RunFolder.resume(tmp_path, fake_machine())
    RunFolder.open(tmp_path)
    run.close()
    RunFolder.resume(tmp_path, fake_machine()).close()


def test_a_lock_waits_as_long_as_it_is_told(tmp_path: Path) -> None:
    held = Lock(tmp_path)
    timer = threading.Timer(0.3, held.release)
    timer.start()
    with pytest.raises(ResultsError, match="is writing here"):
        Lock(tmp_path)
    Lock(tmp_path, 30.0).release()
    assert held._descriptor == -1
    timer.join()


def test_a_writer_in_another_process_is_noticed(tmp_path: Path) -> None:
    start(tmp_path).close()
    code = "import sys; from mokbench.durable import Lock; from pathlib import Path; "
    code += "lock = Lock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ResultsError, match=f"pid {holder.pid}"):
            RunFolder.resume(tmp_path, fake_machine())
        holder.kill()
    RunFolder.resume(tmp_path, fake_machine()).close()


def test_a_file_system_without_locks_only_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.warns(UserWarning, match="has no locks"):
        start(tmp_path).append(fake_record())


LIMITED = textwrap.dedent(
    """
    import resource, sys
    from pathlib import Path
    from fake_run import fake_meta, fake_record, fake_samples
    from mokbench.errors import ResultsError
    from mokbench.results import RunFolder

    run = RunFolder.create(Path(sys.argv[1]), fake_meta())
    big = fake_samples(10.0, 8, 0) if sys.argv[2] == "samples" else None
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    for number in range(20):
        try:
            run.append(fake_record(id=f"row-{number}"), big if number > 2 else None)
        except ResultsError as error:
            print(number, error)
            break
    """
)


@pytest.mark.parametrize("what", ["rows", "samples"])
def test_a_full_disk_loses_no_row_that_was_stored(tmp_path: Path, what: str) -> None:
    path = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path), what],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
    )
    number, message = done.stdout.split(" ", 1)
    assert f"storing row-{number} failed: File too large; the {number} rows stored" in message
    assert f"mokbench run --resume {path}" in message
    records = RunFolder.open(path).records()
    assert [r.id for r in records] == [f"row-{i}" for i in range(int(number))]
    assert len(records) >= 3
    assert list((path / "samples").iterdir()) == []
    again = RunFolder.resume(path, fake_machine())
    again.append(fake_record(id=f"row-{number}"), fake_samples(10.0, 8, 0))
    assert len(again.records()) == int(number) + 1


def test_a_held_lock_is_seen_without_taking_it(tmp_path):
    assert not is_locked(tmp_path)
    lock = Lock(tmp_path)
    assert is_locked(tmp_path)
    assert is_locked(tmp_path), "looking does not take it"
    lock.release()
    assert not is_locked(tmp_path)


def test_a_look_at_the_lock_does_not_keep_a_writer_out(tmp_path, monkeypatch):
    with (tmp_path / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        # The looker is gone by the writer's second try.
        monkeypatch.setattr("time.sleep", lambda _: fcntl.flock(file, fcntl.LOCK_UN))
        Lock(tmp_path).release()
