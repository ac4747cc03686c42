import json
import subprocess
import sys
from pathlib import Path

import pytest
from fake_run import CUDA, fake_machine, fake_record, fake_run, fake_signals, row, stored, text_of

from mokbench import report
from mokbench.errors import ResultsError
from mokbench.report import wording


def test_the_host_compares_mok_with_push_only_and_judges_nothing(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run")
    others = {c["other_id"].split(".")[1] for c in report.json_report([run])["comparisons"]}
    assert others == {"push"}
    for text in (text_of([run], 200), report.markdown([run])):
        assert wording.HOST in text
        assert "oversubscribed host: 4 ranks on 2 cores" in text
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
    rows = [row("mok", 100.0), row("mok", 150.0, routing="extreme"), row("push", 9.0)]
    lines = text_of([stored(tmp_path, rows)]).splitlines()
    start = lines.index("Step time over that of balanced routing")
    assert lines[start + 3].split() == ["tokens/rank", "regime", "system", "extreme"]
    assert lines[start + 4].split() == ["128", "isolated", "mok", "1.50"]
    assert lines[start + 5].split() == ["128", "isolated", "push", "-"]


def test_signaling_table(tmp_path: Path) -> None:
    machine = fake_machine(cores=64, usable_cores=64)
    run = fake_run(tmp_path / "run", tokens=(16,), signals=(2, 4, 8), machine=machine)
    text = text_of([run])
    line = next(line for line in text.splitlines() if line.startswith("ready, push"))
    assert " N" in line
    points = fake_signals((2, 4, 8), cores=64)
    median = points[0].quantities["signal_ready_us.push"].median
    assert f"{median:.2f} / " in line
    assert "min step, us" in text
    assert "*" not in text.split("Signaling")[1]


@pytest.mark.parametrize("width", [80, 100, 120])
def test_lines_fit_and_figures_are_whole(tmp_path: Path, width: int) -> None:
    run = fake_run(tmp_path / "run", regimes=("isolated",), tokens=(16,), changes=CUDA)
    text = text_of([run], width)
    assert max(map(len, text.splitlines())) <= width
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert text.isascii()
    assert "mok / row (95 % CI)" in text
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
    assert found["method_version"] == 1
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
    newer = stored(tmp_path / "c", [row("push", 2.0)], method_version=2)
    with pytest.raises(ResultsError, match=r"method version 1 and .* 2: their figures mean"):
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


def test_reports_import_neither_matplotlib_nor_torch(tmp_path: Path) -> None:
    fake_run(tmp_path / "run", tokens=(16,))
    code = (
        "import sys; from mokbench import report; from mokbench.results import open_runs; "
        "runs = open_runs(sys.argv[1:]); report.json_report(runs); report.markdown(runs); "
        "assert not {'matplotlib', 'torch', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=True)
