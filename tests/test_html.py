import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_run import CUDA, fake_machine, fake_record, fake_run, row, stored

from mokbench import report, run_checks
from mokbench.cli import main
from mokbench.code_version import CodeVersion
from mokbench.figures import SHARED_GPU
from mokbench.record import METHOD_VERSION
from mokbench.report import glossary, winners, wording
from mokbench.report.cells_table import COLUMNS, Cell
from mokbench.report.charts import KINDS, figures
from mokbench.report.rows import gather
from mokbench.results import RunFolder

SMOKE = Path(__file__).parents[1] / "results" / "h200" / "smoke"
TURN = {"turn": "t", "link": "nvlink", "fabric": "cuda", "ranks_per_gpu": 1}


class Page(HTMLParser):
    """Checks that elements close in order, and collects text, ids, and what would be fetched."""

    VOID = ("meta", "link", "input", "br", "hr", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.fetched: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = dict(attrs)
        if told.get("id"):
            self.ids.append(str(told["id"]))
        for name in ("src", "href", "xlink:href"):
            value = told.get(name) or ""
            if value and not value.startswith(("#", "data:,")):
                self.fetched.append(value)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page(*runs: RunFolder) -> Page:
    return Page(report.html_report(list(runs)))


def test_an_h200_run_is_one_small_file_that_fetches_nothing() -> None:
    done = CliRunner().invoke(main, ["report", str(SMOKE), "--format", "html"])
    assert done.exit_code == 0
    assert len(done.stdout.encode()) < 2_000_000
    found = Page(done.stdout)
    assert found.fetched == []
    assert len(set(found.ids)) == len(found.ids)
    assert "url(http" not in done.stdout
    assert "@import" not in done.stdout
    run = RunFolder.open(SMOKE)
    for record in run.records():
        if record.status != "ok":
            assert record.id in found.text
            assert str(record.reason) in found.text
    assert SHARED_GPU in found.text
    assert str(run.meta.machine.driver) in found.text
    assert "No row of mok was measured" in found.text


def test_500_cells_are_below_5_mb(tmp_path: Path) -> None:
    records = [
        row(
            system,
            100.0 + count,
            tokens_per_rank=count,
            routing=f"r{i}",
            experts=256,
            expert_counts=list(range(256)),
            block_us=[100.0] * 8,
            turn=f"{count}{i}",
            model=model,
            **CUDA,
        )
        for model in ("a", "b")
        for count in (1, 16, 128, 1024, 4096)
        for i in range(17)
        for system in ("mok", "push", "deepep")
    ]
    assert len(records) >= 500
    assert len(report.html_report([stored(tmp_path, records)])) < 5_000_000


def test_every_figure_of_the_page_is_explained(tmp_path: Path) -> None:
    figures_of_columns = [heading.title for heading, _ in COLUMNS if heading.figure]
    assert [title for title in figures_of_columns if title not in glossary.COLUMNS] == []
    assert sorted(glossary.CHARTS) == sorted(KINDS)
    full = row("push", 80.0, roofline_ratio=1.5, min_step_us=20.0, **TURN)
    text = report.html_report([stored(tmp_path, [full, row("alltoall", 100.0, **TURN)])])
    found = Page(text)
    assert "glossary" in found.ids
    for title in ("step us (95 % CI)", "of roofline", "min step us", "verdict"):
        assert found.text.count(glossary.COLUMNS[title]) == 1  # in words that a phone shows, too
        assert f'title="{glossary.COLUMNS[title]}">{title}</th>' in text
    assert glossary.COLUMNS["link use"] not in text  # no row has it
    assert glossary.CHARTS["roofline"] in found.text
    assert "docs/metrics.md" in found.text


def test_a_row_of_ten_thousand_costs_few_bytes(tmp_path: Path) -> None:
    """The rest of a page does not grow with its rows, so 10 000 of them stay below 5 MB."""
    records = [
        row(system, 100.0 + i, tokens_per_rank=1 + i, roofline_ratio=1.5, turn=f"{i}", **CUDA)
        for i in range(500)
        for system in ("mok", "push", "deepep", "alltoall")
    ]
    grids = re.findall(
        r'<section class="grid".*?</section>',
        report.html_report([stored(tmp_path, records)]),
        re.DOTALL,
    )
    assert len(grids) == 2
    assert sum(map(len, grids)) / len(records) < 400


def test_a_cell_says_its_sort_key_only_where_its_text_does_not() -> None:
    for text, sort, key in (
        ("264 (260-268)", 263.62359, "263.624"),
        ("264 (260-268)", 264.0, None),
        ("1500", 1500.0, None),
        ("12.0 MiB", 12.0 * 2**20, "1.25829e+07"),
        ("-", None, None),
    ):
        assert Cell(text, sort).key == key


def test_more_tables_than_anyone_reads_are_counted(tmp_path: Path) -> None:
    records = [
        row(system, 10.0 + i, tokens_per_rank=1 + i, **CUDA)
        for i in range(70)
        for system in ("push", "deepep")
    ]
    text = page(stored(tmp_path, records)).text
    assert text.count("row us / deepep us (95 % CI)") == 60
    assert "10 more tables of this kind: --format json has their figures." in text


def test_the_verdict_comes_first_and_says_who_by_how_much_and_why(tmp_path: Path) -> None:
    own = {"dispatch_us": 20.0, "combine_us": 10.0}
    rows = [
        row("mok", 80.0, block_us=[80.0, 81.0] * 4, **TURN),
        row("push", 100.0, block_us=[100.0, 101.0] * 4, **TURN, **own),
        row("alltoall", 200.0, block_us=[200.0] * 8, **TURN, dispatch_us=90.0, combine_us=40.0),
    ]
    run = stored(tmp_path, rows)
    found = page(run)
    assert found.text.index("Verdict") < found.text.index("Step time by system")
    (line, largest) = winners.sentences(gather([run]), winners.wins(gather([run])))
    assert line == (
        "tiny, 4 ranks (nvlink), isolated: mok is fastest in 1 of 1 workload; push takes 1.25 "
        "times the least step time in 1; alltoall takes 2.48 times the least step time in 1."
    )
    assert "alltoall takes 2.48 (2.47-2.50) times as long as mok" in largest
    assert "alltoall spends 130 us in dispatch + combine, which mok does not have apart" in largest
    for text in (line, largest):
        assert text in found.text


@pytest.mark.parametrize(("mhz", "differ"), [(1450.0, False), (1650.0, True)])
def test_a_difference_of_clocks_stands_beside_the_verdict_and_is_no_why(
    tmp_path: Path, mhz: float, differ: bool
) -> None:
    phases = {"dispatch_us": 20.0, "combine_us": 10.0}
    for first in ("local", "mok"):
        rows = [
            row(first, 100.0, block_us=[100.0] * 8, sm_clock_mhz=1420.0, **TURN, **phases),
            row("alltoall", 110.0, block_us=[110.0] * 8, sm_clock_mhz=mhz, **TURN, **phases),
        ]
        run = stored(tmp_path / f"{first}-{mhz}", rows)
        (line, largest) = winners.sentences(gather([run]), winners.wins(gather([run])))[-2:]
        assert ("[SM clock +16 % against it in 1 (in SM cycles 1.28 times)" in line) == differ
        assert ("SM 1650 against 1420 MHz; in SM cycles 1.28" in largest) == differ
        assert ("the rest" in largest) != differ
        text = report.markdown([run])
        assert ("it takes 1.10 times the step time" in text) == differ
        assert ("SM 1420 against 1650 MHz; in SM cycles 0.78" in text) == (
            differ and first == "mok"
        )
        assert ("SM 1650 against 1420 MHz" in page(run).text) == differ


def test_what_the_interval_does_not_show_is_not_called_a_win(tmp_path: Path) -> None:
    rows = [
        row("mok", 99.0, block_us=[95.0, 104.0] * 4, **TURN),
        row("push", 100.0, block_us=[104.0, 95.0] * 4, **TURN),
    ]
    run = stored(tmp_path / "open", rows)
    (line,) = winners.sentences(gather([run]), winners.wins(gather([run])))
    assert "no difference of 2 % or more shown in 1 between mok and push" in line
    assert "fastest in" not in line
    apart = [row("mok", 50.0, **TURN | {"turn": "a"}), row("push", 100.0, **TURN | {"turn": "b"})]
    run = stored(tmp_path / "apart", apart)
    (win,) = winners.wins(gather([run]))
    assert win.outcome == "open"
    (line,) = winners.sentences(gather([run]), [win])
    assert "too little for a verdict in 1 between mok and push" in line
    assert "no difference" not in line


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nan_count": 3}, "3 NaNs in its output"),
        ({"rel_error": 0.2}, "relative error 0.2, allowed 0.008"),
    ],
)
def test_an_output_that_is_wrong_wins_nothing(tmp_path: Path, changes, said: str) -> None:
    rows = [
        row("mok", 50.0, block_us=[50.0, 51.0] * 4, **TURN, **changes),
        row("push", 100.0, block_us=[100.0, 101.0] * 4, **TURN),
    ]
    run = stored(tmp_path, rows)
    (win,) = winners.wins(gather([run]))
    assert (win.fastest.record.system, win.outcome) == ("push", "alone")
    *_, last = winners.sentences(gather([run]), [win])
    assert said in last


