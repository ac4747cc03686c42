"""The kernels around grouped GEMMs on expanded rows, against torch; rows behind the last keep."""

from types import SimpleNamespace

import pytest
import torch

from mokbench.systems.expanded_rows import ExpandedRows

SIZES = [(256, 128), (2048, 768), (7168, 2048)]
ROWS, LIVE = 301, 290


@pytest.fixture(params=SIZES, ids=lambda sizes: f"h{sizes[0]}")
def rows(request):
    hidden, intermediate = request.param
    torch.zeros(1, device="cuda")  # makes the context that the kernels are loaded into
    fabric = SimpleNamespace(num_sms=33, arch="sm_90a")
    return hidden, intermediate, ExpandedRows(hidden, intermediate, fabric, fp8=True)


def random(*shape):
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(*shape, device="cuda", generator=generator).bfloat16()


def ends():
    return torch.tensor([17, 17, LIVE], dtype=torch.int32, device="cuda")


def test_swiglu_is_weighted_and_bounded(rows):
    _, intermediate, kernels = rows
    gate_up, out = random(ROWS, 2 * intermediate), random(ROWS, intermediate)
    weights = torch.rand(ROWS, device="cuda")
    before = out.clone()
    kernels.swiglu(gate_up, weights, ends(), out)
    gate, up = gate_up.float().chunk(2, dim=1)
    wanted = torch.nn.functional.silu(gate) * up * weights[:, None]
    torch.testing.assert_close(out[:LIVE].float(), wanted[:LIVE], rtol=8e-3, atol=1e-5)
    assert torch.equal(out[LIVE:], before[LIVE:])


def test_quantised_rows_have_torchs_values_and_scales(rows):
    hidden, _, kernels = rows
    x = random(ROWS, hidden)
    x[3] = 0
    values, scales = kernels.quantize(x)
    blocks = x.float().view(ROWS, -1, 128)
    wanted = blocks.abs().amax(dim=2).clamp(min=1e-4) / 448
    torch.testing.assert_close(scales, wanted, rtol=1e-6, atol=0)
    # By the inverse, as DeepEP's users do: a quotient would round other ties the other way.
    expected = (blocks * (1 / scales)[..., None]).to(torch.float8_e4m3fn).view(ROWS, hidden)
    assert torch.equal(values.float(), expected.float())


def test_rows_return_from_fp8_within_its_precision(rows):
    hidden, _, kernels = rows
    x, out = random(ROWS, hidden), random(ROWS, hidden)
    before = out.clone()
    values, scales = kernels.quantize(x)
    kernels.dequantize(values, scales, ends(), out)
    wanted = values.float().view(ROWS, -1, 128) * scales[..., None]
    wanted = wanted.view(ROWS, hidden).bfloat16()
    assert torch.equal(out[:LIVE], wanted[:LIVE])
    assert torch.equal(out[LIVE:], before[LIVE:])
    error = (out[:LIVE].float() - x[:LIVE].float()).norm() / x[:LIVE].float().norm()
    assert 0.02 < error < 0.03
    kernels.dequantize(values, scales, None, out)
    assert torch.equal(out, wanted)


def test_no_rows_are_no_launch(rows):
    hidden, _, kernels = rows
    values, scales = kernels.quantize(random(0, hidden))
    assert (values.shape, scales.shape) == ((0, hidden), (0, hidden // 128))
