"""Named steps of a script, one after the other, with their figures kept after each."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mokbench import machine
from mokbench.code_version import code_version

Steps = Mapping[str, Callable[[Path], dict[str, Any]]]


def run_logged(log: Path, limit_s: float, *arguments: str) -> tuple[int | None, float]:
    """Run this Python with its output in ``log``: exit code, None past the limit, and seconds."""
    start = time.monotonic()
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                [sys.executable, *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
            )
            code: int | None = done.returncode
        except subprocess.TimeoutExpired:
            code = None
    return code, time.monotonic() - start


def origin(script: str, *arguments: str) -> dict[str, Any]:
    """Command, code, machine and versions, without which no figure is kept.

    ``code`` has the checkout's commit and whether it was changed; null where git does not tell.
    """
    return {
        "command": ["python", f"scripts/{Path(script).name}", *arguments],
        "code": code_version().model_dump(mode="json"),
        "machine": machine.describe().model_dump(mode="json"),
        "versions": machine.versions(),
    }


def run_steps(steps: Steps, results: str) -> dict[str, Any]:
    """Run ``SCRIPT OUT [STEP ...]``, all steps by default; what each returned, by its name.

    OUT/``results`` gets the figures with machine, date, versions and command. A step that fails
    does not keep the next from running; its figures are its error.
    """
    script, folder, *chosen = sys.argv
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {}
    for name in chosen or steps:
        start = time.monotonic()
        try:
            figures[name] = steps[name](out)
        except Exception as error:
            figures[name] = {"error": f"{type(error).__name__}: {error}"}
            print(f"{name}: {figures[name]['error']}")
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
        content = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            **origin(script, "OUT", *chosen),
            "figures": figures,
        }
        (out / results).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return figures
