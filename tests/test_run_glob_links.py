"""Links that lead nowhere, and brackets that are part of a name, where globs name run folders."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from launches import SLOW, gate, launches

from mokbench.cli import main
from mokbench.errors import ResultsError
from mokbench.results import open_runs
from mokbench.run_glob import globbed


@pytest.mark.parametrize("target", ["gone", "slow-3"], ids=["nowhere", "itself"])
@pytest.mark.parametrize("command", ["check", "compare", "report"])
def test_a_run_that_a_link_lost_is_not_passed_over(
    history: Path, tmp_path: Path, command: str, target: str
) -> None:
    launches(tmp_path, "slow", 3, start=20, factors=SLOW)
    (tmp_path / "slow-3").symlink_to(target)
    runs = str(tmp_path / "slow-*")
    arguments = {
        "check": [runs, "--history", str(history)],
        "compare": [str(tmp_path / "slow-0"), runs],
        "report": [runs, "--no-charts"],
    }
    done = CliRunner().invoke(main, [command, *arguments[command]])
    assert (done.exit_code, done.stdout) == (2, ""), repr(done.exception)
    assert done.stderr == (
        f"{tmp_path / 'slow-3'}: is a link that leads nowhere; mend it, or leave it out\n"
    )


@pytest.mark.parametrize(
    ("link", "glob"),
    [
        ("night-2", "night-*/n-*"),
        ("night-2", "night-*/*/.."),
        ("night-1/latest", "night-*/latest"),
        ("night-1/part", "night-*/part/n-0"),
        ("night-1/n-7", "**/n-*"),
        ("night-1/n-0/run.json", "night-*/n-*"),
    ],
)
def test_a_link_that_leads_nowhere_is_an_error_wherever_it_stands(
    tmp_path: Path, link: str, glob: str
) -> None:
    (tmp_path / "night-1").mkdir()
    launches(tmp_path / "night-1", "n", 2)
    path = tmp_path / link
    path.unlink(missing_ok=True)
    path.symlink_to("gone")
    with pytest.raises(ResultsError, match=f"{link}: is a link that leads nowhere"):
        open_runs([tmp_path / glob])


@pytest.mark.filterwarnings("ignore:.*passed over")
def test_a_link_to_a_run_is_that_run_and_one_that_no_glob_names_is_let_be(tmp_path: Path) -> None:
    (run,) = launches(tmp_path, "one", 1)
    (tmp_path / "latest").symlink_to("one-0")
    (tmp_path / "gone").symlink_to("nowhere")
    assert [found.path for found in open_runs([tmp_path / "lat*"])] == [run.path]
    assert globbed(tmp_path / "**") == [run.path]


def test_a_bracket_in_a_name_is_named_or_escaped(history: Path, tmp_path: Path) -> None:
    launches(tmp_path, "[slow]", 3, start=20, factors=SLOW)
    assert len(open_runs([tmp_path / "[slow]-1"])) == 1
    done = gate(tmp_path / "[slow]-*", "--history", history)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == (
        f"{tmp_path / '[slow]-*'}: no such run folder, and as a glob it matches none; where a [ is "
        "part of a name, write [[]\n"
    )
    assert gate(tmp_path / "[[]slow]-*", "--history", history).exit_code == 1
    assert "[[]" not in gate(tmp_path / "fast-*", "--history", history).stderr
