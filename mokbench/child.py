"""How a process of ours starts another one that runs a module of this package."""

import os
import sys
from pathlib import Path

import mokbench


def command(module: str, *arguments: str) -> list[str]:
    """-P: the folder we happen to be in must not shadow the installed package."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> dict[str, str]:
    """Our own, with which a checkout that is not installed is found too."""
    found = dict(os.environ)
    package_home = Path(mokbench.__file__).resolve().parents[1]
    if package_home.name not in ("site-packages", "dist-packages"):
        paths = [str(package_home), found.get("PYTHONPATH", "")]
        found["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return found
