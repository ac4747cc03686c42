"""Launch files rendered from configs made up here, and run with stubs in the place of a cluster."""

import os
import subprocess
from pathlib import Path
from typing import Any

import yaml

from mokbench.launch_command import LaunchRequest, launch_command

BASE: dict[str, Any] = {
    "name": "small",
    "fabric": "host",
    "ranks": 4,
    "model": {"name": "tiny", "hidden": 512, "intermediate": 256, "experts": 32, "top_k": 4},
    "systems": ["alltoall"],
    "tokens_per_rank": 16,
    "cluster": {"ranks_per_node": 2},
}
# What a program was started with: NUL ends each argument and each variable.
_RECORD = """\
#!/bin/bash
record="$RECORDS/$$-${0##*/}"
{ printf '%s\\0' "${0##*/}" "$@"; printf '\\0'; env -0; } > "$record"
cat > "$record.stdin"
"""


def config(folder: Path, cluster: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A config file of BASE with ``cluster`` merged in."""
    made = BASE | {"cluster": BASE["cluster"] | (cluster or {})} | changes
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(made, allow_unicode=True), encoding="utf-8")
    return path


def request(path: Path, launcher: str = "slurm", nodes: int = 2, **changes: Any) -> LaunchRequest:
    """The launch command's arguments, with nothing submitted."""
    rest: dict[str, Any] = {"only": (), "out": None, "resume": None}
    rest |= {"submit": False, "dry_run": False}
    return LaunchRequest(path, launcher, nodes, **rest | changes)


def rendered(capsys: Any, *arguments: Any, **named: Any) -> str:
    """What the launch command prints for ``request(...)``."""
    launch_command(request(*arguments, **named))
    return str(capsys.readouterr().out)


class Stubs:
    """A folder for PATH whose programs only write down how they were started."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.records = folder / "bin", folder / "records"
        self.bin.mkdir()
        self.records.mkdir()

    def program(self, name: str, text: str = _RECORD) -> None:
        """Add one; by default it records its arguments, environment and standard input."""
        path = self.bin / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment with the stubs first on PATH."""
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        return os.environ | {"PATH": path, "RECORDS": str(self.records)}

    def run(self, text: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a script with bash in ``folder``."""
        path = folder / "script"
        path.write_text(text, encoding="utf-8")
        return subprocess.run(
            ["bash", str(path)],
            cwd=folder,
            env=self.environment | variables,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def started(self, name: str) -> list[tuple[list[str], dict[str, str]]]:
        """Arguments and environment of every start of ``name``, in the order of the arguments."""
        found = []
        for path in self.records.glob(f"*-{name}"):
            given, _, variables = path.read_text(encoding="utf-8").partition("\0\0")
            pairs = (text.partition("=") for text in variables.split("\0") if text)
            found.append((given.split("\0")[1:], {key: value for key, _, value in pairs}))
        return sorted(found, key=lambda each: each[0])
