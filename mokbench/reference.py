"""Inputs, weights, and the FP32 truth every system's output is held against.

All of it is generated from the workload's seed, per rank and per expert, so that any process makes
the same bytes without communication; ``streams`` says where, on the CPU or on a GPU. The truth uses
no code of any system.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mokbench import tolerances
from mokbench.routing import token_counts
from mokbench.streams import HOST, Streams
from mokbench.workload import Dtype

if TYPE_CHECKING:
    from mokbench.routing import Routing
    from mokbench.workload import Workload

TORCH_DTYPES = {Dtype.BF16: torch.bfloat16, Dtype.FP32: torch.float32}

# One wrong token of 65 536 moves the whole output's error by 0.4 % only, so tokens have their own.
_TOKEN_TOLERANCE = 4.0

# Rows of one expert that the truth computes at a time on a GPU: at most 1.2 GB for hidden 7168.
_CHUNK_ROWS = 8192


@dataclass(frozen=True)
class Inputs:
    """Tokens of one rank: x [T_r, hidden] in the workload's dtype."""

    x: Tensor


@dataclass(frozen=True)
class Weights:
    """Weights of n experts: w13 [n, 2 * I, H] (gate rows, then up rows), w2 [n, H, I]."""

    w13: Tensor
    w2: Tensor


@dataclass(frozen=True)
class Truth:
    """What one rank's output should be, float32 [T_r, H], and the sum of |terms| behind it.

    y[t, h] = sum over k and i of weight[t, k] * hidden[k, i] * w2[k, h, i]; ``terms`` sums the
    absolute values, so error / terms is what rounding can be held responsible for.
    """

    y: Tensor
    terms: Tensor


@dataclass(frozen=True)
class ErrorSums:
    """One rank's part of the comparison; ``judge`` joins all ranks' parts.

    ``max_token_error`` is the largest ||y_t - ref_t|| / ||ref_t|| of its tokens. NaNs are counted
    and left out of the sums.
    """

    squared_error: float
    squared_reference: float
    max_token_error: float
    max_error_over_terms: float
    nan_count: int


@dataclass(frozen=True)
class Accuracy:
    """Verdict over all ranks: ``ok`` when every figure is within ``tolerance`` and nothing is NaN.

    rel_error = ||y - ref|| / ||ref|| over all tokens of all ranks. A reference of zeros allows
    zeros only (rel_error 0, else infinite). A single token may reach 4 times the tolerance.
    """

    rel_error: float
    max_token_error: float
    max_error_over_terms: float
    nan_count: int
    tolerance: float
    ok: bool


def make_inputs(workload: "Workload", rank: int, streams: Streams = HOST) -> Inputs:
    """Tokens of one source rank, standard normal. On the CPU more of them only append to x."""
    shape = (token_counts(workload)[rank], workload.model.hidden)
    x = streams.open("x", workload.seed, rank).normal(shape)
    return Inputs(x.to(TORCH_DTYPES[workload.dtype]))


def make_weights(workload: "Workload", experts: range, streams: Streams = HOST) -> Weights:
    """Weights of some experts, uniform with variance 1 / fan_in, so that outputs are O(1).

    Expert e has the same bytes whatever range it is asked in, whoever asks.
    """
    hidden, intermediate = workload.model.hidden, workload.model.intermediate
    dtype, device = TORCH_DTYPES[workload.dtype], streams.device
    w13 = torch.empty(len(experts), 2 * intermediate, hidden, dtype=dtype, device=device)
    w2 = torch.empty(len(experts), hidden, intermediate, dtype=dtype, device=device)
    for i, expert in enumerate(experts):
        stream = streams.open("w", workload.seed, expert)
        w13[i] = stream.uniform(w13.shape[1:], hidden)
        w2[i] = stream.uniform(w2.shape[1:], intermediate)
    return Weights(w13, w2)


