import math

import numpy as np
import pytest

from mokbench import metrics
from mokbench.metrics import Rates, WireFormat
from mokbench.routing import Routing, RoutingSpec, generate
from mokbench.workload import Dtype, Model, Workload


def workload(
    routing: object = "balanced",
    *,
    model: Model | None = None,
    ranks: int = 2,
    tokens: int = 3,
    dtype: Dtype = Dtype.BF16,
    seed: int = 0,
) -> Workload:
    return Workload(
        model=model or Model("tiny", hidden=8, intermediate=4, experts=4, top_k=2),
        ranks=ranks,
        tokens_per_rank=tokens,
        dtype=dtype,
        routing=RoutingSpec.model_validate(routing),
        seed=seed,
    )


def routing_of(*ranks: list[list[int]]) -> Routing:
    idx = tuple(np.array(rows, np.int32).reshape(-1, 2) for rows in ranks)
    return Routing(idx, tuple(np.zeros(i.shape, np.float32) for i in idx))


# Experts 0 and 1 live on rank 0, 2 and 3 on rank 1. Routes per expert: 2, 2, 3, 2.
TINY = routing_of([[0, 2], [2, 3], [1, -1]], [[0, 1], [3, 2]])


def test_counts_by_hand() -> None:
    assert metrics.expert_counts(TINY, 4).tolist() == [2, 2, 3, 2]
    assert metrics.route_matrix(TINY, 4, 2).tolist() == [[2, 3], [2, 2]]
    assert metrics.token_matrix(TINY, 4, 2).tolist() == [[2, 2], [1, 1]]


def test_imbalance_by_hand() -> None:
    found = metrics.imbalance(TINY, 4, 2)
    assert found.expert_max_over_mean == pytest.approx(3 / 2.25)
    assert found.rank_max_over_mean == pytest.approx(5 / 4.5)
    assert found.pair_max_over_mean == pytest.approx(3 / 2.25)
    assert found.cv == pytest.approx(math.sqrt((3 * 0.25**2 + 0.75**2) / 4) / 2.25)
    assert found.gini == pytest.approx((-3 * 2 - 1 * 2 + 1 * 2 + 3 * 3) / (4 * 9))
    assert found.empty_experts == 0


def test_imbalance_at_its_ends() -> None:
    even = metrics.imbalance(routing_of([[0, 1], [2, 3]], [[0, 2], [3, 1]]), 4, 2)
    assert even == metrics.Imbalance(1.0, 1.0, 1.0, 0.0, 0.0, 0.0)
    one = metrics.imbalance(routing_of([[2, -1]] * 5, []), 4, 2)
    assert one.cv == pytest.approx(math.sqrt(3))
    assert one == metrics.Imbalance(4.0, 2.0, 4.0, one.cv, 0.75, 0.75)


def test_imbalance_of_nothing_is_none_not_one() -> None:
    nothing = metrics.imbalance(routing_of([[-1, -1]], []), 4, 2)
    assert nothing == metrics.Imbalance(None, None, None, None, None, 1.0)


def test_traffic_by_hand() -> None:
    # Off-rank: 3 + 2 routes, 2 + 1 (token, rank) pairs; a bf16 row of 8 is 16 bytes.
    per_route = metrics.traffic(TINY, workload(), "per_route")
    assert per_route == metrics.Traffic(3 * 16, 5 * 16, 3 * 16, 5 * 16)
    assert (per_route.useful_bytes, per_route.wire_bytes) == (96, 160)
    assert per_route.redundancy == pytest.approx(5 / 3)
    per_rank = metrics.traffic(TINY, workload(dtype=Dtype.FP32), "per_rank")
    assert per_rank == metrics.Traffic(3 * 32, 3 * 32, 3 * 32, 3 * 32)
    assert per_rank.redundancy == 1


def test_traffic_with_a_protocol_per_direction() -> None:
    mixed = metrics.traffic(TINY, workload(), "per_rank", combine_protocol="per_route")
    assert mixed == metrics.Traffic(48, 48, 48, 80)


def test_traffic_without_peers() -> None:
    alone = metrics.traffic(routing_of([[0, 2]]), workload(ranks=1), None)
    assert alone == metrics.Traffic(0, 0, 0, 0)
    assert alone.redundancy is None


def test_traffic_of_a_quantised_dispatch() -> None:
    # 8 elements with one 4-byte scale per 3 elements: 8 + 3 * 4; combine stays bf16.
    found = metrics.traffic(TINY, workload(), "per_rank", dispatch=WireFormat(1, 4, 3))
    assert found == metrics.Traffic(3 * 20, 3 * 20, 3 * 16, 3 * 16)
    assert WireFormat(1, scale_bytes=4, scale_block=128).row_bytes(7168) == 7168 + 56 * 4
    assert WireFormat(0.5, scale_bytes=1, scale_block=32).row_bytes(2880) == 1440 + 90


@pytest.mark.parametrize("ranks, redundancy", [(8, 1.52), (4, 2.22), (2, 4.02)])
def test_redundancy_per_route_of_top_8(ranks: int, redundancy: float) -> None:
    # Even routing: k (1 - 1/N) routes leave a rank, (N - 1) (1 - (1 - 1/N)^k) pairs do.
    # Experts are drawn without replacement, hence the tolerance.
    work = workload(model=Model("m", 64, 64, 256, 8), ranks=ranks, tokens=512)
    found = metrics.traffic(generate(work), work, "per_route").redundancy
    assert found == pytest.approx(redundancy, rel=0.03)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spec", ["extreme", {"masked": 0.4, "uneven": 1.0}, {"hot_rank": 2.0}])
