import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from fake_run import CUDA, fake_machine, fake_record, fake_run, fake_signals, row, stored, text_of
from rich.console import Console

from mokbench import report
from mokbench.cells import expand
from mokbench.config import parse
from mokbench.errors import ResultsError
from mokbench.record import METHOD_VERSION, Record
from mokbench.report import wording
from mokbench.results import RunFolder


def test_the_host_compares_mok_with_push_only_and_judges_nothing(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run")
    others = {c["other_id"].split(".")[1] for c in report.json_report([run])["comparisons"]}
    assert others == {"push"}
    for text in (text_of([run], 200), report.markdown([run])):
        assert wording.HOST in text
        assert "more busy threads than its 2 cores: mok, push, alltoall with 4 ranks" in text
        assert "Listed without a ratio, since they move data by other means: alltoall." in text
        assert "faster" not in text
        assert "slower" not in text


def test_a_shared_gpu_is_said_everywhere(tmp_path: Path) -> None:
    shared = {"fabric": "cuda", "link": "hbm", "ranks_per_gpu": 4}
    rows = [
        row("mok", 1.0, turn="t", block_us=[8.0] * 6, **shared),
        row("push", 1.0, turn="t", block_us=[10.0] * 6, **shared),
    ]
    run = stored(tmp_path, rows)
    sentence = "ranks share one GPU; ratios do not predict NVLink"
    for text in (text_of([run], 200), report.markdown([run])):
        lines = [line for line in text.splitlines() if sentence in line]
        assert len(lines) == 3  # the report, the table, the verdict
        assert any("mok is faster" in line for line in lines)


def test_problems_are_listed_with_their_reasons(tmp_path: Path) -> None:
    rows = [
        row("mok", 10.0),
        fake_record(system="push", status="failed", reason="rank 3 was killed by signal 9"),
        *(
            fake_record(system="deepep", status="unsupported", reason="needs GPUs", routing=name)
            for name in ("balanced", "typical")
        ),
    ]
    run = stored(tmp_path, rows)
    text = text_of([run])
    assert "failed: 1 row" in text
    assert "rank 3 was killed by signal 9" in text
    assert "unsupported: 2 rows" in text
    assert "needs GPUs" in text
    assert "FAILED" in text
    assert "rows: 1 ok, 2 unsupported, 1 failed" in text
    assert "rank 3 was killed" in report.markdown([run])


def test_a_run_without_rows_and_one_without_success(tmp_path: Path) -> None:
    empty = stored(tmp_path / "empty", [])
    assert "This run has no rows yet." in text_of([empty])
    assert report.json_report([empty])["cells"] == []
    assert "no rows yet" in report.markdown([empty])
    dead = fake_record(status="failed", reason="deadline of 60 s")
    text = text_of([stored(tmp_path / "dead", [dead])])
    assert "No row was measured; below is why." in text
    assert "deadline of 60 s" in text


def test_rows_above_the_noise_target_are_counted(tmp_path: Path) -> None:
    rows = [
        row("mok", 10.0, stop_reason="noise", noise=0.01),
        row("push", 10.0, stop_reason="time", noise=0.073),
        row("alltoall", 10.0, stop_reason="stable", noise=0.031),
    ]
    line = "2 of 3 measured rows stopped above the noise target (1 at the time limit); "
    assert line + "the worst has noise 7.3 %." in text_of([stored(tmp_path, rows)])


def test_a_table_keeps_the_systems_of_one_regime_together(tmp_path: Path) -> None:
    rows = [row(s, 10.0, regime=r) for s in ("mok", "push") for r in ("isolated", "steady")]
    lines = [line.split()[:2] for line in text_of([stored(tmp_path, rows)]).splitlines()]
    start = lines.index(["system", "regime"])
    assert lines[start + 1 : start + 5] == [
        ["mok", "isolated"],
        ["push", "isolated"],
        ["mok", "steady"],
        ["push", "steady"],
    ]


def test_slowdown_over_balanced(tmp_path: Path) -> None:
    rows = [row("mok", 100.0), row("mok", 150.0, routing="extreme")]
    lines = text_of([stored(tmp_path, rows)]).splitlines()
    start = lines.index("Step time over that of balanced routing")
    assert lines[start + 2] == "tiny, 4 ranks, bf16, isolated, host"
    assert lines[start + 3].split() == ["tokens", "per", "rank", "routing", "mok"]
    # 149 / 101 and 151 / 99: both medians at the worst of their intervals.
    assert lines[start + 4].split() == ["128", "extreme", "1.50", "(1.48-1.53)"]
    assert "where the interval holds 1 no slowdown is shown" in " ".join(lines)


def many_routings(path: Path) -> RunFolder:
    routings = ["balanced", "typical", "extreme", *(f"hot_rank-{i}.5+masked-0.1" for i in range(4))]
    systems = [("mok", ""), ("mok", "block_m=32,ring_tiles=2"), ("push", ""), ("alltoall", "")]
    rows = [
        row(system, 1e5 + i, variant=variant, routing=name, regime=regime)
        for i, name in enumerate(routings)
        for system, variant in systems
        for regime in ("isolated", "steady")
    ]
    return stored(path, rows)


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_every_slowdown_is_shown_at_any_width(tmp_path: Path, width: int) -> None:
    text = text_of([many_routings(tmp_path)], width)
    assert max(map(len, text.splitlines())) <= width
    slowdowns = text.split("Step time over that of balanced routing")[1].split("Reading")[0]
    # 6 routings x 4 systems x 2 regimes
    assert slowdowns.count("1.00 (1.00-1.00)") == 48
    for name in ("mok", "push", "alltoall", "ring_tiles=2)"):
        assert name in slowdowns


def test_at_40_columns_a_row_still_says_what_it_is(tmp_path: Path) -> None:
    lines = text_of([fake_run(tmp_path / "run", tokens=(16,))], 40).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("system"))
    assert lines[start].split()[:4] == ["system", "regime", "step", "us"]
    assert lines[start + 1].split()[:2] == ["mok", "isolated"]
    assert lines[start + 3].split()[:2] == ["alltoall", "isolated"]