def reference_truth(
    workload: "Workload", routing: "Routing", rank: int, streams: Streams = HOST
) -> Truth:
    """Output of one rank's tokens in FP32 with no rounding in between, expert by expert.

    Inputs and weights are those of the workload's dtype. Only experts that the rank's tokens chose
    are generated, one at a time.
    """
    x = make_inputs(workload, rank, streams).x.float()
    chosen = sorted({e for e in routing.topk_idx[rank].flatten().tolist() if e >= 0})
    topk_idx = torch.from_numpy(routing.topk_idx[rank].copy()).to(x.device)
    topk_weights = torch.from_numpy(routing.topk_weights[rank].copy()).to(x.device)
    y, terms = torch.zeros_like(x), torch.zeros_like(x)
    with _full_fp32():
        for expert in chosen:
            weights = make_weights(workload, range(expert, expert + 1), streams)
            w13, w2 = weights.w13[0].float(), weights.w2[0].float()
            w2_abs = w2.abs()
            for tokens, k in _routes_to(expert, topk_idx):
                gate, up = (x[tokens] @ w13.T).chunk(2, dim=1)
                hidden = torch.nn.functional.silu(gate) * up * topk_weights[tokens, k, None]
                y[tokens] += hidden @ w2.T
                terms[tokens] += hidden.abs() @ w2_abs.T
    return Truth(y, terms)


def _routes_to(expert: int, topk_idx: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(tokens, k) of the routes to an expert, no token twice; in chunks on a GPU."""
    tokens, k = torch.nonzero(topk_idx == expert, as_tuple=True)
    chunk_rows = _CHUNK_ROWS if topk_idx.is_cuda else max(1, len(tokens))
    yield from zip(torch.split(tokens, chunk_rows), torch.split(k, chunk_rows), strict=True)


@contextmanager
def _full_fp32() -> Iterator[None]:
    """FP32 matmuls without TF32, which would be no truth for anything."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def reference_output(workload: "Workload", routing: "Routing", rank: int) -> Tensor:
    """``reference_truth``'s y alone: float32 [T_r, H]."""
    return reference_truth(workload, routing, rank).y


def error_sums(y: Tensor, truth: Truth) -> ErrorSums:
    """Compare one rank's output, [T_r, H], any float dtype, where the truth is.

    ValueError for another shape.
    """
    if y.shape != truth.y.shape:
        raise ValueError(f"output is {tuple(y.shape)}, the reference {tuple(truth.y.shape)}")
    if y.numel() == 0:
        return ErrorSums(0.0, 0.0, 0.0, 0.0, 0)
    error = (y.to(truth.y.device).float() - truth.y).abs()
    nan_count = int(error.isnan().sum())
    error = error.nan_to_num_(nan=0.0, posinf=math.inf)
    by_token = torch.linalg.vector_norm(error, dim=1, dtype=torch.float64)
    expected = torch.linalg.vector_norm(truth.y, dim=1, dtype=torch.float64)
    return ErrorSums(
        squared_error=float(by_token.square().sum()),
        squared_reference=float(expected.square().sum()),
        max_token_error=float(_over(by_token, expected).max()),
        max_error_over_terms=float(_over(error, truth.terms).max()),
        nan_count=nan_count,
    )


def judge(parts: Sequence[ErrorSums], dtype: Dtype, dispatch_dtype: str | None = None) -> Accuracy:
    """Verdict from the parts of all ranks; rows may travel in less than ``dtype``."""
    error = math.sqrt(sum(part.squared_error for part in parts))
    expected = math.sqrt(sum(part.squared_reference for part in parts))
    rel_error = error / expected if expected else (0.0 if error == 0 else math.inf)
    max_token_error = max(part.max_token_error for part in parts)
    nan_count = sum(part.nan_count for part in parts)
    tolerance = tolerances.tolerance(dtype, dispatch_dtype)
    return Accuracy(
        rel_error=rel_error,
        max_token_error=max_token_error,
        max_error_over_terms=max(part.max_error_over_terms for part in parts),
        nan_count=nan_count,
        tolerance=tolerance,
        ok=nan_count == 0
        and rel_error <= tolerance
        and max_token_error <= _TOKEN_TOLERANCE * tolerance,
    )


def compare(y: Tensor, truth: Truth, dtype: Dtype) -> Accuracy:
    """Verdict on one rank's output alone."""
    return judge([error_sums(y, truth)], dtype)


def _over(error: Tensor, size: Tensor) -> Tensor:
    """Divide; where size is 0, no error gives 0 and any error infinity."""
    return torch.where(error == 0, torch.zeros_like(error), error / size)