def test_counts_against_loops(spec: object, seed: int) -> None:
    work = workload(spec, model=Model("m", 8, 4, 12, 3), ranks=4, tokens=20, seed=seed)
    routing = generate(work)
    counts = [0] * 12
    routes = [[0] * 4 for _ in range(4)]
    pairs = set()
    for source, idx in enumerate(routing.topk_idx):
        for token, row in enumerate(idx.tolist()):
            for expert in row:
                if expert >= 0:
                    counts[expert] += 1
                    routes[source][expert // 3] += 1
                    pairs.add((source, token, expert // 3))
    tokens = [[sum((s, t, d) in pairs for t in range(20)) for d in range(4)] for s in range(4)]
    assert metrics.expert_counts(routing, 12).tolist() == counts
    assert metrics.route_matrix(routing, 12, 4).tolist() == routes
    assert metrics.token_matrix(routing, 12, 4).tolist() == tokens
    # Gini as half the mean absolute difference over the mean.
    apart = sum(abs(a - b) for a in counts for b in counts)
    found = metrics.imbalance(routing, 12, 4)
    assert found.gini == pytest.approx(apart / (2 * 12 * sum(counts)))
    mean = sum(counts) / 12
    assert found.cv == pytest.approx(math.sqrt(sum((c - mean) ** 2 for c in counts) / 12) / mean)
    crossing = sum(routes[s][d] for s in range(4) for d in range(4) if s != d)
    assert metrics.traffic(routing, work, "per_route").dispatch_wire == crossing * 16


def test_layer_flops_by_hand() -> None:
    # 9 unmasked routes, each 2 * 8 * 8 (gate and up) + 2 * 4 * 8 (down).
    assert metrics.layer_flops(TINY, workload()) == 9 * (2 * 8 * 8 + 2 * 4 * 8)


def test_rates() -> None:
    assert metrics.tflops_per_gpu(6e12, 0.5, 4) == 3.0
    assert metrics.tokens_per_s(sum(TINY.num_tokens), 0.001) == 5000


def test_roofline_by_hand() -> None:
    # Rank 1 has 5 rows; both ranks use both experts; rank 0 has 3 tokens; 2 + 1 pairs each way.
    rates = Rates(matmul_flops=1000.0, read_bytes=100.0, peer_bytes=10.0)
    found = metrics.roofline(TINY, workload(), rates)
    assert found.compute_s == pytest.approx(5 * 6 * 8 * 4 / 1000)
    assert found.memory_s == pytest.approx((2 * 3 * 8 * 4 * 2 + 3 * 2 * 8 * 2) / 100)
    assert found.link_s == pytest.approx((2 + 1) * 16 / 10)
    assert (found.seconds, found.bound) == (found.memory_s, "memory")


def test_ranks_that_share_a_gpu_are_summed_over_it() -> None:
    # A rank's rates are its share while both run; alone, the GPU does the work of both.
    rates = Rates(matmul_flops=1000.0, read_bytes=100.0, peer_bytes=None)
    found = metrics.roofline(TINY, workload(), rates, ranks_per_gpu=2)
    assert found.compute_s == pytest.approx(TINY.num_routes * 6 * 8 * 4 / 2 / 1000)
    tokens = sum(TINY.num_tokens)
    assert found.memory_s == pytest.approx((4 * 3 * 8 * 4 * 2 + tokens * 2 * 8 * 2) / 2 / 100)


def test_roofline_counts_only_experts_with_rows() -> None:
    rates = Rates(matmul_flops=None, read_bytes=1.0, peer_bytes=None)
    found = metrics.roofline(routing_of([[0, -1]], []), workload(), rates)
    assert found.memory_s == 3 * 8 * 4 * 2 + 2 * 8 * 2
    assert (found.compute_s, found.link_s, found.bound) == (None, None, "memory")


def test_roofline_link_takes_the_busiest_rank() -> None:
    # Every token of ranks 1 and 2 has its expert on rank 0: 4 rows in, 4 sums out.
    model = Model("m", 8, 4, 3, 2)
    routing = routing_of([], [[0, -1]] * 2, [[0, -1]] * 2)
    rates = Rates(matmul_flops=None, read_bytes=None, peer_bytes=1.0)
    found = metrics.roofline(routing, workload(model=model, ranks=3), rates)
    assert found.link_s == 4 * 16
    assert found.bound == "link"


def test_roofline_without_rates_says_nothing() -> None:
    found = metrics.roofline(TINY, workload(), Rates(None, None, None))
    assert (found.seconds, found.bound) == (None, None)


def test_utilization_by_hand() -> None:
    # 8 ranks move 80 GB in 0.1 s: 100 GB/s a rank, of 400.
    assert metrics.utilization(80e9, 0.1, 400e9, 8, "nvlink") == pytest.approx(0.25)
    assert metrics.utilization(80e9, 0.1, 400e9, 8, "shm") == pytest.approx(0.25)


@pytest.mark.parametrize("ranks, link", [(8, "hbm"), (8, "none"), (1, "nvlink")])
def test_utilization_is_none_where_there_is_no_link(ranks: int, link: str) -> None:
    assert metrics.utilization(80e9, 0.1, 400e9, ranks, link) is None


def test_a_system_that_sends_everything_everywhere_by_hand() -> None:
    # 5 tokens of 8 * 2 bytes, each to the one other rank, and a sum back.
    useful = metrics.traffic(TINY, workload(), "per_rank")
    found = metrics.traffic_to_all(useful, workload(), num_tokens=5)
    assert (found.dispatch_wire, found.combine_wire) == (80, 80)
    assert found.useful_bytes == useful.useful_bytes == 2 * 3 * 16
    alone = metrics.traffic_to_all(useful, workload(ranks=1), num_tokens=5)
    assert alone.wire_bytes == 0
