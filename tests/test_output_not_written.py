"""Standard output that is full or closed: one line and an exit code, never a traceback."""

import os
import subprocess
from pathlib import Path

import pytest
from launches import SLOW, launches
from runs import command

SMOKE = Path(__file__).parents[1] / "results" / "h200" / "smoke"


def into_a_full_file(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """A file that may hold no byte: what a full disk is to whoever writes."""
    told = folder / "told"
    script = f'ulimit -f 0; exec "$@" > "{told}"'
    done = subprocess.run(
        ["bash", "-c", script, "_", *command(*arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert told.read_bytes() == b""
    return done


def into_a_closed_pipe(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """A pipe whose reader has left before anything is written."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            command(*arguments), stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120
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
