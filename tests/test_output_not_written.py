"""Standard output that is full or closed, and bugs: an exit code that is never a regression's."""

import os
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from launches import SLOW, launches
from runs import command

SMOKE = Path(__file__).parents[1] / "results" / "h200" / "smoke"


def into_a_full_file(
    folder: Path, *arguments: str | Path, num_bytes: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A file that may hold so many bytes: what a full disk is to whoever writes."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))

    told = folder / "told"
    with told.open("wb") as out:
        done = subprocess.run(
            command(*arguments),
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            preexec_fn=limit,
            env=os.environ | environment,
        )
    assert told.stat().st_size == num_bytes
    return done


def into_a_closed_pipe(
    *arguments: str | Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A pipe whose reader has left before anything is written."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            command(*arguments),
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            env=os.environ | environment,
        )
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["schema"],
        ["systems"],
        ["doctor"],
        ["report", SMOKE, "--no-charts"],
        ["report", SMOKE, "--format", "json"],
        ["report", SMOKE, "--format", "html"],
    ],
    ids=lambda arguments: " ".join(map(str, arguments)).replace(str(SMOKE), "RUN"),
)
def test_a_full_standard_output_is_one_line_and_exit_2(
    tmp_path: Path, arguments: list[str | Path]
) -> None:
    done = into_a_full_file(tmp_path, *arguments)
    assert done.returncode == 2, done.stderr
    assert (
        done.stderr == "writing the output failed: File too large; what was printed is not whole\n"
    )


@pytest.mark.parametrize("arguments", [["schema"], ["report", SMOKE, "--format", "json"]])
def test_a_reader_who_left_is_no_error(arguments: list[str | Path]) -> None:
    done = into_a_closed_pipe(*arguments)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_check_keeps_its_exit_code_whatever_reads_it(history: Path, tmp_path: Path) -> None:
    launches(tmp_path, "slow", 3, start=20, factors=SLOW, seed=2)
    arguments = ["check", tmp_path / "slow-*", "--history", history]
    done = into_a_closed_pipe(*arguments)
    assert (done.returncode, done.stderr) == (1, "")
    assert into_a_full_file(tmp_path, *arguments).returncode != 0


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("what", ["check", "compare", "report", "report json"])
def test_output_that_fits_in_part_is_no_success(
    history: Path, tmp_path: Path, what: str, unbuffered: str
) -> None:
    launches(tmp_path, "same", 3, start=20, seed=2)
    runs = tmp_path / "same-*"
    arguments = {
        "check": ["check", runs, "--history", history, "--explain"],
        "compare": ["compare", tmp_path / "same-0", tmp_path / "same-[12]"],
        "report": ["report", runs, "--no-charts"],
        "report json": ["report", runs, "--format", "json"],
    }
    done = into_a_full_file(tmp_path, *arguments[what], num_bytes=20, PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 2, done.stderr
    assert done.stderr.endswith(
        "writing the output failed: File too large; what was printed is not whole\n"
    )


def test_unbuffered_output_is_whole_and_a_reader_may_leave(tmp_path: Path) -> None:
    whole = [
        subprocess.run(
            command("report", SMOKE, "--format", "json"),
            stdout=subprocess.PIPE,
            check=True,
            timeout=120,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        ).stdout
        for unbuffered in ("", "1")
    ]
    assert whole[0] == whole[1]
    done = into_a_closed_pipe("schema", PYTHONUNBUFFERED="1")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        ("RuntimeError('x' * 3)", 70, "RuntimeError: xxx\nthis is a bug in mokbench"),
        ("MemoryError", 70, "MemoryError\nthis is a bug in mokbench"),
        ("OSError(28, 'No space left', 'a-file')", 70, "this is a bug in mokbench"),
        ("PermissionError(13, 'Permission denied')", 70, "this is a bug in mokbench"),
        ("KeyboardInterrupt", 130, ""),
    ],
)
def test_an_error_that_nobody_expected_is_no_regression(error: str, code: int, said: str) -> None:
    script = f"""
        import mokbench.config
        from mokbench.cli import main
        def fail(): raise {error}
        mokbench.config.schema = fail
        main(["schema"])
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
    assert ("Traceback" in done.stderr) == (code == 70)
