from types import SimpleNamespace

import pytest

from mokbench import sweep
from mokbench.cells import expand
from mokbench.config import parse
from mokbench.systems import SYSTEM_OPTIONS, system_class

CONFIG = """\
ranks: [1, 2]
model: {hidden: 64, intermediate: 64, experts: 8, top_k: 2}
systems: [mok, {mok: {pull_workers: 3}}, push, alltoall, local]
tokens_per_rank: 4
measure: {regimes: [isolated]}
"""


def surroundings(monkeypatch, cores):
    """Of every cell, by (system with its options, ranks)."""
    monkeypatch.setattr(sweep, "usable_cores", lambda: cores)
    suite = parse(CONFIG)
    runner = sweep.Sweep(suite, folder=None, make_pool=None, progress=None)
    return {
        (f"{cell.system}{dict(cell.options) or ''}", cell.workload.ranks): runner._around(cell)
        for cell in expand(suite, fabric="host")
    }


MANY_PULLERS = "mok{'pull_workers': 3}"


# A rank of mok has a caller, pull workers and two GEMM threads; the others have their caller.
@pytest.mark.parametrize(
    "cores, crowded",
    [
        (1, {"mok", MANY_PULLERS, "push", "alltoall", "local"}),
        (2, {"mok", MANY_PULLERS}),
        (8, {MANY_PULLERS}),
        (12, set()),
    ],
)
def test_oversubscribed_counts_the_threads_of_the_system(monkeypatch, cores, crowded):
    found = surroundings(monkeypatch, cores)
    marked = {system for (system, ranks), around in found.items() if around.oversubscribed}
    assert marked == crowded


def test_one_rank_of_mok_needs_four_cores(monkeypatch):
    assert surroundings(monkeypatch, 3)[("mok", 1)].oversubscribed
    assert not surroundings(monkeypatch, 4)[("mok", 1)].oversubscribed


def test_the_link_of_a_row_is_what_its_system_names(monkeypatch):
    found = surroundings(monkeypatch, 2)
    links = {system: found[(system, 2)].link for system in ("mok", "push", "alltoall")}
    assert links == {"mok": "shm", "push": "shm", "alltoall": "tcp"}
    assert {around.link for (_, ranks), around in found.items() if ranks == 1} == {"none"}


@pytest.mark.parametrize("name", SYSTEM_OPTIONS)
def test_every_system_declares_what_the_sweep_reads(name):
    system = system_class(name)
    assert system.name == name
    assert system.traffic in ("per_route", "per_rank", "per_node", "all", None)
    assert system.signal in ("pull", "push", None)
    assert system.host_link in ("shm", "tcp", "none")


def test_rows_of_the_cuda_fabric_have_the_step_that_the_gpu_showed():
    runner = sweep.Sweep(parse(CONFIG), None, None, None, fabric="cuda", link=lambda ranks: "hbm")
    (cell, *_) = expand(parse(CONFIG), fabric="cuda")
    assert runner._around(cell).timer_step_us is None, "never the host's clock"
    runner._rates[1] = SimpleNamespace(timer_step_us=0.032)
    assert runner._around(cell).timer_step_us == 0.032
