"""MoK against the FP32 oracle of all ranks, over the awkward workloads, tiles and rings; the same
bits whatever rings and warps; in a CUDA graph; and with a rank that comes late or not at all."""

import time
from dataclasses import dataclass, replace

import pytest
import torch
from cuda_ranks import run_ranks

from mokbench import jit, reference
from mokbench.fabric.fault import FaultError
from mokbench.layer import Layer
from mokbench.mok_config import SOURCE, choose_mok, least_hidden_ring_tiles
from mokbench.routing import RoutingSpec
from mokbench.systems import Setup, system_class
from mokbench.systems.options import MokOptions
from mokbench.workload import Dtype, Model, Workload

# One kernel serves all token counts of a model: compiling takes longer than running.
MAX_TOKENS = 320
REPEATS = 20
SPECS = [
    {},
    {"hot_rank": 1.5},
    {"masked": 1.0},
    {"masked": 0.3, "uneven": 1.0},
    {"empty_experts": 2, "empty_ranks": 1},
]
SMALL = Model("small", 512, 256, 12, 3)
MODELS = [SMALL, Model("odd", 2880, 128, 24, 8), Model("k1", 256, 128, 12, 1)]
MANY = Model("many", 512, 256, 128, 8)
EXTREMES = [{}, {"hot_expert": 1.0}, {"hot_rank": 2.5}, {"uneven": 1.0}]
# Columns that do not fill a block; more experts than threads; the widest K.
SHAPES = [
    Model("gpt", 2880, 2880, 32, 4),
    Model("moonlight", 512, 1408, 64, 6),
    Model("e384", 512, 256, 384, 6),
    Model("k16", 192, 192, 32, 16),
]
TALL = MokOptions(tile_rows=128)


def workload(model, ranks, tokens, spec):
    routing = RoutingSpec.model_validate(spec or "balanced")
    return Workload(model, ranks, tokens, Dtype.BF16, routing)


def cases(ranks):
    """(workload, options), each model's on one kernel."""
    for tile_rows, model in zip((128, 64, 32), MODELS, strict=True):
        for tokens in (1, 37, 300):
            for spec in SPECS:
                if ranks == 1 and ("hot_rank" in spec or "empty_ranks" in spec):
                    continue
                yield workload(model, ranks, tokens, spec), MokOptions(tile_rows=tile_rows)
    for spec in [*EXTREMES, *([{"hot_rank": float(ranks)}] if ranks > 1 else [])]:
        if spec.get("hot_rank", 1.0) <= ranks:
            yield workload(MANY, ranks, 300, spec), MokOptions(tile_rows=64)
    for model in SHAPES:
        yield workload(model, ranks, 257, {}), TALL


def build_kernels(fabric, wanted):
    """All at once, a rank's share of them each."""
    names = {
        choose_mok(work, options, MAX_TOKENS, fabric.num_sms).expression for work, options in wanted
    }
    own = sorted(names)[fabric.rank :: fabric.ranks]
    jit.build_all([(SOURCE, name) for name in own], fabric.arch)
    fabric.barrier()


def prepared(fabric, work, options):
    layer = Layer.build(work, fabric.rank, str(fabric.device))
    mok = system_class("mok", "cuda")()
    tokens = max(MAX_TOKENS, layer.max_tokens)
    mok.prepare(Setup(work, options, fabric.rank, tokens, layer.w13, layer.w2, fabric))
    return mok, layer, (layer.x, layer.topk_idx, layer.topk_weights)