def test_a_pipe_gets_whole_ids_and_no_trailing_blanks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    name = "tiny.mok~" + ",".join(f"option_{i}={i}" for i in range(10))
    dead = fake_record(id=name, status="failed", reason="rank 3 was killed " * 10)
    run = stored(tmp_path, [row("mok", 10.0), row("push", 10.0), dead])
    out = io.StringIO()
    Console(file=out).print(report.table([run]))
    lines = out.getvalue().splitlines()
    assert any(line.endswith(name) for line in lines)
    assert any(wording.HOST in line for line in lines)
    for text in (out.getvalue(), text_of([run], 80)):
        assert [line for line in text.splitlines() if line != line.rstrip()] == []


def test_one_reason_of_several_systems_is_one_line(tmp_path: Path) -> None:
    rows = [
        fake_record(system=s, status="unsupported", reason="too hot", tokens_per_rank=t)
        for s in ("mok", "push")
        for t in (1, 2)
    ]
    text = text_of([stored(tmp_path, rows)])
    (line,) = [line for line in text.splitlines() if "too hot" in line]
    assert line.split() == ["mok,", "push", "4", "too", "hot", rows[0].id]


def test_one_is_singular_and_errors_have_two_digits(tmp_path: Path) -> None:
    rows = [row("mok", 10.0, ranks=1, tokens_per_rank=t, rel_error=4.34e-3) for t in (1, 2)]
    rows[0] = rows[0].model_copy(update={"oversubscribed": True})
    text = text_of([stored(tmp_path, rows)], 200, max_tables=1)
    assert "oversubscribed host, more busy threads than its 2 cores: mok with 1 rank" in text
    assert "1 more table not shown" in text
    assert "1 ranks" not in text
    assert "4.3e-03" in text


CONFIG = """
name: ordered
fabric: host
ranks: 2
model: {name: tiny, hidden: 64, intermediate: 64, experts: 4, top_k: 2}
systems: [push, mok, alltoall]
sweep: {tokens_per_rank: [4], routing: [balanced]}
measure: {regimes: [isolated]}
"""


def test_rows_stand_in_the_order_of_the_config_whatever_ended_first(tmp_path: Path) -> None:
    cells = expand(parse(CONFIG))
    step_time_us = row("mok", 10.0).step_time_us
    records = [Record.from_cell(cell, status="ok", step_time_us=step_time_us) for cell in cells]
    run = stored(tmp_path, [records[i] for i in (2, 1, 0)], config_text=CONFIG)
    assert [record.system for record in run.records()] == ["alltoall", "mok", "push"]
    found = [cell["system"] for cell in report.json_report([run])["cells"]]
    assert found == ["push", "mok", "alltoall"]
    lines = text_of([run]).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("system"))
    assert [lines[start + i].split()[0] for i in (1, 2, 3)] == ["push", "mok", "alltoall"]


def test_signaling_table(tmp_path: Path) -> None:
    machine = fake_machine(cores=64, usable_cores=64)
    run = fake_run(tmp_path / "run", tokens=(16,), signals=(2, 4, 8), machine=machine)
    text = text_of([run], 160)
    line = next(line for line in text.splitlines() if line.startswith("ready, push"))
    assert " N" in line
    points = fake_signals((2, 4, 8), cores=64)
    median = points[0].quantities["signal_ready_us.push"].median
    assert f"{median:.2f} (" in line
    assert "min step, us" in text
    assert "*" not in text.split("Signaling")[1]


