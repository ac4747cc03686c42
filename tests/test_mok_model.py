"""The counters of a MoK pass under random interleavings: nothing waits for ever, no slot is
overwritten while it is read, and a mutant that leaves out a rule of the protocol is seen."""

from random import Random

import pytest

from mokbench import twin
from mokbench.errors import UnsupportedError

try:
    twin.load_twin()
except UnsupportedError as error:
    pytest.skip(str(error), allow_module_level=True)

import mok_model
from mok_model import Rank, Rules, ViolationError


def layer_of(ring_tiles, hidden_ring_tiles, hidden=320, intermediate=192, block_m=32):
    return twin.TwinConfig(
        num_ranks=1,
        num_experts=6,
        top_k=1,
        max_tokens=4096,
        hidden=hidden,
        intermediate=intermediate,
        element_bytes=2,
        block_m=block_m,
        ring_tiles=ring_tiles,
        hidden_ring_tiles=hidden_ring_tiles,
    )


def rank_of(ctas, group_tiles, rules=Rules(), more=(0, 0), pull_warps=2, **shape):  # noqa: B008
    order = twin.mok_order(
        tile_rows=32,
        group_tiles=group_tiles,
        hidden=shape.get("hidden", 320),
        intermediate=shape.get("intermediate", 192),
        num_ctas=ctas,
    )
    ring = order["least_ring_tiles"] + more[0]
    hidden = order["least_hidden_ring_tiles"] + more[1]
    return Rank(layer_of(ring, hidden, **shape), group_tiles, ctas, pull_warps, rules)


def random_rows(random):
    kind = random.choice(("few", "one", "none", "many"))
    if kind == "one":
        return [random.randrange(1, 700), 0, 0, 0, 0, 0]
    most = {"few": 40, "none": 1, "many": 300}[kind]
    return [random.choice((0, random.randrange(most))) for _ in range(6)]


@pytest.mark.parametrize("seed", range(60))
def test_passes_end_whatever_the_interleaving(seed):
    random = Random(seed)
    rank = rank_of(
        ctas=random.choice((1, 2, 3, 7)),
        group_tiles=random.choice((1, 2, 8)),
        more=random.choice(((0, 0), (0, 3), (5, 0), (9, 9))),
        pull_warps=random.choice((1, 2)),
        hidden=random.choice((128, 320, 640)),
        intermediate=random.choice((128, 192, 448)),
    )
    for _ in range(3):
        rank.run(random_rows(random), random)


MUTANTS = [
    Rules(flushes_before_waits=False),
    Rules(waits_for_free_x=False),
    Rules(waits_for_free_hidden=False),
    Rules(waits_for_ready_hidden=False),
    Rules(raises_padding=False),
]


@pytest.mark.parametrize("rules", MUTANTS, ids=str)
def test_a_rule_left_out_is_missed(rules):
    for seed in range(200):
        random = Random(seed)
        rank = rank_of(random.choice((2, 3, 7)), random.choice((1, 2)), rules)
        try:
            for _ in range(3):
                rank.run([random.randrange(1, 200) for _ in range(6)], random)
        except ViolationError:
            return
    pytest.fail("no interleaving showed the mutant")


@pytest.mark.parametrize("short", [0, 1])
def test_rings_below_the_least_can_stop(short):
    layer = layer_of(*((1, 64), (4, 3))[short])

    def stops(seed):
        try:
            Rank(layer, 4, 3, 2, Rules()).run([600, 300, 0, 40, 0, 90], Random(seed))
        except ViolationError as violation:
            return "wait for each other" in str(violation)
        return False

    assert any(stops(seed) for seed in range(200))


def test_every_output_is_made_once():
    layer = layer_of(8, 64, hidden=704, intermediate=320)
    rows = [45, 0, 300, 1, 16, 33]
    plan = twin.mok_pass(rows, layer, group_tiles=4, num_ctas=5, x_at=(3, 7), hidden_at=(60, 2))
    begins = [sum(rows[:expert]) for expert in range(6)]
    for gemm, n in enumerate((640, 704)):
        seen = set()
        for work in plan["works"]:
            if work["gemm"] != gemm:
                continue
            tile = next(t for t in plan["tiles"] if t[2] == work["x"])
            assert work["num_rows"] == tile[1] <= 16 * work["units"] <= 32
            assert begins[work["expert"]] <= tile[0]
            assert tile[0] + tile[1] <= begins[work["expert"]] + rows[work["expert"]]
            assert work["row"] == (tile[0] if gemm else work["hidden"][0] * 32)
            width = 128 if work["narrow"] else 256
            columns = range(work["column"], min(n, work["column"] + width), 64)
            new = {(tile[0] + row, column) for row in range(tile[1]) for column in columns}
            assert not new & seen
            seen |= new
        assert seen == {(row, column) for row in range(sum(rows)) for column in range(0, n, 64)}
    tiles = len(plan["tiles"])
    assert plan["rings"] == (
        ((3 + tiles) % 8, 7 + (3 + tiles) // 8),
        ((60 + tiles) % 64, 2 + (60 + tiles) // 64),
    )
    assert mok_model.CONSUMERS == 2
