"""The sweep grammar, cell ids and their order."""

import itertools
import pickle
import time

import pytest

from mokbench import cells, config
from mokbench.errors import ConfigError
from mokbench.routing import RoutingSpec
from mokbench.workload import Cell, Dtype, Regime

HEAD = """\
ranks: 4
model: {name: tiny, hidden: 512, intermediate: 256, experts: 32, top_k: 4}
measure: {regimes: [isolated]}
"""


def expand(text: str, systems: str = "systems: [mok, push]\n") -> list[Cell]:
    return cells.expand(config.parse(HEAD + systems + text))


def ids(text: str, systems: str = "systems: [mok, push]\n") -> list[str]:
    return [cell.id for cell in expand(text, systems)]


def problem(text: str, systems: str = "systems: [mok, push]\n") -> str:
    with pytest.raises(ConfigError) as caught:
        expand(text, systems)
    (line,) = caught.value.problems
    return line


def test_product_in_order_workload_then_system_then_regime() -> None:
    text = HEAD.replace("[isolated]", "[isolated, steady]") + (
        "systems: [push, mok]\nsweep: {tokens_per_rank: [128, 1], routing: [skewed, balanced]}\n"
    )
    found = [cell.id for cell in cells.expand(config.parse(text))]
    assert found == [
        f"tiny.{system}.r4.t{tokens}.{routing}.bf16.{regime}"
        for tokens, routing, system, regime in itertools.product(
            (128, 1), ("skewed", "balanced"), ("push", "mok"), ("isolated", "steady")
        )
    ]


def test_a_cell_holds_what_its_id_says() -> None:
    (cell,) = expand(
        "tokens_per_rank: 7\ndtype: fp32\nseed: 3\nplacement: round_robin\nrouting: {zipf: 0.8}\n",
        "systems: {mok: {ring_tiles: 2, block_m: 64}}\n",
    )
    assert cell.id == "tiny.mok~ring_tiles=2.r4.t7.zipf-0.8.fp32.isolated.seed3.round_robin"
    assert (cell.fabric, cell.system, cell.options) == ("host", "mok", (("ring_tiles", 2),))
    work = cell.workload
    assert (work.ranks, work.tokens_per_rank, work.dtype, work.seed) == (4, 7, Dtype.FP32, 3)
    assert work.routing == RoutingSpec.model_validate({"zipf": 0.8})
    assert (cell.regime, cell.graph, work.nodes) == (Regime.ISOLATED, False, 1)
    assert Cell.from_dict(cell.to_dict()) == cell
    assert pickle.loads(pickle.dumps(cell)) == cell


def test_graph_shows_in_the_id_and_comes_last() -> None:
    text = HEAD.replace("[isolated]", "[isolated, steady], graph: [true, no]")
    found = cells.expand(config.parse(text + "systems: mok\ntokens_per_rank: 1\n"), "cuda")
    assert [cell.id.removeprefix("tiny.mok.r4.t1.balanced.bf16.") for cell in found] == [
        "isolated",
        "isolated.graph",
        "steady",
        "steady.graph",
    ]
    assert {cell.fabric for cell in found} == {"cuda"}


def test_options_become_variants_and_defaults_leave_no_trace() -> None:
    found = expand(
        "\ntokens_per_rank: 1\n",
        "systems: [{mok: {ring_tiles: [auto, 2], block_m: [32, 64]}}, "
        "{deepep: {num_sms: [8, auto]}}]",
    )
    assert [(cell.system, cell.options) for cell in found] == [
        ("mok", (("block_m", 32),)),
        ("mok", (("block_m", 32), ("ring_tiles", 2))),
        ("mok", ()),
        ("mok", (("ring_tiles", 2),)),
        ("deepep", (("num_sms", 8),)),
        ("deepep", ()),
    ]


def test_ids_depend_on_the_cell_alone() -> None:
    small = ids("tokens_per_rank: 128\n", "systems: push\n")
    large = ids("tokens_per_rank: [1, 128]\nrouting: [extreme, balanced]\nseed: [0, 5]\n")
    assert set(small) < set(large)
    assert len(set(large)) == len(large) == 16


def test_long_ids_stay_file_names_and_distinct() -> None:
    model = HEAD.replace("tiny", "m" * 64)
    routing = "{lognormal: 0.123456789, masked: 0.1234567891, uneven: 0.12345678912}"
    deepep = "{deepep: {num_sms: [8, 16], gemm: torch, deterministic: yes}}"
    text = f"{model}systems: {deepep}\nrouting: {routing}\n"
    text += "tokens_per_rank: 1048576\nseed: 4294967295\n"
    found = [cell.id for cell in cells.expand(config.parse(text))]
    assert [len(name) for name in found] == [cells.MAX_ID_CHARS] * 2
    assert found[0] != found[1]
    assert found == [cell.id for cell in cells.expand(config.parse(text))]


