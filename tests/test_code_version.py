"""Which mokbench ran, in a checkout and in a copy without git."""

import subprocess
from pathlib import Path

import pytest

from mokbench import __version__
from mokbench.code_version import CodeVersion, code_version


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    (root / "mokbench").mkdir(parents=True)
    (root / "mokbench" / "a.py").write_text("1\n")
    git(tmp_path, "init", "-q", str(root))
    git(root, "add", ".")
    git(root, "commit", "-qm", "one")
    code_version.cache_clear()
    return root


def test_a_checkout_tells_its_commit_and_whether_it_was_changed(checkout: Path) -> None:
    clean = code_version(checkout)
    assert clean.commit is not None
    assert (len(clean.commit), clean.dirty, clean.version) == (40, False, __version__)
    (checkout / "notes.md").write_text("no code")
    code_version.cache_clear()
    assert code_version(checkout) == clean
    (checkout / "mokbench" / "b.py").write_text("2\n")
    code_version.cache_clear()
    assert code_version(checkout) == clean.model_copy(update={"dirty": True})
    assert str(code_version(checkout)).endswith(f"commit {clean.commit[:12]} with changes")


def test_a_copy_inside_of_another_checkout_is_none(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = checkout / "venv" / "site-packages"
    inside.mkdir(parents=True)
    monkeypatch.delenv("MOKBENCH_COMMIT", raising=False)
    assert code_version(inside) == CodeVersion(version=__version__)
    monkeypatch.setenv("MOKBENCH_COMMIT", "abc")
    code_version.cache_clear()
    told = code_version(inside)
    assert (told.commit, told.dirty) == ("abc", None)
    code_version.cache_clear()
