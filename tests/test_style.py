"""Budgets and rules that reviews would otherwise have to repeat."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON_FILES = sorted(ROOT.glob("mokbench/**/*.py"))
KERNEL_FILES = sorted(
    p for p in ROOT.glob("kernels/**/*") if p.suffix in (".h", ".cpp", ".cuh", ".cu")
)
MAX_PYTHON_LINES, MAX_FUNCTION_LINES = 300, 50
MAX_KERNEL_LINES, MAX_KERNEL_FUNCTION_LINES = 500, 120


def test_there_is_something_to_check():
    assert len(PYTHON_FILES) > 30
    assert len(KERNEL_FILES) > 3


@pytest.mark.parametrize("path", PYTHON_FILES, ids=lambda p: p.name)
def test_python_budgets(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_PYTHON_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"


@pytest.mark.parametrize("path", KERNEL_FILES, ids=lambda p: p.name)
def test_kernel_budgets(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_KERNEL_LINES
    for start, length in brace_blocks(lines):
        assert length <= MAX_KERNEL_FUNCTION_LINES, f"line {start}: a body of {length} lines"


def brace_blocks(lines: list[str]) -> list[tuple[int, int]]:
    """(first line, length) of every outermost block that is not a namespace, class or extern."""
    blocks, open_at = [], []
    for number, line in enumerate(lines, 1):
        code = re.sub(r'"(\\.|[^"\\])*"|//.*', "", line)
        for char in code:
            if char == "{":
                container = re.search(r"\b(namespace|struct|class|enum|union|extern)\b", code)
                open_at.append((number, bool(container)))
            elif char == "}" and open_at:
                start, container = open_at.pop()
                if not container and all(outer for _, outer in open_at):
                    blocks.append((start, number - start + 1))
    return blocks


@pytest.mark.parametrize("path", KERNEL_FILES + PYTHON_FILES, ids=lambda p: p.name)
def test_ascii_and_no_asm_outside_ptx(path):
    text = path.read_text(encoding="utf-8")
    assert text.isascii()
    if path.suffix != ".py" and not path.name.startswith("ptx"):
        assert not re.search(r"\basm\b\s*(volatile)?\s*\(", text)


def test_no_catch_all_names():
    bad = {"utils", "util", "common", "helpers", "helper", "misc", "legacy"}
    assert [p for p in PYTHON_FILES + KERNEL_FILES if p.stem in bad] == []


def test_protocol_includes_nothing():
    assert "#include" not in (ROOT / "kernels/protocol.h").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "command",
    [["ruff", "check", "mokbench", "tests"], ["ruff", "format", "--check", "mokbench", "tests"]],
    ids=["lint", "format"],
)
def test_ruff(command):
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_mypy():
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