def check_all(fabric):
    results = []
    wanted = list(cases(fabric.ranks))
    build_kernels(fabric, wanted)
    for work, options in wanted:
        mok, layer, here = prepared(fabric, work, options)
        first = mok.run(*here).clone()
        mok.check()
        # What earlier passes left behind a tile's last row must not round that row another way.
        for ring in (mok.workspace._x_ring, mok.workspace._hidden_ring):
            ring.fill_(float("nan"))
        mok.run(*here).fill_(float("nan"))
        again = mok.run(*here)
        mok.check()
        sums = reference.error_sums(first, layer.truth)
        parts = fabric.gather((sums, torch.equal(first, again)))
        accuracy = reference.judge([part for part, _ in parts], work.dtype)
        same = all(repeat for _, repeat in parts)
        name = f"{work.model.name} t{work.tokens_per_rank} {work.routing.label}"
        mok.close()
        results.append((name, accuracy.ok, accuracy.rel_error, same))
    return results


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_mok_matches_the_oracle(ranks):
    answers = run_ranks(ranks, check_all, timeout_s=240)
    assert all(isinstance(answer, list) for answer in answers), answers
    bad = [row for row in answers[0] if not (row[1] and row[3])]
    print(f"ranks {ranks}: {len(answers[0])} workloads, worst {max(r[2] for r in answers[0]):.4f}")
    assert not bad


def variants(fabric):
    """The smallest legal rings and others, one and four pull warps."""
    least = least_hidden_ring_tiles(SMALL, 2, fabric.num_sms)
    small = {"tile_rows": 32, "group_tiles": 2}
    rings = [{"ring_tiles": 2, "hidden_ring_tiles": least}, {"ring_tiles": 5}, {}]
    return [MokOptions(**small, **ring, pull_warps=warps) for ring in rings for warps in (1, 4)] + [
        MokOptions(tile_rows=32, group_tiles=8)
    ]


def repeat_over_variants(fabric):
    work = workload(SMALL, fabric.ranks, 300, {"uneven": 1.0})
    options = variants(fabric)
    build_kernels(fabric, [(work, each) for each in options])
    expected = None
    same = []
    for each in options:
        mok, _, here = prepared(fabric, work, each)
        for _ in range(REPEATS):
            y = mok.run(*here).clone()
            mok.check()
            expected = y if expected is None else expected
            same.append(torch.equal(y, expected))
        mok.close()
    return same


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_bits_depend_on_neither_rings_nor_pull_warps(ranks):
    answers = run_ranks(ranks, repeat_over_variants)
    assert all(isinstance(answer, list) and all(answer) for answer in answers), answers


def replay_with_other_inputs(fabric):
    work = workload(MANY, fabric.ranks, 300, {})
    mok, _, here = prepared(fabric, work, TALL)
    first = mok.run(*here).clone()
    mok.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = mok.run(*here)
    other = Layer.build(replace(work, seed=1), fabric.rank, str(fabric.device))
    there = (other.x, other.topk_idx, other.topk_weights)
    second = mok.run(*there).clone()
    mok.check()
    same = []
    for inputs, expected in ((None, first), (there, second)):
        for tensor, value in zip(here, inputs or here, strict=True):
            tensor.copy_(value)
        for _ in range(3):
            y.fill_(float("nan"))
            graph.replay()
            mok.check()
            same.append(torch.equal(y, expected))
    return [*same, not torch.equal(first, second)]


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_graph_gives_the_same_bits_and_follows_its_inputs(ranks):
    answers = run_ranks(ranks, replay_with_other_inputs)
    assert all(isinstance(answer, list) and all(answer) for answer in answers), answers


def without_tokens_of_rank_one(fabric):
    """What the other ranks get does not depend on rank 1's tokens."""
    mok, _, here = prepared(fabric, workload(MANY, fabric.ranks, 300, {}), TALL)
    full = mok.run(*here).clone()
    mok.check()
    fabric.barrier()
    if fabric.rank == 1:
        here = tuple(tensor[:0] for tensor in here)
    y = mok.run(*here).clone()
    mok.check()
    return y.shape[0] == 0 if fabric.rank == 1 else torch.equal(y, full)


def test_a_rank_may_have_no_tokens():
    assert run_ranks(4, without_tokens_of_rank_one) == [True] * 4


