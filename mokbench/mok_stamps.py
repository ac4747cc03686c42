"""From the stamps of a MoK kernel's CTAs to the phases of a rank's pass: docs/mok.md, Stamps."""

import numpy as np
from numpy.typing import NDArray

from mokbench.figures import PhaseName
from mokbench.kernel_phases import PhaseTimes
from mokbench.mok_config import STAMPS

# A phase is from the earliest of one stamp to the latest of another, over the CTAs.
_SPANS: dict[PhaseName, tuple[str, str]] = {
    "stage": ("begun", "staged"),
    "entry": ("staged", "entered"),
    "schedule": ("entered", "scheduled"),
    "dispatch": ("scheduled", "pulled"),
    "gemm1": ("gemm1_begun", "gemm1_ended"),
    "gemm2": ("gemm2_begun", "gemm2_ended"),
    "combine": ("gemm2_ended", "returned"),
    "sum": ("returned", "summed"),
}


def mok_phase_times(stamps: NDArray[np.int64]) -> PhaseTimes:
    """Phases of one rank's pass from its ``stamps`` [CTA, STAMPS] in ns; zero there means never.

    A phase that no CTA began or ended is left out: a rank whose experts got no rows has no
    dispatch and no GEMMs. Raises ValueError where no CTA began, or for what is no stamp.
    """
    if stamps.ndim != 2 or stamps.shape[1] != len(STAMPS):
        raise ValueError(f"stamps are {stamps.shape}, (CTAs, {len(STAMPS)}) is needed")
    columns = {name: stamps[:, i] for i, name in enumerate(STAMPS)}
    has_begun = columns["begun"] > 0
    if not has_begun.any():
        raise ValueError("no CTA has stamped when it began")
    if (stamps < 0).any():
        raise ValueError(f"a stamp is {stamps.min()} ns")
    seen = {name: column[column > 0] for name, column in columns.items()}
    spans: dict[PhaseName, tuple[int, int]] = {}
    for phase, (first, last) in _SPANS.items():
        begins, ends = seen[first], seen[last]
        if phase == "combine":
            # The rank still computes until its last CTA is done; without a GEMM 2 it waits for the
            # others as soon as it knows that it has nothing to do.
            begins = (begins if len(begins) else seen["scheduled"]).max(initial=0, keepdims=True)
        if len(begins) and len(ends) and begins.min() > 0:
            spans[phase] = int(begins.min()), int(ends.max())
    return PhaseTimes(int(seen["begun"].min()), spans, columns["waited"][has_begun].tolist())
