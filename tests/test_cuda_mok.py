"""What mok on the cuda fabric decides without a GPU: tiles, rings, memory and refusals."""

import re

import pytest

from mokbench import twin
from mokbench.errors import UnsupportedError
from mokbench.jit import kernel_root
from mokbench.mok_config import STAMPS, choose_mok, column_blocks, least_hidden_ring_tiles
from mokbench.routing import RoutingSpec
from mokbench.systems import system_class
from mokbench.systems.options import MokOptions
from mokbench.workload import Cell, Dtype, Model, Regime, Workload

DSV3 = Model("dsv3", 7168, 2048, 32, 8)
ODD = Model("odd", 2880, 1408, 384, 6)


def work_of(model=DSV3, ranks=1, tokens=8192, dtype=Dtype.BF16, nodes=1):
    routing = RoutingSpec.model_validate("balanced")
    return Workload(model, ranks, tokens, dtype, routing, nodes=nodes)


def cell_of(fabric="cuda", options=None, **work):
    given = tuple(sorted((options or {}).items()))
    return Cell("id", fabric, "mok", given, work_of(**work), Regime.ISOLATED)


@pytest.fixture(scope="module")
def layouts():
    try:
        return twin.load_twin()
    except UnsupportedError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("model", [DSV3, ODD, Model("k16", 192, 192, 32, 16)])
@pytest.mark.parametrize("group_tiles", [1, 8])
def test_the_smallest_rings_are_those_of_the_kernels_plan(layouts, model, group_tiles):
    order = layouts.mok_order(
        tile_rows=128,
        group_tiles=group_tiles,
        hidden=model.hidden,
        intermediate=model.intermediate,
        num_ctas=33,
    )
    found = [column_blocks(2 * model.intermediate), column_blocks(model.hidden)]
    assert found == [order["gemm1_blocks"], order["gemm2_blocks"]]
    assert least_hidden_ring_tiles(model, group_tiles, 33) == order["least_hidden_ring_tiles"]
    assert group_tiles == order["least_ring_tiles"]


@pytest.mark.parametrize("model, ranks", [(DSV3, 1), (DSV3, 8), (ODD, 4)])
@pytest.mark.parametrize("tokens", [1, 37, 4096])
def test_the_segment_has_room_for_the_layout(layouts, model, ranks, tokens):
    options = MokOptions(ring_tiles=40, hidden_ring_tiles=64)
    config = choose_mok(work_of(model, ranks, tokens), options, tokens, 60)
    shape = layouts.TwinConfig(
        num_ranks=ranks,
        num_experts=model.experts,
        top_k=model.top_k,
        max_tokens=tokens,
        hidden=model.hidden,
        intermediate=model.intermediate,
        element_bytes=2,
        block_m=config.tiles.tile_rows,
        ring_tiles=40,
        hidden_ring_tiles=64,
    )
    end = layouts.segment_bytes("mok", shape)
    assert end <= config.segment_bytes <= end + (1 << 15)


def test_what_is_chosen_for_a_published_shape():
    config = choose_mok(work_of(), MokOptions(), 8192, 132)
    assert (config.tiles.tile_rows, config.tiles.stages) == (128, 4)
    assert (config.ring_tiles, config.hidden_ring_tiles) == (32, 33 + 16)
    assert "rings of 32 (56 MiB) and 49 tiles (24 MiB)" in config.note
    # 32 rows an expert on the average: every second expert has more.
    for tokens, height in ((64, 32), (128, 64)):
        few = choose_mok(work_of(tokens=tokens), MokOptions(), tokens, 132)
        assert few.tiles.tile_rows == height
    assert config.workspace_bytes > 32 * 2 * 2048 * 7168 * 2


def test_stamps_have_the_kernels_order():
    text = (kernel_root() / "mok/plan.h").read_text(encoding="utf-8")
    names = re.findall(r"\bk(\w+)", text[text.index("enum MokStamp") : text.index("kNumStamps")])
    assert [name.lower() for name in names] == [name.replace("_", "") for name in STAMPS]


def test_groups_have_room_whatever_the_routing():
    config = choose_mok(work_of(ODD, 4, 100), MokOptions(tile_rows=32, group_tiles=2), 100, 33)
    # Every expert may have a last group that is not full.
    assert config.most_groups == 4 * 100 * 6 // 64 + 96


@pytest.mark.parametrize(
    "cell, reason",
    [
        (cell_of(dtype=Dtype.FP32), "BF16 only"),
        (cell_of(nodes=2), "one node"),
        (cell_of(options={"block_m": 32}), "block_m is an option of the host fabric"),
        (cell_of(options={"pull_workers": 2}), "pull_workers is an option of the host fabric"),
        (cell_of(model=Model("k", 512, 512, 64, 17)), "at most 16 top_k, found 17"),
        (cell_of(model=Model("h", 512, 64, 64, 4)), "intermediate to be a multiple of 64 from 128"),
        (cell_of(model=Model("e", 512, 512, 2048, 4)), "at most 1024 experts a rank"),
        (cell_of(options={"stages": 9}), "stages is 9"),
        (cell_of(options={"hidden_ring_tiles": 12}), "hidden_ring_tiles is 12"),
        (cell_of(fabric="host", options={"tile_rows": 32}), "tile_rows is an option of the cuda"),
        (cell_of(fabric="host", options={"ring_tiles": 65}), "at most 64 tiles"),
    ],
)
def test_refusals_say_why(cell, reason):
    assert reason in (system_class("mok", cell.fabric).supports(cell) or "")


def test_what_it_takes():
    rings = cell_of(options={"ring_tiles": 9, "hidden_ring_tiles": 20})
    tall = cell_of(options={"tile_rows": 128})
    for cell in (cell_of(), cell_of(model=ODD, ranks=4), tall, rings):
        assert system_class("mok", "cuda").supports(cell) is None
        assert system_class("mok", "cuda").workspace_bytes(cell) > 0


def test_rings_that_are_too_small_are_refused_with_the_least():
    with pytest.raises(ValueError, match=r"hidden_ring_tiles is 32; .* on 132 SMs 33 to 65535 go"):
        choose_mok(work_of(), MokOptions(hidden_ring_tiles=32), 8192, 132)
    with pytest.raises(ValueError, match="ring_tiles is 7; with group_tiles 8"):
        choose_mok(work_of(), MokOptions(ring_tiles=7), 8192, 132)