@pytest.mark.parametrize(("percent", "outcome"), [(0.5, "open"), (1.9, "open"), (2.1, "faster")])
def test_a_difference_below_the_floor_makes_no_fastest(
    tmp_path: Path, percent: float, outcome: str
) -> None:
    slow = 100.0 * (1 + percent / 100)
    rows = [
        row("mok", 100.0, block_us=[100.0, 100.1] * 4, **TURN),
        row("push", slow, block_us=[slow, slow + 0.1] * 4, **TURN),
    ]
    found = gather([stored(tmp_path, rows)])
    (win,) = winners.wins(found)
    assert win.behind[0].ratio.excludes_one
    assert win.outcome == outcome
    (line, *largest) = winners.sentences(found, [win])
    assert ("mok is fastest" in line) == (outcome == "faster")
    assert len(largest) == (outcome == "faster")
    told = report.markdown([stored(tmp_path / "again", rows)])
    assert ("mok is faster" in told) == (outcome == "faster")
    assert ("mok and push differ by less than 2 %" in told) == (outcome == "open")


def test_fastest_is_who_is_faster_than_every_other(tmp_path: Path) -> None:
    rows = [
        row("mok", 100.0, block_us=[100.0, 101.0] * 4, **TURN),
        row("push", 110.0, block_us=[110.0, 111.0] * 4, **TURN),
        row("alltoall", 115.0, block_us=[90.0, 140.0] * 4, **TURN),
    ]
    found = gather([stored(tmp_path, rows)])
    (win,) = winners.wins(found)
    assert win.outcome == "open"
    line = winners.sentences(found, [win])[0]
    assert "no difference of 2 % or more shown in 1 between alltoall and mok;" in line
    assert "push takes 1.10 times the least step time in 1" in line


