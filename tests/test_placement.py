"""Experts placed by rule or by list: what is refused, what ids say, which rank gets which route."""

import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import yaml
from runs import mokbench

from mokbench import cells
from mokbench.cell_digest import cell_digest
from mokbench.config import parse, schema
from mokbench.errors import ConfigError
from mokbench.placement import ExplicitPlacement, label, new_ids, problem
from mokbench.record import Record
from mokbench.results import RunFolder
from mokbench.routing import RoutingSpec, generate
from mokbench.selection import select
from mokbench.workload import Cell, Dtype, Model, Workload

GOOD = """\
name: p
ranks: 2
model: {name: tiny, hidden: 64, intermediate: 64, experts: 4, top_k: 2}
systems: [mok]
tokens_per_rank: 4
measure: {regimes: isolated}
"""
SWAPPED = ExplicitPlacement(explicit=((2, 3), (0, 1)))


def problems_of(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(text, "c.yaml")
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    "written, expected",
    [
        ("{explicit: [[0, 3], [1]]}", "explicit: rank 1 has 1 experts and rank 0 has 2; allow"),
        ("{explicit: [[0, 3], [1, 3]]}", "placement.explicit: expert 3 is placed twice; allow"),
        ("{explicit: [[0, 4], [1, 2]]}", "expert 4 is none of 4, and 3 is on no rank; allow"),
        ("{explicit: [[0, -1], [1, 2]]}", "expert -1 is none of 4, and 3 is on no rank"),
        ("{explicit: [0, 1]}", "placement.explicit: found no list of lists; allowed: {exp"),
        ("{explicit: [[], []]}", "placement.explicit: found 0 experts; allowed: 1 to 1024"),
        ("{explicit: [[0, 1.5], [2, 3]]}", "explicit[0][1]: found 1.5; allowed: a whole number"),
        ("{explicit: [[0, 1], [2, 3]], nam: x}", "placement.nam: unknown key; did you mean name?"),
        ("{explicit: [[0, 1], [2, 3]], name: a/b}", "placement.name: found 'a/b'; allowed: 1"),
        ("{explicit: [[0, 1, 2, 3]]}", "is for ranks: 1 and 4 experts, found ranks: 2 and"),
        ("{explicit: [[0, 1, 2], [3, 4, 5]]}", "ranks: 2 and 6 experts, found ranks: 2 and"),
        ("[contiguous, contiguous]", "placement[1]: 'contiguous' is listed twice"),
        ("{name: eplb}", "placement.explicit: missing"),
    ],
)  # fmt: skip
def test_a_placement_that_cannot_be_is_one_line(written: str, expected: str) -> None:
    (line,) = problems_of(f"{GOOD}placement: {written}\n")
    assert line.startswith("c.yaml:7:")
    assert expected in line


def test_ids_and_rows_name_what_is_placed() -> None:
    text = f"{GOOD}placement:\n  - round_robin\n  - {{explicit: [[2, 3], [0, 1]], name: eplb}}\n"
    found = cells.expand(parse(text))
    placed = ExplicitPlacement(explicit=((2, 3), (0, 1)), name="eplb")
    assert [cell.workload.placement for cell in found] == ["round_robin", placed]
    assert placed.label.startswith("eplb-")
    assert placed.label.removeprefix("eplb") == SWAPPED.label.removeprefix("explicit")
    assert found[1].id == f"tiny.mok.r2.t4.balanced.bf16.isolated.{placed.label}"
    assert select(found, (f"placement={placed.label}",)) == found[1:]
    record = Record.from_cell(found[1], status="unsupported", reason="a test")
    assert record.placement == placed.label


def test_names_hold_what_is_placed_so_that_a_change_of_it_is_another_cell() -> None:
    other = ExplicitPlacement(explicit=((3, 2), (0, 1)))
    assert other.label != SWAPPED.label
    assert [label("round_robin"), label(other)] == ["round_robin", other.label]


def test_a_cell_survives_the_way_to_the_ranks() -> None:
    text = f"{GOOD}placement: {{explicit: [[2, 3], [0, 1]]}}\n"
    (cell,) = cells.expand(parse(text))
    back = Cell.from_dict(json.loads(json.dumps(cell.to_dict())))
    assert back == cell
    assert cell_digest(back) == cell_digest(cell)
    (plain,) = cells.expand(parse(GOOD))
    assert cell_digest(plain) != cell_digest(cell)


