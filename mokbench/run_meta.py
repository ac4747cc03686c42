"""What run.json holds, and how it is read."""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from mokbench.code_version import CodeVersion
from mokbench.durable import as_results_error
from mokbench.errors import ResultsError
from mokbench.figures import Figures, first_problem, once
from mokbench.machine import Machine
from mokbench.moment import Moment
from mokbench.record import METHOD_VERSION, RECORD_VERSION, check_version
from mokbench.topology import Topology

# failed: measured to its end, with failed rows; aborted: an error ended it half way.
RunStatus = Literal["running", "done", "failed", "interrupted", "aborted"]


class RunMeta(Figures):
    """What run.json holds: what was asked, on which machine, with which versions."""

    record_version: int = RECORD_VERSION
    method_version: int = METHOD_VERSION
    name: str
    config_text: str = ""
    config: dict[str, Any] = Field(default_factory=dict)
    command: list[str] = Field(default_factory=list)
    # What torchrun or srun told rank 0, whose command line this is; null without a launcher.
    launcher: dict[str, Any] | None = None
    machine: Machine
    # Where the ranks of each number of ranks were; an older mokbench says none.
    topologies: list[Topology] = Field(default_factory=list)
    versions: dict[str, str] = Field(default_factory=dict)
    # Of each mokbench that wrote rows, the one that started the run first; an older one says none.
    code: list[CodeVersion] = Field(default_factory=list)
    created: Moment
    finished: Moment | None = None
    status: RunStatus = "running"
    # Lines of records.jsonl when it ended; null while it is written, and of an older mokbench.
    rows: int | None = Field(None, ge=0)


def read_meta(path: Path) -> RunMeta:
    """Read a run folder's description. Raises ResultsError when it is no run folder."""
    file = path / "run.json"
    with as_results_error(path, "reading", "make it readable"):
        found = file.is_file()
    if not found:
        with as_results_error(path, "reading", "make it readable"):
            inside = sorted(child.parent.name for child in path.glob("*/run.json"))
        hint = f"; it holds {len(inside)} runs: name one, or {path}/*" if inside else ""
        what = "not a run folder (it has no run.json)" if path.is_dir() else "no such run folder"
        raise ResultsError(f"{path}: {what}{hint}")
    try:
        content = file.read_bytes()
        check_version(f"{file}", json.loads(content, object_pairs_hook=once))
        return RunMeta.model_validate_json(content, strict=True)
    except (OSError, ValueError, RecursionError) as error:
        raise ResultsError(f"{file}: not a run description: {first_problem(error)}") from error
