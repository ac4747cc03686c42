"""MoK's kernel for sanitize.py: one rank, buffers of exactly the size that is needed."""

from typing import Any

import numpy as np

from mokbench.gemm_config import GemmConfig
from mokbench.grouped_gemm import Matrix
from mokbench.mok_config import SOURCE, THREADS, MokConfig, least_hidden_ring_tiles
from mokbench.systems.cuda_mok_workspace import MokArgs, mok_maps
from mokbench.twin import load_twin
from mokbench.workload import Model

GRID = 4
WAIT_BOUND_NS = 60 * 10**9
# (model, tokens, tile rows, group tiles): a narrow block in both GEMMs, rows that fill no tile, the
# smallest rings; every token on all experts; no token.
CASES = [
    (Model("narrow", 320, 192, 6, 3), 70, 32, 1),
    (Model("wide", 512, 256, 4, 4), 90, 128, 2),
    (Model("one_token", 128, 128, 8, 8), 1, 64, 8),
    (Model("none", 128, 128, 8, 8), 0, 64, 8),
]


def segment_bytes(config: MokConfig) -> int:
    """The exact end of a segment, from protocol.h's own layout; its rings may be larger."""
    model, twin = config.model, load_twin()
    shape = {
        "num_ranks": 1,
        "num_experts": model.experts,
        "top_k": model.top_k,
        "max_tokens": config.max_tokens,
        "hidden": model.hidden,
        "intermediate": model.intermediate,
        "element_bytes": 2,
        "block_m": config.tiles.tile_rows,
        "ring_tiles": config.ring_tiles,
        "hidden_ring_tiles": config.hidden_ring_tiles,
    }
    layout = twin.layout("mok", twin.TwinConfig(**shape))
    return max(offset + num_bytes for offset, num_bytes in layout.values())


def expected(x: Any, w13: Any, w2: Any, idx: Any, weights: Any) -> Any:
    """In FP32; hidden rows are rounded as BF16 rounds them, near enough."""
    y = np.zeros_like(x)
    for token, k in np.argwhere(idx >= 0):
        expert = idx[token, k]
        gate, up = np.split(w13[expert] @ x[token], 2)
        y[token] += weights[token, k] * (w2[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return y


def mok(device: Any, table: Any, bf16: Any, case: tuple[Model, int, int, int]) -> None:
    """Two passes of one case; the second begins where the first left the rings."""
    model, tokens, tile_rows, group_tiles = case
    random = np.random.default_rng(tokens)
    least = least_hidden_ring_tiles(model, group_tiles, GRID)
    tiles = GemmConfig(tile_rows, 2, group_tiles)
    config = MokConfig(model, 1, max(1, tokens), tiles, group_tiles, least, 4, GRID)
    hidden, inner, experts = model.hidden, model.intermediate, model.experts
    x = random.integers(-2, 3, (tokens, hidden)).astype(np.float32)
    w13 = random.integers(-1, 2, (experts, 2 * inner, hidden)).astype(np.float32) / 64
    w2 = random.integers(-1, 2, (experts, hidden, inner)).astype(np.float32)
    idx = np.array(
        [random.permutation(experts)[: model.top_k] for _ in range(tokens)], dtype=np.int32
    ).reshape(tokens, model.top_k)
    idx[random.random(idx.shape) < 0.2] = -1
    weights = random.random(idx.shape).astype(np.float32)
    packed = w13.reshape(experts, 2, inner // 8, 8, hidden).swapaxes(1, 2)
    x_rows, hidden_rows = (tile_rows * count for count in (config.ring_tiles, least))
    segment = device.allocate(segment_bytes(config))
    rings = device.allocate(x_rows * hidden * 2), device.allocate(hidden_rows * inner * 2)
    args = MokArgs(
        segments=table([segment]),
        num_tokens=tokens,
        wait_bound_ns=WAIT_BOUND_NS,
        x=device.upload(bf16(x)),
        topk_idx=device.upload(idx),
        topk_weights=device.upload(weights),
        y=device.allocate(tokens * hidden * 2),
        x_ring=rings[0],
        hidden_ring=rings[1],
        **{name: device.allocate(4 * words) for name, words in config.scratch_words().items()},
    )
    maps = mok_maps(
        config,
        Matrix(device.upload(bf16(packed)), experts * 2 * inner, hidden),
        Matrix(device.upload(bf16(w2)), experts * hidden, inner),
        Matrix(rings[0], x_rows, hidden),
        Matrix(rings[1], hidden_rows, inner),
    )
    name = config.expression.removeprefix("mokbench::")
    for _ in range(2):
        shared = config.tiles.shared_bytes
        device.launch(
            SOURCE, name, GRID, THREADS, args, cooperative=True, after=(maps,), shared_bytes=shared
        )
    device.require_no_fault(segment)
    bits = device.download(args.y, x.size, np.uint16).astype(np.uint32) << 16
    got = bits.view(np.float32).reshape(x.shape)
    truth = expected(x, w13, w2, idx, weights)
    error = np.abs(got - truth).sum() / max(1e-9, np.abs(truth).sum())
    assert error < 8e-3 or not truth.any(), f"{config.expression}: error {error}"
