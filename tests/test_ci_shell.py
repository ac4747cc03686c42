"""The shell parts of the GPU workflow run as on a runner that keeps its folders, with stubs."""

import os
import subprocess
from pathlib import Path

import pytest
from test_ci_recipe import ROOT, SCRIPT, workflow

GPU = ROOT / "docs" / "ci" / "github-gpu.yml"
IDENTITY = {
    f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
}


def part(job: str, word: str) -> str:
    (found,) = [s["run"] for s in workflow(GPU)["jobs"][job]["steps"] if word in str(s.get("run"))]
    return str(found)


def bash(text: str, folder: Path, **environment: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", text],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | IDENTITY | {name: str(value) for name, value in environment.items()},
    )


def repository(folder: Path) -> str:
    folder.mkdir(parents=True)
    done = bash(
        "git init -q -b main; touch code; git add .; git commit -qm one; git rev-parse HEAD", folder
    )
    return done.stdout.strip()


def stub(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("known", [True, False])
def test_the_gate_finds_its_base_also_the_second_time(tmp_path: Path, known: bool) -> None:
    commit = repository(tmp_path / "candidate")
    said = commit if known else "0" * 40
    # A venv refuses a folder that is there; its mokbench names the commit.
    stub(
        tmp_path / "bin" / "python3",
        f"""test ! -e "$3"; mkdir -p "$3/bin"
        printf '#!/bin/bash\\necho {said}' > "$3/bin/mokbench"
        printf '#!/bin/bash\\n' > "$3/bin/pip"; chmod +x "$3/bin/"*""",
    )
    text, told = part("gate", "git worktree add"), tmp_path / "env"
    for _ in range(2):
        told.write_text("")
        (tmp_path / "out" / "launch-1").mkdir(parents=True)
        done = bash(
            text,
            tmp_path / "candidate",
            PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            BASE="",
            GITHUB_ENV=told,
            GITHUB_WORKSPACE=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "base" / "code").exists() is known
        assert (f"BASELINE_COMMIT={commit}" in told.read_text()) is known
        assert not (tmp_path / "out").exists()


def test_the_first_night_starts_the_history_and_no_night_shortens_it(tmp_path: Path) -> None:
    repository(tmp_path / "origin")
    new = tmp_path / "new"
    lines = new / "history" / "history" / "h200" / "launches.jsonl"
    lines.parent.mkdir(parents=True)
    (new / "out").mkdir()
    (new / "out" / "history.html").write_text("page")

    def night(number: int, text: str) -> int:
        lines.write_text(text)
        bash(f"git clone -q origin clone-{number}", tmp_path)
        return bash(
            part("publish", "git push"), tmp_path / f"clone-{number}", NEW=new, GITHUB_SHA="0" * 40
        ).returncode

    assert [night(1, "a\n"), night(2, "a\nb\n")] == [0, 0]
    assert night(3, "c\n") != 0
    files = bash("git ls-tree -r --name-only mokbench-history", tmp_path / "origin").stdout
    assert files.split() == ["history/h200/launches.jsonl", "index.html"]
    text = bash("git show mokbench-history:history/h200/launches.jsonl", tmp_path / "origin").stdout
    assert text == "a\nb\n"


@pytest.mark.parametrize("code", [0, 1, 3])
def test_a_report_that_crashes_leaves_the_checks_exit_code(tmp_path: Path, code: int) -> None:
    (tmp_path / "history").mkdir()
    mokbench = stub(
        tmp_path / "mokbench",
        f'case "$1" in check) echo "$@"; exit {code};; report) exit 70;; esac',
    )
    done = bash(
        f"{SCRIPT} config history out",
        tmp_path,
        MOKBENCH=mokbench,
        BASELINE_PYTHON="python",
        BASELINE_COMMIT="abc",
    )
    assert done.returncode == code
    assert "--baseline-commit abc" in done.stdout
    assert "no history.html" in done.stderr
    assert list((tmp_path / "out").iterdir()) == []  # half a page is none


def test_further_options_of_the_script_go_to_the_check(tmp_path: Path) -> None:
    mokbench = stub(tmp_path / "mokbench", 'test "$1" != check || printf "<%s>" "$@"')
    done = bash(f"{SCRIPT} config history out --strict --metric 'a b'", tmp_path, MOKBENCH=mokbench)
    assert done.returncode == 0, done.stderr
    assert "<--strict><--metric><a b>" in done.stdout
    assert "[OPTION...]" in bash(str(SCRIPT), tmp_path).stderr


@pytest.mark.parametrize(("origin", "code"), [("history", 1), ("no history", 0), ("nothing", 1)])
def test_a_history_that_did_not_arrive_passes_only_where_there_is_none(
    tmp_path: Path, origin: str, code: int
) -> None:
    if origin != "nothing":
        repository(tmp_path / "origin")
    if origin == "history":
        bash("git branch mokbench-history", tmp_path / "origin")
    repository(tmp_path / "candidate")
    bash(f"git remote add origin {tmp_path / 'origin'}", tmp_path / "candidate")
    (tmp_path / "history" / "history").mkdir(parents=True)
    text = part("gate", "ls-remote")
    assert bash(text, tmp_path / "candidate", TOKEN="x").returncode == code
    assert (tmp_path / "history").exists() is bool(code)
    steps = workflow(GPU)["jobs"]["gate"]["steps"]
    (fetch,) = [at for at, step in enumerate(steps) if step.get("id") == "history"]
    assert steps[fetch + 1]["if"] == "steps.history.outcome != 'success'"
    assert steps[fetch + 1]["run"] == text
