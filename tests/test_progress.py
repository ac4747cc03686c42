"""Lines and the time left that a person sees while a sweep runs."""

from mokbench.progress import Eta, PlainProgress
from mokbench.record import Record
from mokbench.routing_spec import RoutingSpec
from mokbench.workload import Cell, Dtype, Model, Regime, Workload


def record(name, status="failed"):
    work = Workload(Model("tiny", 64, 64, 8, 2), 2, 4, Dtype.BF16, RoutingSpec())
    cell = Cell(name, "host", "push", (), work, Regime.ISOLATED)
    return Record.from_cell(cell, status=status, reason="why")


def test_rows_that_were_refused_do_not_count_for_the_time_left():
    now = [0.0]
    eta = Eta(14, clock=lambda: now[0])
    for _ in range(4):
        assert eta.step(record("a", "unsupported")) == ""
    now[0] = 10.0
    assert [eta.step(record("a")) for _ in range(3)] == ["", "", ""]
    now[0] = 20.0
    # Four measured rows took 20 s, six are left.
    assert eta.step(record("a")) == "30 s left"


def test_the_last_row_has_no_time_left():
    now = [0.0]
    eta = Eta(4, clock=lambda: now[0])
    now[0] = 8.0
    assert [eta.step(record("a")) for _ in range(4)] == ["", "", "", ""]


def test_a_row_is_announced_once_when_its_first_sample_is_taken(capsys):
    progress = PlainProgress(2)
    for phase in ("prepare", "check", "measure", "measure", "phases"):
        progress.phase("a", phase)
    progress.phase("b", "measure")
    progress.row(record("a"))
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["measuring a", "measuring b", "[1/2] a: failed: why"]
