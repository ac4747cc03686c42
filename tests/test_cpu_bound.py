"""Chains that may wait for the CPU are said in every form of a report."""

import re
from pathlib import Path
from typing import Any

import pytest
from fake_run import CUDA, row, stored, text_of

from mokbench import report
from mokbench.results import RunFolder

SAID = "may be what holds them up"


def everywhere(run: RunFolder) -> list[str]:
    return [text_of([run], 250), report.markdown([run]), report.html_report([run])]


def chain(isolated: float, steady: float, graph: float | None, **fields: Any) -> list[Any]:
    known = CUDA | fields
    rows = [row("push", isolated, **known), row("push", steady, regime="steady", **known)]
    if graph is not None:
        rows.append(row("push", graph, regime="steady", graph=True, **known))
    return rows


@pytest.mark.parametrize(
    ("isolated", "steady", "graph", "said"),
    [
        (100.0, 90.0, 80.0, "1.12 times its steady passes by CUDA graph"),
        (100.0, 130.0, None, "1.30 times its isolated passes"),
        (100.0, 104.0, 102.0, None),
    ],
)
def test_a_chain_that_is_slower_than_it_ought_to_be_is_told(
    tmp_path: Path, isolated: float, steady: float, graph: float | None, said: str | None
) -> None:
    run = stored(tmp_path, chain(isolated, steady, graph))
    for text in everywhere(run):
        assert (SAID in text) == (said is not None)
        assert said is None or said in re.sub(r"\s+", " ", text)


def test_where_the_graph_is_no_faster_it_is_not_the_cpu(tmp_path: Path) -> None:
    for text in everywhere(stored(tmp_path, chain(100.0, 130.0, 128.0))):
        assert SAID not in text
        told = re.sub(r"\s+", " ", text)
        assert "1.30 times its isolated passes (100 us): not the CPU: by graph they are no" in told


def test_other_systems_and_the_host_prove_nothing(tmp_path: Path) -> None:
    apart = [row("local", 50.0, **CUDA), row("push", 130.0, regime="steady", **CUDA)]
    host = chain(100.0, 130.0, None, fabric="host", link="shm")
    for name, rows in (("apart", apart), ("host", host)):
        assert SAID not in text_of([stored(tmp_path / name, rows)], 250)


def test_many_of_them_are_counted_on_a_page(tmp_path: Path) -> None:
    rows = [one for t in range(1, 12) for one in chain(100.0, 130.0, None, tokens_per_rank=t)]
    text = report.html_report([stored(tmp_path, rows)])
    assert text.count(SAID) == 8
    assert "3 more chains like these." in text
