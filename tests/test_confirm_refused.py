"""A confirmation that measures something else, or cannot be made, is exit 2."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from launches import CELLS, cell, gate, h200, launches, write_launch

from mokbench.machine import Machine
from mokbench.regression import confirm
from mokbench.regression.confirm import config_of, interpreter

PUSH = "tiny.push.r4.t128.balanced.bf16.isolated"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Another copy of what the check asks an interpreter for; not the candidate's own."""
    path = tmp_path / "brk1"
    path.write_text("#!/bin/sh\necho /base/mokbench/record.py\n" + f"echo {_versions()}\n")
    path.chmod(0o755)
    return path


def _versions() -> str:
    from mokbench import record

    return f"{record.METHOD_VERSION} {record.RECORD_VERSION}"


def measured(
    monkeypatch: pytest.MonkeyPatch, side: str, machine: Machine | None = None, **changes: Any
) -> None:
    """Let the confirming runs of ``side``, or of both, be of another machine or of other cells."""
    order: list[str] = []

    def run(_python: Path, own: str, _config: Path, _ids: Sequence[str], out: Path) -> None:
        order.append(own)
        odd = side in (own, "both")
        row = cell("push", CELLS["push"]).model_copy(update=changes if odd else {})
        where = machine if odd and machine else h200()
        write_launch(out, [row], 40 + len(order), machine=where)

    monkeypatch.setattr(confirm, "_run", run)


@pytest.mark.parametrize("side", ["base", "candidate", "both"])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"machine": h200(driver="999")}, "are of two machines"),
        (
            {"cell_digest": "all-other"},
            "with digest all-other.- (its routing not known), the judged slow-0 with",
        ),
        ({"cell_digest": None}, "(its options and routing not known), the judged slow-0"),
        ({"routing_digest": "ab"}, "with digest all-push.ab, the judged"),
        ({"ranks_per_gpu": 4}, "on a shared GPU, the judged slow-0 without a mark"),
    ],
)
def test_a_confirmation_of_something_else_is_refused(
    history: Path, tmp_path: Path, base: Path, monkeypatch, side: str, changes, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    launches(tmp_path, "slow", 3, start=20, factors={"push": 1.06}, seed=2)
    measured(monkeypatch, side, **changes)
    options = ["--history", history, "--confirm", "--baseline-python", base, "--record"]
    done = gate("slow-*", *options)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert said in done.stderr
    (file,) = history.glob("*/launches.jsonl")
    assert len(file.read_text().splitlines()) == 10


@pytest.mark.parametrize("python", ["./nothing", "/bin/false", "no-such-python-in-the-path"])
@pytest.mark.parametrize("factor", [1.0, 1.06], ids=["no suspect", "a suspect"])
def test_a_base_that_cannot_run_is_said_at_once(
    history: Path, tmp_path: Path, python: str, factor: float
) -> None:
    launches(tmp_path, "some", 3, start=20, factors={"push": factor}, seed=2)
    done = gate(tmp_path / "some-*", "--history", history, "--confirm", "--baseline-python", python)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert "cannot be run" in done.stderr or "no mokbench that can be imported" in done.stderr


def test_a_base_beside_is_not_looked_for_in_the_path(
    history: Path, tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    launches(tmp_path, "same", 3, start=20, seed=2)
    given = ["--history", history, "--confirm", "--baseline-python"]
    assert gate("same-*", *given, f"./{base.name}").exit_code == 0
    assert gate("same-*", *given, base.name).exit_code == 2
    assert interpreter("python3") == Path("python3")
    assert interpreter("../env/bin/python") == tmp_path / "../env/bin/python"


def test_a_config_that_is_no_text_any_more_is_not_read(
    history: Path, tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "one.yaml"
    config.write_bytes(b"name: \xff\xfe\n")
    told = {"config_text": "name: one\n", "config": {"from_run": "../one.yaml"}}
    runs = launches(tmp_path, "same", 3, start=20, seed=2, **told)
    assert config_of(runs[0]).read_text() == "name: one\n"
    options = ["--history", history, "--confirm", "--baseline-python", base]
    assert gate(tmp_path / "same-*", *options).exit_code == 0
    done = gate(tmp_path / "same-*", *options, "--config", config)
    assert (done.exit_code, "is not UTF-8 text" in done.stderr) == (2, True), done.output
    config.write_text("name: one\n", newline="\r\n")
    crlf = launches(tmp_path, "crlf", 1, **(told | {"config_text": "name: one\r\n"}))
    assert config_of(crlf[0]) == config


@pytest.mark.parametrize("text", ["name: one\n", "routing: [{trace: a.npz}]\n"])
@pytest.mark.parametrize("told", [{"from_run": "a\0b"}, {"from_run": "loop"}, {}])
def test_a_config_that_was_nowhere_is_asked_for_or_read_from_the_run(
    history: Path, tmp_path: Path, base: Path, text: str, told: dict[str, str]
) -> None:
    meta = {"name": "a/b", "config_text": text, "config": told}
    for i in range(3):
        rows = [cell(system, value) for system, value in CELLS.items()]
        write_launch(tmp_path / f"same-{i}", rows, 20 + i, **meta)
    (tmp_path / "same-0" / "loop").symlink_to("loop")
    options = ["--history", history, "--confirm", "--baseline-python", base]
    done = gate(tmp_path / "same-*", *options)
    asked = "trace" in text
    assert (done.exit_code, "give --config" in done.stderr) == (2 * asked, asked), done.stderr
