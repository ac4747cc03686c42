"""Phases inside of one fused kernel: what a system stamps, and all ranks of a pass side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from mokbench.figures import PhaseName, PhaseSpan, RankPhases


@dataclass(frozen=True)
class PhaseTimes:
    """One rank's pass in ns of a clock that all ranks of its GPU share.

    ``begun_ns`` is when its first CTA began, ``spans_ns`` (begin, end) of each phase that it had,
    in the order of a pass, ``waited_ns`` what each CTA waited for rows in all.
    """

    begun_ns: int
    spans_ns: Mapping[PhaseName, tuple[int, int]]
    waited_ns: Sequence[int]


def phases_by_rank(times: Sequence[PhaseTimes], ranks_per_gpu: int) -> list[RankPhases]:
    """Times of all ranks, in us from the earliest begin among those that share a GPU.

    ``times`` are by rank; neighbours share a GPU. Raises ValueError for times that cannot be.
    """
    found = []
    for rank, own in enumerate(times):
        clock = rank // ranks_per_gpu
        sharing = times[clock * ranks_per_gpu : (clock + 1) * ranks_per_gpu]
        zero_ns = min(other.begun_ns for other in sharing)
        spans = [
            PhaseSpan(name=name, begin_us=(begin - zero_ns) / 1e3, end_us=(end - zero_ns) / 1e3)
            for name, (begin, end) in own.spans_ns.items()
        ]
        found.append(
            RankPhases(
                rank=rank,
                clock=clock,
                num_ctas=len(own.waited_ns),
                spans=spans,
                waited_us_median=median(own.waited_ns) / 1e3,
                waited_us_max=max(own.waited_ns) / 1e3,
            )
        )
    return found
