"""Finding the extension: beside the package, in an installed one, or a clear error."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mokbench.twin import load_twin

PACKAGE = Path(__file__).parents[1] / "mokbench"


@pytest.fixture
def checkout(tmp_path):
    """A checkout with just what the loader needs, and no extension."""
    folder = tmp_path / "checkout" / "mokbench"
    folder.mkdir(parents=True)
    for name in ("__init__.py", "errors.py", "twin.py"):
        shutil.copy(PACKAGE / name, folder)
    return folder


@pytest.fixture
def site(tmp_path):
    """A folder that holds an installed package's extension."""
    folder = tmp_path / "site" / "mokbench"
    folder.mkdir(parents=True)
    shutil.copy(load_twin().__file__, folder)
    return folder.parent


def run_loader(checkout, *entries):
    """Load in a fresh Python whose only mokbench are the given ones."""
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from mokbench.twin import load_twin\n"
        "print(load_twin().__file__); print(load_twin() is sys.modules['mokbench._twin'])\n"
        "import mokbench._twin; print(mokbench._twin.Fault.__module__)"
    )
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(checkout.parent), *map(str, entries)],
        capture_output=True,
        text=True,
    )


def test_uninstalled_checkout_takes_the_installed_extension(checkout, site):
    done = run_loader(checkout, site)
    assert done.returncode == 0, done.stderr
    path, same, module = done.stdout.split()
    assert Path(path).parent == site / "mokbench"
    assert (same, module) == ("True", "mokbench._twin")


def test_another_version_is_not_taken(checkout, site):
    init = checkout / "__init__.py"
    init.write_text('__version__ = "9.9.9"\n', encoding="utf-8")
    done = run_loader(checkout, site)
    assert done.returncode == 1
    assert "the host fabric needs mokbench._twin 9.9.9, which is not built" in done.stderr


def test_stale_extension_beside_the_package_is_an_error(checkout):
    (checkout / "__init__.py").write_text('__version__ = "9.9.9"\n', encoding="utf-8")
    shutil.copy(load_twin().__file__, checkout)
    done = run_loader(checkout)
    assert done.returncode == 1
    assert "mokbench is 9.9.9; run 'pip install .'" in done.stderr


def test_no_extension_says_what_to_do(checkout):
    done = run_loader(checkout)
    assert done.returncode == 1
    assert "UnsupportedError: the host fabric needs mokbench._twin" in done.stderr
    assert "run 'pip install .' in the checkout" in done.stderr