def test_what_is_resolved_is_a_config_of_the_same_cells(tmp_path: Path) -> None:
    text = f"{GOOD}placement: [contiguous, {{explicit: [[2, 3], [0, 1]]}}]\n"
    suite = parse(text)
    jsonschema.validate(yaml.safe_load(text), schema())
    jsonschema.validate(suite.resolved, schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(suite.resolved | {"placement": "random"}, schema())
    assert cells.expand(parse(json.dumps(suite.resolved))) == cells.expand(suite)


def test_placements_move_with_their_ranks_and_can_be_left_out() -> None:
    text = GOOD.replace("ranks: 2\n", "") + (
        "sweep:\n  zip:\n    - {ranks: [2, 4], placement: [{explicit: [[2, 3], [0, 1]]}, "
        "{explicit: [[3], [2], [1], [0]]}]}\n"
    )
    assert [cell.workload.ranks for cell in cells.expand(parse(text))] == [2, 4]
    left_out = f"{GOOD}placement: [contiguous, {{explicit: [[2, 3], [0, 1]]}}]\n" + (
        "sweep: {exclude: [{placement: {explicit: [[2, 3], [0, 1]]}}]}\n"
    )
    assert [cell.workload.placement for cell in cells.expand(parse(left_out))] == ["contiguous"]


def test_systems_compute_the_layer_wherever_its_experts_are(tmp_path: Path) -> None:
    config = tmp_path / "p.yaml"
    config.write_text(
        GOOD.replace("[mok]", "[mok, push, alltoall]").replace(
            "{regimes: isolated}",
            "{regimes: isolated, blocks: 2, max_time: 50ms, noise: 50%, signals: no, min_step: no}",
        )
        + "placement: [contiguous, {explicit: [[3, 0], [1, 2]], name: eplb}]\n"
    )
    out = tmp_path / "run"
    done = mokbench("run", config, "--out", out, "--no-charts", "--quiet")
    assert done.returncode == 0, done.stderr
    run = RunFolder.open(out)
    rows = run.records()
    assert {row.status for row in rows} == {"ok"}
    assert len({row.placement for row in rows}) == 2
    assert all(row.rel_error is not None and row.rel_error < 8e-3 for row in rows)
    (here,) = run.meta.topologies
    assert (here.node_of_rank, here.domain_of_rank) == ((0, 0), (0, 0))
    for row in rows:
        assert row.traffic is not None
        assert row.traffic.wire is not None
        assert row.traffic.wire.same_domain_bytes == row.wire_bytes
        assert row.traffic.wire.cross_node_bytes == 0


def work(placement: str | ExplicitPlacement, routing: str | dict = "extreme") -> Workload:
    spec = RoutingSpec.model_validate(routing)
    return Workload(Model("m", 64, 64, 8, 2), 4, 50, Dtype.BF16, spec, placement=placement)


@pytest.mark.parametrize("routing", ["extreme", {"masked": 0.3}])
def test_each_route_goes_to_the_rank_that_holds_its_expert(routing: str | dict) -> None:
    listed = ((7, 2), (0, 5), (3, 1), (6, 4))
    holder = {expert: rank for rank, experts in enumerate(listed) for expert in experts}
    plain = generate(work("contiguous", routing))
    moved = generate(work(ExplicitPlacement(explicit=listed), routing))
    for before, after in zip(plain.topk_idx, moved.topk_idx, strict=True):
        expected = [[holder.get(int(e), -1) for e in row] for row in before]
        assert np.array_equal(np.where(after >= 0, after // 2, -1), expected)
        assert np.array_equal(after < 0, before < 0)
    assert plain.digest() != moved.digest()


def test_rules_are_lists_too() -> None:
    by_rule = {
        "contiguous": ((0, 1), (2, 3), (4, 5), (6, 7)),
        "round_robin": ((0, 4), (1, 5), (2, 6), (3, 7)),
    }
    for rule, listed in by_rule.items():
        explicit = ExplicitPlacement(explicit=listed)
        assert np.array_equal(new_ids(rule, 4, 8), new_ids(explicit, 4, 8))
        assert generate(work(rule)).digest() == generate(work(explicit)).digest()


def test_a_placement_of_other_sizes_generates_nothing() -> None:
    assert problem(SWAPPED, 2, 4) is None
    with pytest.raises(ConfigError, match="is for ranks: 2 and 4 experts, found ranks: 4 and 8"):
        generate(work(SWAPPED))
