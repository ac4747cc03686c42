"""Names of others in markdown and pages: no markup, mention or control character of theirs."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_run import fake_record
from launches import cell, write_launch

from mokbench.cli import main
from mokbench.shown_text import escaped, visible


def test_escaped_text_is_one_line_without_markup() -> None:
    assert escaped("<script>a|b</script>\n# h1") == "\\<script\\>a\\|b\\</script\\> # h1"
    assert escaped("a\r\nb\u2028c &lt;") == "a b c \\&lt;"
    assert "@\u200b" in escaped("@everyone")
    assert visible("REWOLS\u202e\u2066") == "REWOLS\ufffd\ufffd"
    assert visible("\x1b[31m\x07\x00\x9b\t\n") == "\u241b[31m\u2407\u2400\ufffd\t\n"


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "a\n# h1 @all <img>"])
def test_a_runs_name_is_text_in_the_title(tmp_path: Path, name: str) -> None:
    run = write_launch(tmp_path / "one", [cell("push", 1000.0)], 0, name=name)
    done = CliRunner().invoke(main, ["report", str(run.path), "--format", "markdown"])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[0] == f"# mokbench: {escaped(name)}"
    assert not re.search(r"(?<!\\)<(script|img)|^# h1|@all", done.stdout, re.MULTILINE)


def test_a_reason_mentions_nobody(tmp_path: Path) -> None:
    row = fake_record(status="failed", reason="ask @someone")
    run = write_launch(tmp_path / "one", [row], 0)
    done = CliRunner().invoke(main, ["report", str(run.path), "--format", "markdown"])
    assert "@\u200bsomeone" in done.stdout


@pytest.mark.parametrize("format_", ["html", "markdown"])
def test_control_characters_of_names_are_shown(tmp_path: Path, format_: str) -> None:
    names = {"model": "a\x07\x00b", "variant": "\x1b[31mred"}
    run = write_launch(tmp_path / "one", [cell("push", 1000.0, **names, id="one")], 0)
    done = CliRunner().invoke(main, ["report", str(run.path), "--format", format_])
    assert done.exit_code == 0, repr(done.exception)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", done.stdout)
    assert "a\u2407\u2400b" in done.stdout
    assert "\u241b" in done.stdout
