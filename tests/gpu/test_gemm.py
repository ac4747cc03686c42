"""The grouped GEMM against FP32 on awkward segments; nothing is written that should not be."""

import pytest
import torch

from mokbench.gemm_config import TILE_ROWS, GemmConfig, most_stages

E128 = [500 + 7 * (i % 5) for i in range(128)]
SEGMENTS = [
    ([128, 0, 384, 256], 512, 192),
    ([1, 0, 31, 33, 0, 64, 65, 97, 255, 257, 0], 320, 128),
    ([0, 0, 5], 64, 2880),
    ([300], 2880, 256),
    ([0, 700, 0, 3], 1408, 448),
    ([2300, 0, 17, 130], 512, 768),
    ([7] * 512, 128, 128),
    ([0, 0], 128, 128),
]


def configs():
    found = []
    for tile_rows in TILE_ROWS:
        for swiglu in (False, True):
            for row_weights in (False, True):
                stages = most_stages(tile_rows)
                found.append(GemmConfig(tile_rows, stages, 8, swiglu, row_weights))
    return found + [
        GemmConfig(swiglu=swiglu, row_weights=row_weights, split_k=True)
        for swiglu in (False, True)
        for row_weights in (False, True)
    ]


@pytest.fixture(scope="module", autouse=True)
def compiled():
    from mokbench import jit
    from mokbench.gemm_config import SOURCE

    jit.build_all([(SOURCE, config.expression) for config in configs()], "sm_90a")


def make(sizes, n, k, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    options = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    rows = sum(sizes) + 50  # behind the last end
    x = torch.randn(rows, k, **options)
    x[sum(sizes) :] = float("nan")
    weights = torch.randn(len(sizes), n, k, **options).mul_(2 * k**-0.5)
    ends = torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32)
    row_weights = torch.rand(rows, device="cuda", generator=generator)
    return x, weights, ends, row_weights


def truth(x, weights, ends, row_weights, config):
    parts, begin = [], 0
    for expert, end in enumerate(ends.tolist()):
        y = x[begin:end].float() @ weights[expert].float().T
        if config.swiglu:
            gate, up = y.chunk(2, dim=1)
            y = torch.nn.functional.silu(gate) * up
        parts.append(y * row_weights[begin:end, None] if config.row_weights else y)
        begin = end
    return torch.cat(parts)


def run(config, x, weights, ends, row_weights, num_sms):
    from mokbench.grouped_gemm import GroupedGemm, pack_gate_up

    n = weights.shape[1]
    packed = pack_gate_up(weights) if config.swiglu else weights
    gemm = GroupedGemm(packed, config, num_sms, "sm_90a")
    columns = n // 2 if config.swiglu else n
    out = torch.full((x.shape[0], columns), -7.0, device="cuda", dtype=torch.bfloat16)
    return gemm, gemm(x, ends, out, row_weights if config.row_weights else None)


def check(config, sizes, n, k, num_sms, seed=1):
    """Relative error over all rows, and whether the rows behind the last end are untouched."""
    x, weights, ends, row_weights = make(sizes, n, k, seed)
    _, out = run(config, x, weights, ends, row_weights, num_sms)
    torch.cuda.synchronize()
    real = sum(sizes)
    untouched = bool((out[real:] == -7.0).all())
    if real == 0:
        return 0.0, untouched
    expected = truth(x, weights, ends, row_weights, config)
    error = ((out[:real].float() - expected).norm() / expected.norm()).item()
    # No row may hide behind the others: the worst one as well.
    norms = expected.norm(dim=1).clamp(min=1e-3)
    worst = ((out[:real].float() - expected).norm(dim=1) / norms).max().item()
    return (error if worst < 0.05 else worst), untouched


def num_sms_of_gpu():
    return torch.cuda.get_device_properties(0).multi_processor_count


