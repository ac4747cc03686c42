"""Fixtures shared by tests that start processes and by tests of the gate."""

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from launches import launches

from mokbench.gpus import visible_here
from mokbench.regression.check import check, record

# A terminal's width, which pytest-xdist hands to its workers, would leave columns out of tables.
os.environ.pop("COLUMNS", None)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Two processes where pytest-xdist is there and none are asked for: tests mostly wait.

    A file stays in one of them. Not where there is a GPU, on which two GPU tests would meet.
    """
    option = config.option
    # A worker comes here as well, and asks for none.
    asked = 0 if hasattr(config, "workerinput") else getattr(option, "numprocesses", 0)
    if asked is None and not option.usepdb and not Path("/dev/nvidiactl").exists():
        option.numprocesses, option.dist = 2, "loadfile"


@pytest.fixture(autouse=True)
def own_gpus() -> Iterator[None]:
    """GPUs that a test makes up are not the next one's."""
    visible_here.cache_clear()
    yield
    visible_here.cache_clear()


@pytest.fixture
def unused_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def ten(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """History of ten launches at 1 % noise, and the launches."""
    folder = tmp_path_factory.mktemp("ten")
    for run in launches(folder, "base", 10, seed=1):
        record(check([run], folder / "history"))
    return folder


@pytest.fixture
def history(ten: Path, tmp_path: Path) -> Path:
    """A copy of that history, to be written to."""
    return shutil.copytree(ten / "history", tmp_path / "history")