def test_zip_moves_lists_together() -> None:
    found = expand(
        "sweep:\n  dtype: [bf16, fp32]\n"
        "  zip: [{tokens_per_rank: [1, 128], routing: [balanced, extreme]}]\n",
        "systems: mok\n",
    )
    assert [
        (cell.workload.dtype.value, cell.workload.tokens_per_rank, cell.workload.routing.label)
        for cell in found
    ] == [
        ("bf16", 1, "balanced"),
        ("bf16", 128, "extreme"),
        ("fp32", 1, "balanced"),
        ("fp32", 128, "extreme"),
    ]


def test_exclude_matches_every_key_and_any_listed_value() -> None:
    left = expand(
        "sweep:\n  tokens_per_rank: [1, 16, 128]\n  routing: [balanced, {hot_rank: 2}]\n"
        "  exclude:\n"
        "    - {system: push, tokens_per_rank: [1, 16], routing: {hot_rank: 2}}\n"
        "    - {model: TINY, ranks: 4, tokens_per_rank: 128, dtype: bf16}\n"
    )
    rows = [(c.system, c.workload.tokens_per_rank, c.workload.routing.label) for c in left]
    assert rows == [
        ("mok", 1, "balanced"),
        ("push", 1, "balanced"),
        ("mok", 1, "hot_rank-2"),
        ("mok", 16, "balanced"),
        ("push", 16, "balanced"),
        ("mok", 16, "hot_rank-2"),
    ]  # fmt: skip


def test_exclude_by_regime_and_graph() -> None:
    text = HEAD.replace("[isolated]", "[isolated, steady], graph: [no, yes]") + (
        "systems: mok\nsweep: {tokens_per_rank: 1, exclude: [{regime: isolated, graph: yes}]}\n"
    )
    found = cells.expand(config.parse(text))
    assert [(cell.regime.value, cell.graph) for cell in found] == [
        ("isolated", False),
        ("steady", False),
        ("steady", True),
    ]


def test_include_adds_cells_and_keeps_what_it_does_not_name() -> None:
    found = expand(
        "sweep:\n  tokens_per_rank: [1, 16]\n  routing: [balanced, typical]\n"
        "  exclude: [{tokens_per_rank: 16, routing: typical}]\n"
        "  include: [{tokens_per_rank: [64, 16], system: push}, {ranks: 2, tokens_per_rank: 1, "
        "routing: extreme}]\n",
    )
    assert [
        (w.ranks, w.tokens_per_rank, w.routing.label, c.system)
        for c in found
        if (w := c.workload)
    ] == [
        (4, 1, "balanced", "mok"),
        (4, 1, "balanced", "push"),
        (4, 1, "typical", "mok"),
        (4, 1, "typical", "push"),
        (4, 16, "balanced", "mok"),
        (4, 16, "balanced", "push"),
        (4, 16, "typical", "push"),
        (4, 64, "balanced", "push"),
        (4, 64, "typical", "push"),
        (2, 1, "extreme", "mok"),
        (2, 1, "extreme", "push"),
    ]  # fmt: skip


def test_include_takes_its_axis_out_of_a_zip_group() -> None:
    found = ids(
        "sweep:\n  zip: [{tokens_per_rank: [1, 2, 3], seed: [7, 7, 8]}]\n"
        "  include: [{tokens_per_rank: 9}]\n",
        "systems: mok\n",
    )
    parts = [name.split(".") for name in found]
    assert [f"{part[3]}.{part[-1]}" for part in parts] == [
        "t1.seed7",
        "t2.seed7",
        "t9.seed7",
        "t3.seed8",
        "t9.seed8",
    ]


@pytest.mark.parametrize(
    ("sweep", "expected"),
    [
        ("zip: [{seed: [1, 2], dtype: [bf16]}]", "5:35: sweep.zip[0]: dtype has 1, seed has 2 val"),
        ("zip: [{seed: [1, 1]}]", "values 2 of the lists repeat values 1"),
        ("zip: [{}]", "sweep.zip[0]: found nothing to move together"),
        ("zip: [{ranks: [1, 2]}]", "sweep.zip[0].ranks: this axis already has values at 1:1"),
        ("exclude: [{}]", "sweep.exclude[0]: found an empty mapping"),
        ("exclude: [{ranks: 2}]", "sweep.exclude[0]: matches no cell of the sweep"),
        ("exclude: [{model: other}]", "sweep.exclude[0]: matches no cell of the sweep"),
        ("exclude: [{ranks: 4}]", "sweep.exclude: leaves no cell to run"),
        ("include: [{ranks: 4}]", "sweep.include[0]: adds no cell: the sweep already has all"),
        ("include: [{ranks: 2, system: local}]", "'local' is not under systems; allowed: mok, pus"),
        ("include: [{ranks: 5}]", "sweep.include[0].ranks: 5 ranks cannot share the 32 experts"),
        ("include: [{rank: 2}]", "sweep.include[0].rank: unknown key; did you mean ranks?"),
    ],
)  # fmt: skip
def test_sweeps_that_cannot_be_meant(sweep: str, expected: str) -> None:
    assert expected in problem(f"sweep: {{tokens_per_rank: 1, {sweep}}}\n".replace("\n", ""))


