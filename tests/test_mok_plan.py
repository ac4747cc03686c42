"""The order of both GEMMs' tiles in a MoK pass, on the CPU: all once, none too early, rings as
small as said."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mokbench import twin
from mokbench.errors import UnsupportedError

try:
    twin.load_twin()
except UnsupportedError as error:
    pytest.skip(str(error), allow_module_level=True)

GROUP_TILES = 8
GROUPS = st.lists(st.integers(1, GROUP_TILES), min_size=1, max_size=25)


def places_of(items):
    return {item: place for place, item in enumerate(items)}


@settings(max_examples=200, deadline=None)
@given(groups=GROUPS, lag=st.integers(0, 60), blocks=st.tuples(*[st.integers(1, 9)] * 2))
def test_every_tile_is_taken_once_and_the_second_gemm_trails_the_first(groups, lag, blocks):
    items = twin.mok_items(groups, lag=lag, gemm1_blocks=blocks[0], gemm2_blocks=blocks[1])
    every = {
        (gemm, group, tile, block)
        for gemm in (0, 1)
        for group, tiles in enumerate(groups)
        for tile in range(tiles)
        for block in range(blocks[gemm])
    }
    assert len(items) == len(every)
    assert set(items) == every
    firsts = [place for place, item in enumerate(items) if item[0] == 0]
    for group in range(len(groups)):
        own = [place for place in firsts if items[place][1] == group]
        begin = min(p for p, item in enumerate(items) if item[0] == 1 and item[1] == group)
        # Behind the last of its own GEMM 1 come `lag` others, or all there are, and then it begins.
        behind = sum(own[-1] < place < begin for place in firsts)
        left = sum(place > own[-1] for place in firsts)
        assert behind == min(lag, left)


@settings(max_examples=200, deadline=None)
@given(groups=GROUPS, lag=st.integers(0, 60), blocks=st.tuples(*[st.integers(1, 9)] * 2))
def test_a_slot_is_asked_for_again_only_behind_all_who_use_it(groups, lag, blocks):
    items = twin.mok_items(groups, lag=lag, gemm1_blocks=blocks[0], gemm2_blocks=blocks[1])
    firsts = [sum(groups[:group]) for group in range(len(groups))]
    places: list[dict[int, list[int]]] = [{}, {}]
    for place, (gemm, group, tile, _) in enumerate(items):
        places[gemm].setdefault(firsts[group] + tile, []).append(place)
    ring, hidden_ring = GROUP_TILES, -(-lag // blocks[0]) + 2 * GROUP_TILES
    for tile in places[0]:
        if tile >= ring:
            assert max(places[0][tile - ring]) < min(places[0][tile])
        if tile >= hidden_ring:
            assert max(places[1][tile - hidden_ring]) < min(places[0][tile])


def test_the_order_of_a_published_shape():
    # DeepSeek-V3: 4096 columns of gate and up are 16 wide blocks, 7168 are 28; 2 * 132 CTAs.
    shape = {"tile_rows": 128, "group_tiles": 8, "num_ctas": 132}
    order = twin.mok_order(hidden=7168, intermediate=2048, **shape)
    assert (order["gemm1_blocks"], order["gemm2_blocks"], order["lag"]) == (16, 28, 264)
    assert order["least_ring_tiles"] == 8
    assert order["least_hidden_ring_tiles"] == 17 + 16
    # 2880 columns: eleven wide blocks and a narrow one; 2 * 2880 have 22.5.
    odd = twin.mok_order(hidden=2880, intermediate=2880, **shape)
    assert (odd["gemm1_blocks"], odd["gemm2_blocks"]) == (23, 12)


def test_two_groups_in_full():
    # GEMM 1 of both, one block each; GEMM 2 of the first group one tile behind its end.
    items = twin.mok_items([2, 1], lag=1, gemm1_blocks=1, gemm2_blocks=2)
    assert items == [
        (0, 0, 0, 0),
        (0, 0, 1, 0),
        (0, 1, 0, 0),
        (1, 0, 0, 0),
        (1, 0, 1, 0),
        (1, 0, 0, 1),
        (1, 0, 1, 1),
        (1, 1, 0, 0),
        (1, 1, 0, 1),
    ]


def test_hostile_orders_are_refused():
    with pytest.raises(ValueError, match="at least one tile"):
        twin.mok_items([1, 0], lag=0, gemm1_blocks=1, gemm2_blocks=1)
    with pytest.raises(ValueError, match="blocks"):
        twin.mok_items([1], lag=0, gemm1_blocks=0, gemm2_blocks=1)
    assert twin.mok_items([], lag=3, gemm1_blocks=1, gemm2_blocks=1) == []
