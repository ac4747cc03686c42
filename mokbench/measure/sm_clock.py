"""The SM clock from readings of clock64 and the time around a pass.

clock64 counts from another zero on every SM, so only one SM's own two readings make a rate. Under
MPS the number that an SM shows (%smid, by the PTX ISA for that very reason no identity) can be
another one's in the second reading. All SMs tick alike, though: whatever their numbers, a reading
of one SM and a later one of the same SM are apart by the one rate that most pairs have in common.
"""

import math

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

# Rates of one clock differ by the steps of globaltimer, 32 ns on an H200.
_SAME = 0.005
# Of the SMs that two readings caught: where fewer agree, numbers have changed.
_MOST_SMS = 0.8
# Of the readings: where fewer pairs agree, no rate stands out.
_LEAST_PAIRS = 0.25
_ABOVE_RATED = 1.02


def start_and_clock(
    before: Tensor, after: Tensor, epoch_ns: int, most_mhz: float = math.inf
) -> tuple[float, float]:
    """Start in us since ``epoch_ns`` and the SM clock in MHz; NaN where it was not caught.

    Readings are int64 [SMs, (cycles, ns)], zeros for an SM that was not caught; ``most_mhz`` is the
    fastest clock that the GPU has. Differences are int64 too: globaltimer counts from 1970, where
    float64 has steps of 256 ns.
    """
    first, second = before.numpy(), after.numpy()
    caught = first[:, 1] > 0
    start_us = (int(first[caught, 1].min()) - epoch_ns) / 1e3 if caught.any() else math.nan
    return start_us, _clock_mhz(first, second, most_mhz * _ABOVE_RATED)


def _clock_mhz(before: NDArray[np.int64], after: NDArray[np.int64], most_mhz: float) -> float:
    both = (before[:, 1] > 0) & (after[:, 1] > before[:, 1])
    own = _rates_mhz(before[both], after[both])
    if len(own):
        middle = float(np.median(own))
        agreeing = np.abs(own - middle) <= _SAME * abs(middle)
        if 0 < middle <= most_mhz and agreeing.mean() >= _MOST_SMS:
            return middle
    before, after = before[before[:, 1] > 0], after[after[:, 1] > 0]
    rates = _rates_mhz(before[:, None], after[None, :]).ravel()
    rates = np.sort(rates[(rates > 0) & (rates <= most_mhz)])
    if not len(rates):
        return math.nan
    ends = np.searchsorted(rates, rates * (1 + _SAME), side="right")
    counts = ends - np.arange(len(rates))
    first = int(counts.argmax())
    if counts[first] < max(2, _LEAST_PAIRS * min(len(before), len(after))):
        return math.nan
    return float(np.median(rates[first : ends[first]]))


def _rates_mhz(before: NDArray[np.int64], after: NDArray[np.int64]) -> NDArray[np.float64]:
    """Of readings [..., (cycles, ns)] that broadcast; NaN where no time passed."""
    apart = after - before
    cycles, ns = apart[..., 0].astype(np.float64), apart[..., 1].astype(np.float64)
    rates: NDArray[np.float64] = np.divide(
        cycles * 1e3, ns, out=np.full(ns.shape, np.nan), where=ns > 0
    )
    return rates
