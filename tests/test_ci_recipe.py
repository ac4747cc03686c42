"""The example workflows keep their promises, and the shell script runs."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_confirm import ONE_CELL
from test_html import Page

from mokbench.results import RunFolder

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / "docs" / "ci").glob("*.yml"))
SCRIPT = ROOT / "scripts" / "check_regressions.sh"


def workflow(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def triggers(path: Path) -> Any:
    return workflow(path)[True]  # YAML 1.1 reads the key "on" as true


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.name)
def test_no_workflow_gives_a_fork_a_token_that_writes(path: Path) -> None:
    told = workflow(path)
    assert "pull_request_target" not in triggers(path)
    assert "secrets." not in path.read_text(encoding="utf-8")
    for job in told["jobs"].values():
        rights = job.get("permissions", told["permissions"])
        runs_code = any("check_regressions" in str(step.get("run")) for step in job["steps"])
        checks_out = [s for s in job["steps"] if str(s.get("uses")).startswith("actions/checkout")]
        if runs_code:
            assert rights == {"contents": "read"}
            assert all(step["with"]["persist-credentials"] is False for step in checks_out)
        elif "workflow_run" in triggers(path):
            assert checks_out == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.name)
def test_no_text_of_a_pull_request_is_pasted_into_a_script(path: Path) -> None:
    for job in workflow(path)["jobs"].values():
        for step in job["steps"]:
            assert "${{" not in str(step.get("run"))  # only through env


def test_the_self_hosted_runner_never_sees_a_fork() -> None:
    job = workflow(ROOT / "docs/ci/github-gpu.yml")["jobs"]["gate"]
    assert job["runs-on"] == ["self-hosted", "gpu"]
    assert "head.repo.full_name == github.repository" in job["if"]


def test_only_the_main_branch_becomes_base() -> None:
    jobs = workflow(ROOT / "docs/ci/github-gpu.yml")["jobs"]
    (gate,) = [step for step in jobs["gate"]["steps"] if "check_regressions" in str(step)]
    main = "github.ref == 'refs/heads/main'"
    assert gate["env"]["RECORD"] == f"${{{{ {main} && 'yes' || 'no' }}}}"
    assert jobs["publish"]["if"] == f"${{{{ !cancelled() && {main} }}}}"


def test_the_comment_names_the_other_workflows() -> None:
    names = {workflow(path)["name"] for path in WORKFLOWS}
    listened = triggers(ROOT / "docs/ci/github-comment.yml")["workflow_run"]["workflows"]
    assert set(listened) == names - {"mokbench-comment"}


def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GITHUB_")}
    return subprocess.run(
        ["bash", SCRIPT, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        env=clean | {"MOKBENCH": f"{sys.executable} -P -m mokbench"} | environment,
    )


def test_the_script_says_how_to_use_it() -> None:
    done = run()
    assert done.returncode == 2
    assert "CONFIG HISTORY OUT" in done.stderr


@pytest.mark.slow
def test_the_script_launches_checks_records_and_writes_pages(tmp_path: Path) -> None:
    config = tmp_path / "one.yaml"
    config.write_text(ONE_CELL)
    out, history = tmp_path / "out", tmp_path / "history"
    done = run(config, history, out, LAUNCHES="1", RECORD="yes")
    assert done.returncode == 0, done.stderr
    assert "1 INSUFFICIENT" in done.stdout
    assert len(RunFolder.open(out / "launch-1").records()) == 1
    assert "INSUFFICIENT" in (out / "comment.md").read_text()
    assert "mokbench check" in (out / "summary.md").read_text()
    assert (out / "junit.xml").read_text().count("<testcase") == 1
    assert "1 series" in Page((out / "history.html").read_text()).text
    assert "Verdict" in Page((out / "report.html").read_text()).text
    (lines,) = history.glob("*/launches.jsonl")
    assert len(lines.read_text().splitlines()) == 1