def test_silu_is_right_at_every_gate():
    gates = torch.linspace(-100, 100, 801, device="cuda").bfloat16()
    ups = torch.where(torch.arange(801, device="cuda") % 2 == 0, 1.0, -3.0).bfloat16()
    x = torch.zeros(801, 128, device="cuda", dtype=torch.bfloat16)
    x[:, 0], x[:, 1] = gates, ups
    weights = torch.zeros(1, 128, 128, device="cuda", dtype=torch.bfloat16)
    weights[0, :64, 0] = weights[0, 64:, 1] = 1  # every gate row picks x[0], every up row x[1]
    ends = torch.tensor([801], device="cuda", dtype=torch.int32)
    _, out = run(GemmConfig(swiglu=True), x, weights, ends, None, num_sms_of_gpu())
    gates, ups = gates.double(), ups.double()
    expected = (gates * gates.sigmoid() * ups)[:, None]
    allowed = (gates * ups).abs()[:, None] * 2.0**-12 + expected.abs() * 2.0**-8 + 1e-30
    assert ((out.double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("behind", [0.0, 1.0, 30.0, float("nan")])
def test_what_lies_behind_an_experts_last_row_does_not_round_it(behind):
    for config in (config for config in configs() if config.swiglu and not config.row_weights):
        x, weights, ends, row_weights = make([301, 77, 301], 512, 192, seed=3)
        _, expected = run(config, x, weights, ends, row_weights, num_sms_of_gpu())
        x[301:] *= behind
        x[679:] = behind
        _, out = run(config, x, weights, ends, row_weights, num_sms_of_gpu())
        assert torch.equal(out[:301], expected[:301]), config


@pytest.mark.parametrize(
    "config", configs(), ids=lambda c: f"{c.tile_rows}{c.swiglu:d}{c.row_weights:d}"
)
def test_every_config_matches_fp32(config):
    for sizes, n, k in SEGMENTS:
        if config.swiglu and n % 128:
            continue
        for num_sms in (num_sms_of_gpu(), 5):
            error, untouched = check(config, sizes, n, k, num_sms)
            assert error < 5e-3, (sizes, n, k, num_sms, error)
            assert untouched, (sizes, n, k, num_sms)


def test_the_published_shapes_match_fp32():
    for sizes, n, k in [(E128, 1536, 2048), (E128, 2048, 768), ([2000, 1, 900, 64], 4096, 7168)]:
        error, untouched = check(GemmConfig(), sizes, n, k, num_sms_of_gpu())
        assert error < 5e-3
        assert untouched


def test_bits_depend_on_neither_tiles_nor_sms():
    x, weights, ends, row_weights = make([700, 0, 33, 256], 512, 768, 3)
    outputs = [
        run(GemmConfig(tile_rows, 3), x, weights, ends, row_weights, num_sms)[1][:989]
        for tile_rows, num_sms in [(128, 132), (128, 7), (64, 132), (64, 20), (32, 132)]
    ]
    torch.cuda.synchronize()
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


@pytest.mark.parametrize("swiglu", [False, True])
def test_tiles_whose_k_is_shared_out(swiglu):
    config = GemmConfig(swiglu=swiglu, split_k=True)
    sizes, n, k = [700, 0, 300, 16], 384 if swiglu else 320, 6144
    for num_sms in (num_sms_of_gpu(), 5):
        error, untouched = check(config, sizes, n, k, num_sms)
        assert error < 5e-3, num_sms
        assert untouched
    inputs = make(sizes, n, k, 5)
    gemm, first = run(config, *inputs, num_sms_of_gpu())
    first = first[: sum(sizes)].clone()
    columns = n // 2 if swiglu else n
    again = torch.empty(inputs[0].shape[0], columns, device="cuda", dtype=torch.bfloat16)
    for _ in range(20):  # whoever comes first: sums are added in order
        gemm(inputs[0], inputs[2], again)
        assert torch.equal(first, again[: sum(sizes)])


def test_a_graph_follows_its_inputs_and_calls_follow_each_other():
    x, weights, ends, row_weights = make([90, 400, 0, 30], 512, 768, 4)
    gemm, out = run(GemmConfig(), x, weights, ends, row_weights, num_sms_of_gpu())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemm(x, ends, out)
    for sizes in ([90, 400, 0, 30], [0, 0, 520, 0], [130, 130, 130, 130]):
        ends.copy_(torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32))
        out.fill_(-7.0)
        graph.replay()
        expected = truth(x, weights, ends, row_weights, GemmConfig())
        error = ((out[:520].float() - expected).norm() / expected.norm()).item()
        assert error < 5e-3, sizes