def test_experts_that_ranks_cannot_share_may_be_excluded() -> None:
    text = "sweep: {tokens_per_rank: 1, zip: [{ranks: [2, 3], seed: [0, 1]}]%s}\n"
    head = HEAD.replace("ranks: 4\n", "") + "systems: mok\n"
    with pytest.raises(ConfigError) as caught:
        config.parse(head + text % "")
    assert "sweep.zip[0].ranks[1]: 3 ranks cannot share the 32 experts of tiny" in str(caught.value)
    exclude = ", exclude: [{model: tiny, ranks: 3}]"
    (cell,) = cells.expand(config.parse(head + text % exclude))
    assert cell.workload.ranks == 2


def test_a_product_that_explodes_is_refused_at_once() -> None:
    numbers = list(range(1, 2001))
    start = time.monotonic()
    line = problem(f"tokens_per_rank: {numbers}\nseed: {numbers}\n")
    assert "sweep: found 8000000 cells; allowed: at most 100000" in line
    assert time.monotonic() - start < 5


def test_auto_fabric_has_to_be_resolved() -> None:
    suite = config.parse(HEAD + "systems: mok\ntokens_per_rank: 1\n")
    with pytest.raises(ValueError, match="fabric 'auto' is not resolved; allowed: host, cuda"):
        cells.expand(suite, suite.fabric)


def test_ten_thousand_cells_expand_in_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "ranks: [2, 4, 8]\nmodel: [deepseek-v3, qwen3-30b-a3b, mixtral-8x7b]\n"
        "dtype: [bf16, fp32]\nsystems: [mok, push, alltoall]\n"
        f"sweep:\n  tokens_per_rank: {[2**i for i in range(19)]}\n"
        "  routing: [balanced, typical, skewed, extreme, {hot_rank: 1.5}]\n"
        "  exclude: [{system: alltoall, tokens_per_rank: 1}]\n"
    )
    start = time.perf_counter()
    found = cells.expand(config.parse(text))
    elapsed_s = time.perf_counter() - start
    with capsys.disabled():
        print(f"\n{len(found)} cells parsed, checked and expanded in {elapsed_s:.2f} s")
    assert len(found) == 3 * 3 * 2 * 2 * 5 * (3 * 19 - 1)
    assert len({cell.id for cell in found}) == len(found)
    assert elapsed_s < 6


def test_thousands_of_excludes_expand_in_seconds() -> None:
    entries = [f"{{system: mok, tokens_per_rank: {i}, seed: {i % 5}}}" for i in range(2000)]
    entries += [
        f"{{system: [push, mok], tokens_per_rank: [{i}, {i + 1}], routing: balanced}}"
        for i in range(0, 2000, 2)
    ]
    entries += [f"{{regime: isolated, tokens_per_rank: {i}, seed: 4}}" for i in range(1000)]
    text = (
        HEAD
        + "systems: [mok, push, alltoall]\n"
        + f"sweep:\n  seed: [0, 1, 2, 3, 4]\n  tokens_per_rank: {list(range(2000))}\n"
        + "  exclude:\n"
        + "".join(f"    - {entry}\n" for entry in entries)
    )
    start = time.perf_counter()
    found = cells.expand(config.parse(text))
    # Looked up, this takes a second; compared entry by entry, minutes.
    assert time.perf_counter() - start < 15
    # mok and push are gone altogether; alltoall lacks seed 4 of the first 1000.
    assert {cell.system for cell in found} == {"alltoall"}
    assert len(found) == 5 * 2000 - 1000


def test_an_exclude_of_very_many_combinations_is_still_exact() -> None:
    text = (
        f"sweep:\n  seed: {list(range(40))}\n  tokens_per_rank: {list(range(1, 41))}\n"
        f"  exclude: [{{seed: {list(range(1, 40))}, tokens_per_rank: {list(range(1, 40))}}}]\n"
    )
    found = {(c.workload.seed, c.workload.tokens_per_rank) for c in expand(text)}
    assert found == {(0, t) for t in range(1, 41)} | {(s, 40) for s in range(40)}
