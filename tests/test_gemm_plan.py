"""The plan of the GPU's grouped GEMM, on the CPU: every row of every expert once, evenly."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mokbench import twin
from mokbench.errors import UnsupportedError
from mokbench.gemm_config import (
    HALF_COLS,
    MAX_SHARED_BYTES,
    PART_BYTES,
    PARTS_A_CTA,
    ROW_UNIT,
    TILE_ROWS,
    GemmConfig,
    choose_gemm,
    gemm_cost,
    gemm_problem,
    most_stages,
)

try:
    twin.load_twin()
except UnsupportedError as error:
    pytest.skip(str(error), allow_module_level=True)


def tiles_of(sizes, n, num_ctas, tile_rows, group_tiles=8, k_blocks=12, split_k=False):
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return twin.gemm_tiles(
        ends,
        n,
        k_blocks,
        num_ctas=num_ctas,
        tile_rows=tile_rows,
        group_tiles=group_tiles,
        split_k=split_k,
    )


def fields(tiles, *names):
    return [tuple(tile[name] for name in names) for tile in tiles]


SIZES = st.lists(st.one_of(st.just(0), st.integers(1, 1200)), min_size=1, max_size=12)


@settings(max_examples=300, deadline=None)
@given(
    sizes=SIZES,
    blocks=st.integers(1, 9),
    k_blocks=st.integers(2, 230),
    num_ctas=st.integers(1, 140),
    tile_rows=st.sampled_from(TILE_ROWS),
    group_tiles=st.integers(1, 9),
    split_k=st.booleans(),
)
def test_every_row_is_in_one_tile_of_every_column_block(
    sizes, blocks, k_blocks, num_ctas, tile_rows, group_tiles, split_k
):
    n = blocks * HALF_COLS - HALF_COLS // 2
    full_wide = (blocks // 2) * 2 * HALF_COLS
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    seen, parts_seen = {}, set()
    arguments = (sizes, n, num_ctas, tile_rows, group_tiles, k_blocks, split_k)
    for tile in tiles_of(*arguments):
        expert, column, row, num_rows, units = fields(
            [tile], "expert", "column", "row", "num_rows", "units"
        )[0]
        if units == 0:
            continue
        narrow = tile["narrow"]
        assert units <= tile_rows // ROW_UNIT * (2 if narrow else 1)
        # Only a last block of no more than 128 columns, and pieces, have their halves in rows.
        assert not narrow or column >= full_wide or tile["k_parts"] == 1
        assert narrow or column < full_wide
        assert 0 < num_rows <= units * ROW_UNIT < num_rows + ROW_UNIT
        assert begins[expert] <= row
        assert row + num_rows <= begins[expert] + sizes[expert]
        assert column % HALF_COLS == 0
        assert column < n
        blocks_of_it = range(tile["first_block"], tile["first_block"] + tile["num_blocks"])
        if tile["k_parts"] > 1:
            assert split_k
            if tile["k_part"] > 0:
                at = tile["parts_at"] + tile["k_part"] - 1
                assert at < 2 * num_ctas
                assert at not in parts_seen
                parts_seen.add(at)
        columns = [column] if narrow else [column, column + HALF_COLS]
        for place in ((col, r) for col in columns for r in range(row, row + num_rows)):
            assert place[0] < n
            have = seen.setdefault(place, [])
            # Parts come last first: the owner of the sum, part 0, waits for CTAs at work.
            assert not have or min(have) == blocks_of_it[-1] + 1
            have.extend(blocks_of_it)
    assert len(seen) == blocks * sum(sizes)
    assert all(sorted(have) == list(range(k_blocks)) for have in seen.values())


def test_an_expert_without_rows_has_no_tile_and_no_rows_no_items():
    tiles = tiles_of([0, 40, 0], 128, 132, 128)
    assert {tile["expert"] for tile in tiles if tile["units"]} == {1}
    assert tiles_of([0, 0], 512, 132, 128) == []
    assert tiles_of([], 512, 132, 128) == []


def test_rows_are_shared_out_evenly_among_an_experts_tiles():
    # 265 rows are 17 units and need three tiles of 128 rows: not 128, 128 and 9.
    tiles = tiles_of([265], 256, 1, 128)
    assert fields(tiles, "row", "num_rows", "units", "narrow") == [
        (0, 96, 6, False),
        (96, 96, 6, False),
        (192, 73, 5, False),
    ]


def test_a_last_block_of_columns_has_tiles_of_twice_the_rows():
    # 384 columns: a wide block, and a narrow one whose tiles have up to 256 rows.
    tiles = tiles_of([384], 384, 1, 128)
    assert fields(tiles, "column", "row", "num_rows", "narrow") == [
        (0, 0, 128, False),
        (0, 128, 128, False),
        (0, 256, 128, False),
        (256, 0, 192, True),
        (256, 192, 192, True),
    ]
    # 448: 192 are left, more than a half.
    assert {tile["narrow"] for tile in tiles_of([384], 448, 1, 128)} == {False}
    assert {tile["narrow"] for tile in tiles_of([384], 64, 1, 128)} == {True}


def test_row_tiles_that_share_weights_follow_each_other():
    tiles = tiles_of([512], 512, 8, 128)
    assert fields(tiles, "column", "row") == [
        (column, row) for column in (0, 256) for row in (0, 128, 256, 384)
    ]
    # In groups of two row tiles, the columns come round again for the next group.
    tiles = tiles_of([512], 512, 8, 128, group_tiles=2)
    assert fields(tiles, "column", "row") == [
        *((column, row) for column in (0, 256) for row in (0, 128)),
        *((column, row) for column in (0, 256) for row in (256, 384)),
    ]


def test_tiles_that_would_leave_ctas_idle_are_cut():
    # 140 tiles on 132 CTAs: each of the last 8 in 8 pieces, its halves in 4 each.
    tiles = tiles_of([128] * 140, 256, 132, 128)
    assert fields(tiles, "units", "narrow") == [(8, False)] * 132 + [(2, True)] * 64
    assert fields(tiles[132:140], "column", "row") == [
        (column, 128 * 132 + row) for column in (0, 128) for row in (0, 32, 64, 96)
    ]
    # 131 tiles leave one CTA idle, and no cut would help.
    assert fields(tiles_of([128] * 131, 256, 132, 128), "units") == [(8,)] * 131


def test_long_k_is_shared_out_where_cut_rows_would_not_help():
    # 68 of 132 CTAs would do a last tile: in thirds of 224 k-blocks all are done earlier.
    tiles = tiles_of([128 * 200], 256, 132, 128, k_blocks=224, split_k=True)
    assert fields(tiles, "k_parts") == [(1,)] * 132 + [(3,)] * 204
    assert fields(tiles[132:135], "k_part", "first_block", "num_blocks") == [
        (2, 150, 74),
        (1, 75, 75),
        (0, 0, 75),
    ]
    # A tile of a few rows takes its weights' way, in parts or not.
    few = tiles_of([128 * 199, 16], 256, 132, 128, k_blocks=224, split_k=True)
    of_it = [tile for tile in few if tile["expert"] == 1 and tile["units"]]
    assert fields(of_it, "units", "k_parts", "num_blocks") == [(1, 1, 224)]
    short = tiles_of([128 * 200], 256, 132, 128, k_blocks=12, split_k=True)
    assert set(fields(short, "k_parts")) == {(1,)}


def test_hostile_plans_are_refused():
    for sizes, words in (([5, -2], "fall"), ([5], "multiple of 16")):
        with pytest.raises(ValueError, match=words):
            tiles_of(sizes, 128, 1, 40 if words.startswith("multiple") else 128)
    for changes in ({"num_ctas": 0}, {"n": 0}, {"k_blocks": 0}):
        arguments = {"n": 128, "num_ctas": 1, "k_blocks": 2} | changes
        with pytest.raises(ValueError, match="at least 1"):
            tiles_of([5], tile_rows=32, **arguments)
    with pytest.raises(TypeError):
        tiles_of([5], -1, 1, 32)


def test_the_parts_of_shared_tiles_have_room():
    assert PARTS_A_CTA == twin.GEMM_PARTS_A_CTA
    assert PART_BYTES == twin.GEMM_PART_BYTES == 128 * 256 * 4
    assert choose_gemm(2048, 8, 4096, 14336, 132).split_k
    assert not choose_gemm(512, 128, 2048, 768, 132).split_k
    with pytest.raises(ValueError, match="split_k needs tile_rows 128"):
        GemmConfig(tile_rows=64, split_k=True)


@pytest.mark.parametrize("tile_rows", TILE_ROWS)
def test_shared_memory_is_what_the_kernel_lays_out(tile_rows):
    for stages in range(2, most_stages(tile_rows) + 1):
        config = GemmConfig(tile_rows, stages)
        layout = twin.gemm_layout(tile_rows, stages)
        assert config.shared_bytes == layout["bytes"] <= MAX_SHARED_BYTES
        assert layout["stage_bytes"] % 1024 == 0
        assert layout["work"] % 16 == 0
    with pytest.raises(ValueError, match="stages"):
        GemmConfig(tile_rows, most_stages(tile_rows) + 1)


def test_configs_that_do_not_exist_are_refused():
    for bad in ({"tile_rows": 96}, {"stages": 1}, {"group_tiles": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            GemmConfig(**bad)
    assert "512 experts" in (gemm_problem(513, 128, 128) or "")
    for n, k in ((100, 128), (128, 100), (128, 64)):
        assert "found" in (gemm_problem(8, n, k) or "")
    assert gemm_problem(512, 64, 128) is None
    assert gemm_problem(128, 2880, 2880) is None


@pytest.mark.parametrize(
    "rows, experts, n, k, expected",
    [
        (2048, 32, 4096, 7168, 128),
        (512, 128, 1536, 2048, 128),
        (512, 128, 2048, 768, 128),
        (32, 32, 4096, 7168, 32),
        (1, 32, 4096, 7168, 32),
        (64, 128, 1536, 2048, 64),
    ],
)
def test_the_cost_model_picks_what_the_shape_needs(rows, experts, n, k, expected):
    assert choose_gemm(rows, experts, n, k, 132).tile_rows == expected


def test_stages_that_are_given_decide_which_heights_are_left():
    # At 33 SMs 128 rows would be cheapest, and have no room for 5 stages.
    assert choose_gemm(256, 8, 768, 4992, 33).tile_rows == 128
    assert choose_gemm(256, 8, 768, 4992, 33, stages=5).tile_rows == 32
    with pytest.raises(ValueError, match="stages is 11"):
        choose_gemm(256, 8, 768, 4992, 33, stages=11)


def test_what_is_given_is_taken():
    config = choose_gemm(2048, 32, 4096, 7168, 132, tile_rows=64, stages=3)
    assert (config.tile_rows, config.stages) == (64, 3)


def test_costs_fall_with_sms_and_rise_with_rows():
    whole, part = (gemm_cost(128, 2048, 32, 4096, 7168, sms).cycles for sms in (132, 33))
    assert 3.5 < part / whole < 4.5
    more = gemm_cost(128, 4096, 32, 4096, 7168, 132).cycles
    assert 1.8 < more / whole < 2.2