def test_that_mok_was_not_measured_comes_first(tmp_path: Path) -> None:
    rows = [
        row("push", 80.0, block_us=[80.0, 81.0] * 4, **TURN),
        row("alltoall", 100.0, block_us=[100.0, 101.0] * 4, **TURN),
        fake_record(system="mok", status="failed", reason="rank 1 died", fabric="cuda"),
    ]
    found = gather([stored(tmp_path, rows)])
    lines = winners.sentences(found, winners.wins(found))
    assert lines[0] == winners.NO_MOK
    assert "push is fastest in 1" in lines[1]


def test_the_twin_gets_no_performance_verdict(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", tokens=(16,), regimes=("isolated",))
    assert winners.wins(gather([run])) == []
    found = page(run)
    assert wording.HOST in found.text
    assert "fastest" not in found.text


def test_the_reason_compares_phases_rest_and_bytes(tmp_path: Path) -> None:
    a = row(
        "mok", 80.0, dispatch_us=10.0, combine_us=10.0, useful_bytes=100, wire_bytes=150, **CUDA
    )
    b = row("push", 120.0, dispatch_us=30.0, combine_us=20.0, useful_bytes=100, wire_bytes=100)
    assert winners.reason(a, b) == (
        "dispatch + combine: push 50.0 us, mok 20.0; the rest: push 70.0 us, mok 60.0; "
        "bytes moved over useful bytes: push 1.00, mok 1.50"
    )
    assert winners.reason(row("mok", 1.0), row("push", 2.0)) == ""


@pytest.mark.parametrize(
    ("changes", "mark"),
    [
        ({"fabric": "cuda", "link": "hbm", "ranks_per_gpu": 4}, SHARED_GPU),
        ({"fabric": "host", "oversubscribed": True}, "oversubscribed host"),
        ({"fabric": "host"}, wording.HOST),
    ],
)
def test_every_chart_carries_the_marks_of_its_rows(tmp_path: Path, changes, mark: str) -> None:
    figures_of = {"roofline_ratio": 1.5, "link_utilization": 0.5, "wire_utilization": 0.7}
    run = fake_run(
        tmp_path / "run",
        tokens=(16, 128),
        regimes=("isolated",),
        changes=figures_of | {"samples_file": None} | changes,
        keep_samples=True,
    )
    kinds = set()
    for kind, _, figure in figures(gather([run]), [run]):
        kinds.add(kind)
        if kind != "signaling":
            words = " ".join(" ".join(text.get_text() for text in figure.texts).split())
            assert mark.lower() in words.lower(), kind
    assert kinds == set(KINDS)


def test_hostile_names_and_reasons_are_text(tmp_path: Path) -> None:
    evil = "</td><script>alert(1)</script>&amp; \u202e <img src=x onerror=alert(2)>"
    rows = [
        row("mok", 10.0, model="m-1", variant="x=<b>&"),
        fake_record(system="push", status="failed", reason=evil),
    ]
    text = report.html_report([stored(tmp_path, rows, name="<script>x</script>")])
    found = Page(text)
    assert text.count("<script>") == 1
    assert "<img" not in text
    assert "alert(1)" in found.text
    assert found.fetched == []


def test_a_dollar_is_no_formula(tmp_path: Path) -> None:
    rows = [row("push", 10.0, model=r"a$\\frac$b$", routing="$", roofline_ratio=1.0, **CUDA)]
    text = report.html_report([stored(tmp_path, rows)])
    assert "a$\\\\frac$b$" in Page(text).text


def test_a_run_without_any_measured_row_says_so(tmp_path: Path) -> None:
    rows = [fake_record(system="deepep", status="unsupported", reason="needs GPUs", fabric="cuda")]
    found = page(stored(tmp_path, rows))
    assert "No row was measured; the reasons are below." in found.text
    assert "needs GPUs" in found.text


def test_charts_of_one_page_do_not_share_ids(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", routings=("balanced", "extreme"))
    text = report.html_report([run])
    found = Page(text)
    assert len(set(found.ids)) == len(found.ids)
    used = set(re.findall(r"url\(#([^)]+)\)|href=\"#([^\"]+)\"", text))
    for a, b in used:
        assert (a or b) in found.ids


def test_several_machines_in_one_page_are_refused(tmp_path: Path) -> None:
    for name, driver in (("a", "1"), ("b", "2")):
        machine = fake_machine(gpu="NVIDIA H200", gpus=1, driver=driver)
        stored(tmp_path / name, [row("mok", 1.0)], machine=machine)
    done = CliRunner().invoke(main, ["report", str(tmp_path / "*"), "--format", "html"])
    assert done.exit_code == 2
    assert "report them apart" in done.stderr
    assert done.stdout == ""


def test_which_mokbench_measured_is_part_of_the_environment(tmp_path: Path) -> None:
    code = [CodeVersion(version="0.1.0", commit="0123456789abcdef", dirty=True)]
    run = stored(tmp_path / "new", [row("mok", 1.0)], code=code)
    said = "mokbench 0.1.0, commit 0123456789ab with changes"
    assert said in report.html_report([run])
    assert said in report.markdown([run])
    older = stored(tmp_path / "old", [row("mok", 1.0)])
    for told in (report.html_report([older]), report.markdown([older])):
        assert "by an older mokbench that did not store its version" in told


def with_method_version(folder: Path, version: int) -> RunFolder:
    run = fake_run(folder)
    path = folder / "run.json"
    text = re.sub('("method_version": ?)[0-9]+', rf"\g<1>{version}", path.read_text())
    path.write_text(text)
    return RunFolder.open(run.path)


def test_an_older_method_version_is_the_runs_and_is_said_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = with_method_version(tmp_path, METHOD_VERSION)
    assert "measured with method version" not in page(run).text
    newer = METHOD_VERSION + 1
    monkeypatch.setattr(run_checks, "METHOD_VERSION", newer)
    text = page(run).text
    assert f"Method version {METHOD_VERSION}." in text
    said = (
        f"measured with method version {METHOD_VERSION}: what is said here about figures is of "
        f"version {newer}"
    )
    assert text.index(said) < text.index("Verdict")
    assert f"- {said}" in report.markdown([run])


@pytest.mark.parametrize("format_", ["table", "markdown", "json", "html"])
@pytest.mark.parametrize("version", [0, 77])
def test_an_unknown_method_version_is_refused(tmp_path: Path, format_: str, version: int) -> None:
    run = with_method_version(tmp_path, version)
    done = CliRunner().invoke(main, ["report", str(run.path), "--format", format_, "--no-charts"])
    assert done.exit_code == 2
    assert f"{run.path / 'run.json'}: was measured with method version {version}, " in done.stderr
    assert f"knows 1 to {METHOD_VERSION} and cannot say what its figures mean" in done.stderr
    assert done.stdout == ""
