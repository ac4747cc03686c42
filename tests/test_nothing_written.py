"""Streams that all fail, and readers who leave: the exit code is still the one that was earned."""

import os
import resource
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from launches import SLOW, launches
from runs import command

SMOKE = Path(__file__).parents[1] / "results" / "h200" / "smoke"
NOTHING = """\
name: nothing
fabric: host
ranks: 2
model: {name: tiny, hidden: 64, intermediate: 64, experts: 8, top_k: 2}
systems: [deepep]
tokens_per_rank: 4
require: [deepep]
"""


def no_room() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def into_full_files(
    folder: Path, *arguments: str | Path, unbuffered: str, only_errors: bool = False
) -> int:
    """Exit code where no byte fits: what a full disk is to whoever writes."""
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        done = subprocess.run(
            command(*arguments),
            stdout=subprocess.PIPE if only_errors else out,
            stderr=err,
            timeout=120,
            preexec_fn=no_room,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )
    assert (folder / "out").stat().st_size == (folder / "err").stat().st_size == 0
    return done.returncode


def unread(*arguments: str | Path, both: bool = False) -> int:
    """Exit code where the reader of standard output, or of ``both`` streams, has left."""
    reader, writer = os.pipe()
    os.close(reader)
    err = writer if both else subprocess.DEVNULL
    try:
        return subprocess.run(
            command(*arguments), stdout=writer, stderr=err, timeout=120
        ).returncode
    finally:
        os.close(writer)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "arguments",
    [["schema"], ["--help"], ["report", SMOKE, "--no-charts"], ["report", "nowhere"], ["check"]],
    ids=lambda arguments: " ".join(map(str, arguments[:1] + arguments[2:])),
)
def test_where_nothing_can_be_written_the_exit_code_is_2(
    tmp_path: Path, arguments: Sequence[str | Path], unbuffered: str
) -> None:
    assert into_full_files(tmp_path, *arguments, unbuffered=unbuffered) == 2


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(("factors", "expected"), [(None, 2), (SLOW, 1)], ids=["same", "slower"])
def test_a_warning_that_has_no_room_is_no_success_and_hides_no_regression(
    history: Path,
    tmp_path: Path,
    factors: dict[str, float] | None,
    expected: int,
    unbuffered: str,
) -> None:
    launches(tmp_path, "some", 3, start=20, factors=factors, seed=2)
    arguments = ["check", tmp_path / "some-*", "--history", history]
    assert into_full_files(tmp_path, *arguments, unbuffered=unbuffered) == 2
    (tmp_path / "some-folder-that-is-passed-over").mkdir()
    found = into_full_files(tmp_path, *arguments, unbuffered=unbuffered, only_errors=True)
    assert found == expected


@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["--help"],
        ["check", "--help"],
        ["doctor"],
        ["report", SMOKE, "--no-charts"],
        ["run", Path(__file__).parents[1] / "configs" / "quickstart.yaml", "--dry-run"],
    ],
    ids=lambda arguments: " ".join(map(str, arguments[:1] + arguments[2:])),
)
def test_a_reader_who_left_is_no_regression(arguments: Sequence[str | Path]) -> None:
    assert unread(*arguments) == 0


@pytest.mark.parametrize(
    "arguments",
    [["check"], ["report", "nowhere"], ["check", "nowhere", "--history", "nowhere"]],
    ids=lambda arguments: " ".join(arguments),
)
def test_an_error_that_nobody_reads_is_an_error(arguments: Sequence[str]) -> None:
    assert unread(*arguments, both=True) == 2


def test_rows_that_are_missing_are_missing_whoever_reads(tmp_path: Path) -> None:
    config = tmp_path / "nothing.yaml"
    config.write_text(NOTHING, encoding="utf-8")
    assert unread("run", config, "--out", tmp_path / "run", "--no-charts") == 3
