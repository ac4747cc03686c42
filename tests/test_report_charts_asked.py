"""Charts that were asked for and cannot be written are an error; those nobody named are not."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from launches import cell, write_launch

from mokbench.cli import main


@pytest.mark.parametrize("format_", ["table", "json"])
def test_charts_that_were_asked_for_must_be_written(tmp_path: Path, format_: str) -> None:
    run = write_launch(tmp_path / "one", [cell("push", 1000.0)], 0)
    (tmp_path / "file").write_text("mine")
    (run.path / "charts").write_text("mine")
    told = ["report", str(run.path), "--format", format_]
    done = CliRunner().invoke(main, [*told, "--charts", str(tmp_path / "file")])
    assert done.exit_code == 2, done.output
    assert done.stderr.count("name a folder that can be written") == 1
    done = CliRunner().invoke(main, told)
    assert done.exit_code == 0, done.output
    assert ("no charts: " in done.stderr) is (format_ == "table")
