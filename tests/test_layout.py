"""Offsets of a segment: right sizes, no overlap, alignment; written once in kernels/protocol.h."""

import itertools

import pytest

from mokbench.twin import load_twin

COUNTER = 128
SHAPES = [
    dict(
        zip(
            ("num_ranks", "local", "top_k", "max_tokens", "hidden", "element_bytes"),
            row,
            strict=True,
        )
    )
    for row in [
        (1, 1, 1, 1, 8, 4),
        (3, 2, 5, 7, 40, 2),
        (8, 32, 8, 128, 7168, 2),
        (72, 4, 16, 3, 64, 4),
    ]
]
TILES = [(1, 1, 1), (5, 3, 2)]


def config_of(shape, tiles):
    ring, hidden_ring, workers = tiles
    return load_twin().TwinConfig(
        num_ranks=shape["num_ranks"],
        num_experts=shape["num_ranks"] * shape["local"],
        top_k=min(shape["top_k"], shape["num_ranks"] * shape["local"]),
        max_tokens=shape["max_tokens"],
        hidden=shape["hidden"],
        intermediate=16,
        element_bytes=shape["element_bytes"],
        ring_tiles=ring,
        hidden_ring_tiles=hidden_ring,
        pull_workers=workers,
    )


def expected_bytes(protocol, c):
    """Field -> bytes, from what the field holds."""
    n, t, k, row = c.num_ranks, c.max_tokens, c.top_k, c.hidden * c.element_bytes
    if protocol == "mok":
        return {
            "header": 128,
            "entry": n * COUNTER,
            "returned": n * COUNTER,
            "schedule": COUNTER,
            "ring_ready": c.ring_tiles * COUNTER,
            "ring_free": c.ring_tiles * COUNTER,
            "hidden_ready": c.hidden_ring_tiles * COUNTER,
            "hidden_free": c.hidden_ring_tiles * COUNTER,
            "gathered_tokens": 2 * n * 4,
            "gathered_idx": 2 * n * t * k * 4,
            "x": t * row,
            "combine": t * k * row,
        }
    if protocol == "push":
        return {
            "header": 128,
            "dispatched": n * COUNTER,
            "combined": n * COUNTER,
            "recv_count": 2 * n * 4,
            "recv_meta": n * t * (8 + 8 * k),
            "recv_x": n * t * row,
            "partial": n * t * row,
        }
    return {
        "header": 128,
        "arrived": n * COUNTER,
        "arrived_ns": 2 * n * 8,
        "hop": COUNTER,
        "entry": n * COUNTER,
        "local": 3 * COUNTER,
        "inbox": 2 * n * COUNTER,
        "outbox": 2 * n * COUNTER,
    }


@pytest.mark.parametrize("protocol", ["mok", "push", "signal"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_fields(protocol, shape, tiles):
    config = config_of(shape, tiles)
    fields = load_twin().layout(protocol, config)
    assert {name: size for name, (_, size) in fields.items()} == expected_bytes(protocol, config)
    assert fields["header"][0] == 0
    ordered = sorted(fields.values())
    for (offset, size), (following, _) in itertools.pairwise(ordered):
        assert offset + size <= following < offset + size + 256
    assert all(offset % 256 == 0 for offset, _ in ordered)
    last_offset, last_size = ordered[-1]
    segment = load_twin().segment_bytes(protocol, config)
    assert segment % 4096 == 0
    assert 0 <= segment - (last_offset + last_size) < 4096


def test_sizes_beyond_4_gib_do_not_wrap():
    config = load_twin().TwinConfig(
        num_ranks=8,
        num_experts=256,
        top_k=8,
        max_tokens=65536,
        hidden=7168,
        intermediate=2048,
        element_bytes=2,
    )
    fields = load_twin().layout("mok", config)
    assert fields["combine"][1] == 65536 * 8 * 7168 * 2
    assert load_twin().segment_bytes("mok", config) > 7 * 2**30
    assert load_twin().PushRank.capacity_rows(config) == 8 * 65536 * 8


def test_capacity_rows_is_limited_by_local_experts():
    config = config_of(SHAPES[1], TILES[0])
    assert config.top_k == 5
    assert load_twin().PushRank.capacity_rows(config) == 3 * 7 * 2


def test_unknown_protocol():
    config = config_of(SHAPES[0], TILES[0])
    for call in (load_twin().layout, load_twin().segment_bytes):
        with pytest.raises(
            ValueError, match="protocol is 'nccl'; allowed are mok, push and signal"
        ):
            call("nccl", config)
