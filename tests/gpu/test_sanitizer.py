"""compute-sanitizer finds nothing in the kernels, and does find what is put there on purpose."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SANITIZER = shutil.which("compute-sanitizer")
pytestmark = pytest.mark.skipif(
    SANITIZER is None, reason="needs compute-sanitizer of the CUDA toolkit on the PATH"
)
SCRIPT = Path(__file__).parent / "sanitize.py"
FOUND = 99  # exit code for findings
RUNS = [
    ("memcheck", "none"),
    ("racecheck", "none"),
    ("synccheck", "none"),
    ("memcheck", "bounds"),
    ("racecheck", "race"),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """(exit code, output) of each run; all at once, since starting takes most of their time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOKBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        plain = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
        assert plain.returncode == 0, plain.stdout + plain.stderr
        running = {}
        for tool, defect in RUNS:
            # cuda-bindings asks for functions that an older driver has not: no error of ours.
            options = ["--tool", tool, "--report-api-errors", "no", "--error-exitcode", str(FOUND)]
            running[tool, defect] = subprocess.Popen(
                [str(SANITIZER), *options, sys.executable, str(SCRIPT), defect],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        try:
            outputs = {run: process.communicate(timeout=120)[0] for run, process in running.items()}
        finally:
            for process in running.values():
                process.kill()
        return {run: (running[run].returncode, output) for run, output in outputs.items()}


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_the_kernels_are_clean(answers, tool):
    code, output = answers[tool, "none"]
    print(output[-500:])
    assert code == 0, output
    assert "all kernels ran" in output
    assert re.search(r"SUMMARY: 0 (errors|hazards)", output), output


@pytest.mark.parametrize(
    "run, message",
    [
        (("memcheck", "bounds"), r"Invalid __global__ write.*?push_reduce"),
        (("racecheck", "race"), r"(?i)(race|hazard).*?push_plan"),
    ],
    ids=["bounds", "race"],
)
def test_a_defect_is_found(answers, run, message):
    code, output = answers[run]
    assert code != 0, output
    assert re.search(message, output, re.S), output
