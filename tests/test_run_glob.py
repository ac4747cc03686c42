"""Which run folders a glob names: never fewer than there are without a word."""

import errno
from pathlib import Path

import pytest
from click.testing import CliRunner
from launches import SLOW, launches

from mokbench.cli import main
from mokbench.results import open_runs
from mokbench.run_glob import globbed


def unreadable(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Refuse to list ``folder``, as chmod 0 does to those who are not root."""
    iterdir, glob = Path.iterdir, Path.glob

    def refusing(path: Path):
        if path == folder:
            raise PermissionError(errno.EACCES, "Permission denied")
        return iterdir(path)

    def passing_over(path: Path, pattern: str):
        return (found for found in glob(path, pattern) if folder not in found.parents)

    monkeypatch.setattr(Path, "iterdir", refusing)
    monkeypatch.setattr(Path, "glob", passing_over)


@pytest.mark.parametrize("glob", ["*/n-*", "**/n-*", "?/n-*"])
@pytest.mark.parametrize("command", ["check", "compare", "report"])
def test_a_folder_of_runs_that_may_not_be_read_is_an_error(
    history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, glob: str
) -> None:
    for folder, factors in (("a", None), ("b", SLOW)):
        (tmp_path / folder).mkdir()
        launches(tmp_path / folder, "n", 3, start=20, factors=factors, seed=2)
    unreadable(monkeypatch, tmp_path / "b")
    runs = str(tmp_path / glob)
    arguments = {
        "check": [runs, "--history", str(history)],
        "compare": [str(tmp_path / "a" / "n-0"), runs],
        "report": [runs, "--no-charts"],
    }
    done = CliRunner().invoke(main, [command, *arguments[command]])
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert f"{tmp_path / 'b'}: reading failed: Permission denied" in done.stderr


@pytest.mark.parametrize(
    ("glob", "names"),
    [
        ("*/n-*", ["a/n-0", "a/n-1"]),
        ("a/n-?", ["a/n-0", "a/n-1"]),
        ("a/n-[1-9]", ["a/n-1"]),
        ("**", [".hidden", "a/n-0", "a/n-1"]),
        ("**/n-1", ["a/n-1"]),
        ("*/../a/n-0", ["a/n-0"]),
        (".h*", [".hidden"]),
        ("*.txt", []),
        ("*/n-7", []),
    ],
)
@pytest.mark.filterwarnings("ignore:.*passed over")
def test_what_a_glob_matches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, glob: str, names: list[str]
) -> None:
    (tmp_path / "a").mkdir()
    launches(tmp_path / "a", "n", 2)
    launches(tmp_path, "one", 1)[0].path.rename(tmp_path / ".hidden")
    (tmp_path / "a" / "loop").symlink_to(tmp_path / "a" / "loop")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "note.txt").write_text("x")
    expected = [tmp_path / name for name in names]
    assert {path.resolve() for path in globbed(tmp_path / glob)} == set(expected)
    monkeypatch.chdir(tmp_path)
    assert {path.resolve() for path in globbed(Path(glob))} == set(expected)
    if names:
        assert [run.path for run in open_runs([glob])] == expected