def zero_copy_passes(fabric):
    """Staged once and then not again, until x is another tensor or has changed.

    Whether every pass gave the usual bits, and which staged; None if the rank has no tokens.
    """
    work = workload(SMALL, fabric.ranks, 300, {"uneven": 1.0})
    (mok, _, here), (usual, _, _) = (
        prepared(fabric, work, TALL.model_copy(update={"zero_copy": zero}))
        for zero in (True, False)
    )
    x, topk_idx, topk_weights = here
    same, staged = [], []
    for inputs in (x, x, x.clone(), x, x):
        expected = usual.run(inputs, topk_idx, topk_weights).clone()
        y = mok.run(inputs, topk_idx, topk_weights)
        staged.append(mok.workspace._arguments.x != 0)
        same.append(torch.equal(y, expected))
    x.mul_(-1)
    expected = usual.run(*here).clone()
    same += [torch.equal(mok.run(*here), expected) for _ in range(2)]
    mok.check()
    return all(same), staged if len(x) > 0 else None


@pytest.mark.parametrize("ranks", [1, 4])
def test_zero_copy_stages_an_x_once(ranks):
    answers = run_ranks(ranks, zero_copy_passes)
    assert answers[-1] == (True, [True, False, True, True, False])
    assert all(answer in (answers[-1], (True, None)) for answer in answers), answers


def routings_back_to_back(fabric):
    """Passes with other routings and token counts, queued without a wait in between."""
    specs = [{}, {"hot_expert": 1.0}, {"masked": 1.0}, {"uneven": 1.0}]
    works = [workload(MANY, fabric.ranks, 300, spec) for spec in specs]
    mok, _, _ = prepared(fabric, works[0], TALL)
    layers = [Layer.build(work, fabric.rank, str(fabric.device)) for work in works]
    inputs = [(layer.x, layer.topk_idx, layer.topk_weights) for layer in layers]
    alone = []
    for here in inputs:
        alone.append(mok.run(*here).clone())
        mok.check()
    fabric.barrier()
    together = [mok.run(*here).clone() for here in inputs * 5]
    mok.check()
    return [torch.equal(y, alone[i % len(alone)]) for i, y in enumerate(together)]


@pytest.mark.parametrize("ranks", [1, 4])
def test_routings_may_follow_one_another(ranks):
    answers = run_ranks(ranks, routings_back_to_back)
    assert all(isinstance(answer, list) and all(answer) for answer in answers), answers


@dataclass(frozen=True)
class LoseRankOne:
    """Rank 1 stays away from two passes, or comes to its first one ``late_s`` too late."""

    late_s: float | None

    def __call__(self, fabric):
        mok, _, here = prepared(fabric, workload(MANY, fabric.ranks, 37, {}), TALL)
        first = mok.run(*here).clone()
        mok.check()
        record = None
        passes = 2
        if fabric.rank == 1:
            time.sleep(self.late_s or 0.0)
            passes = 0 if self.late_s is None else 1
        for _ in range(passes):
            mok.run(*here)
            try:
                mok.check()
            except FaultError as error:
                record = error.record
        mok.workspace.reset()
        again = mok.run(*here).clone()
        mok.check()
        return record, torch.equal(first, again)


@pytest.mark.parametrize("late_s", [None, 3.0])
def test_a_rank_that_does_not_come_is_named_and_the_next_pass_is_right(late_s):
    answers = run_ranks(4, LoseRankOne(late_s), wait_bound_s=1.0)
    assert all(isinstance(answer, tuple) for answer in answers), answers
    assert all(same for _, same in answers)
    for rank, (record, _) in enumerate(answers):
        if rank == 1:
            assert (record is None) == (late_s is None)
            continue
        assert (record["rank"], record["late_rank"], record["site"]) == (rank, 1, "entry")
        assert 0.9 < record["waited_s"] < 5