@pytest.mark.parametrize("width", [80, 100, 120])
def test_lines_fit_and_figures_are_whole(tmp_path: Path, width: int) -> None:
    run = fake_run(tmp_path / "run", regimes=("isolated",), tokens=(16,), changes=CUDA)
    text = text_of([run], width)
    assert max(map(len, text.splitlines())) <= width
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert text.isascii()
    assert "mok us / row us" in text
    assert ("Columns left out at this width (80)" in text) == (width == 80)


def test_a_long_run_is_cut_in_the_terminal_and_whole_elsewhere(tmp_path: Path) -> None:
    rows = [row("mok", 10.0, tokens_per_rank=count) for count in range(1, 31)]
    run = stored(tmp_path, rows)
    assert "25 more tables not shown" in text_of([run], max_tables=5)
    assert report.markdown([run]).count("### tiny, ") == 30
    assert len(report.json_report([run])["cells"]) == 30


def test_json_is_finite_and_complete(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run")
    found = json.loads(json.dumps(report.json_report([run]), allow_nan=False))
    assert list(found)[:3] == ["method_version", "machine", "cells"]
    assert found["method_version"] == METHOD_VERSION
    wanted = {"gpu", "gpus", "driver", "cuda", "torch", "nccl", "deep_ep", "cpu", "key"}
    assert wanted <= set(found["machine"])
    assert [cell["id"] for cell in found["cells"]] == [record.id for record in run.records()]
    assert found["cells"][0]["pass"] == "forward"
    assert [point["ranks"] for point in found["signaling"]] == [2, 3, 4]


def test_markdown_tables_are_well_formed(tmp_path: Path) -> None:
    rows = [row("mok", 10.0, routing="a|b_c"), fake_record(status="failed", reason="x | y\n*z*")]
    text = report.markdown([stored(tmp_path, rows)], charts=[Path("charts/step time.png")])
    blocks = [part.splitlines() for part in text.split("\n\n") if part.startswith("|")]
    assert len(blocks) >= 2
    for block in blocks:
        bars = {line.replace("\\|", "").count("|") for line in block}
        assert len(bars) == 1
    assert "a\\|b\\_c" in text
    assert "x \\| y \\*z\\*" in text
    assert "![step time](charts/step%20time.png)" in text


def test_runs_of_other_machines_or_methods_are_not_mixed(tmp_path: Path) -> None:
    first = stored(tmp_path / "a", [row("mok", 1.0)])
    other = stored(tmp_path / "b", [row("push", 2.0)], machine=fake_machine(torch="2.14.0"))
    with pytest.raises(ResultsError, match=r"two machines \(torch 2.13.0\+cpu against 2.14.0\)"):
        report.table([first, other])
    newer = stored(tmp_path / "c", [row("push", 2.0)], method_version=METHOD_VERSION + 1)
    with pytest.raises(
        ResultsError, match=rf"method version {METHOD_VERSION} and .*: their figures mean"
    ):
        report.json_report([first, newer])
    with pytest.raises(ResultsError, match="no run"):
        report.markdown([])


def test_several_runs_keep_their_rows_apart(tmp_path: Path) -> None:
    blocks = {"turn": "t", "block_us": [10.0] * 6}
    one = stored(tmp_path / "one", [row("mok", 10.0, **blocks), row("push", 20.0, **blocks)])
    two = stored(tmp_path / "two", [row("mok", 30.0, **blocks)])
    found = report.json_report([one, two])
    assert [(c["run"], c["other_run"], c["basis"]) for c in found["comparisons"]] == [
        ("one", "one", "turn"),
        ("two", "one", "separate"),
    ]
    assert [cell["run"] for cell in found["cells"]] == ["one", "one", "two"]
    assert [info["run"] for info in found["runs"]] == ["one", "two"]
    header = next(line for line in text_of([one, two]).splitlines() if line.startswith("system"))
    assert header.split()[:3] == ["system", "regime", "run"]
    for text in (text_of([one, two], 200), report.markdown([one, two])):
        assert "one, isolated: mok took 1.00 (1.00-1.00) of the step time of push." in text
        assert "isolated: mok of two took 1.50" in text
        assert "of the step time of push of one." in text
        assert "before a ratio: from separate medians" in text


def test_reports_import_neither_matplotlib_nor_torch(tmp_path: Path) -> None:
    fake_run(tmp_path / "run", tokens=(16,))
    code = (
        "import sys; from mokbench import report; from mokbench.results import open_runs; "
        "runs = open_runs(sys.argv[1:]); report.json_report(runs); report.markdown(runs); "
        "assert not {'matplotlib', 'torch', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=True)
