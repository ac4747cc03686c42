"""Which mokbench ran: its version and, in a git checkout, the commit and whether it was changed."""

import os
import subprocess
from functools import cache
from pathlib import Path

from mokbench import __version__
from mokbench.figures import Figures

_ROOT = Path(__file__).resolve().parents[1]
# What decides what is measured; a changed README does not make another system.
_PARTS = ("mokbench", "kernels")
_GIT_LIMIT_S = 10


class CodeVersion(Figures):
    """``commit`` and ``dirty`` are null outside a checkout; a commit alone was told by the user."""

    version: str
    commit: str | None = None
    dirty: bool | None = None

    def __str__(self) -> str:
        """``mokbench 0.1.0, commit 0123456789ab with changes``."""
        if self.commit is None:
            return f"mokbench {self.version}, commit not known"
        changed = " with changes" * bool(self.dirty)
        told = " (as MOKBENCH_COMMIT said)" * (self.dirty is None)
        return f"mokbench {self.version}, commit {self.commit[:12]}{changed}{told}"


@cache
def code_version(root: Path = _ROOT) -> CodeVersion:
    """Of the mokbench in ``root``; a copy without its git directory takes MOKBENCH_COMMIT."""
    top = _git(root, "rev-parse", "--show-toplevel")
    # A site-packages folder inside somebody's checkout is not a checkout of mokbench.
    if top is None or Path(top).resolve() != root.resolve():
        return CodeVersion(version=__version__, commit=os.environ.get("MOKBENCH_COMMIT") or None)
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--", *_PARTS)
    return CodeVersion(
        version=__version__, commit=commit, dirty=None if changes is None else bool(changes)
    )


def _git(root: Path, *arguments: str) -> str | None:
    """What git says, or None where there is no git or it refuses."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_LIMIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
