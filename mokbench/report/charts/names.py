"""File stems of charts: each says what its figure shows and no other does."""

from collections.abc import Sequence

from mokbench.report.rows import Workload

# How a stem writes what two figures of otherwise one name differ in.
_TAGS = {
    "fabric": "{}",
    "nodes": "n{}",
    "hidden": "h{}",
    "intermediate": "i{}",
    "experts": "e{}",
    "top_k": "k{}",
    "pass_": "{}",
    "placement": "{}",
    "seed": "seed{}",
}
_DEFAULTS = {"pass_": "forward", "placement": "contiguous", "seed": 0}


def stems(kind: str, shown: Sequence[tuple[Workload, Sequence[str]]]) -> list[str]:
    """Stem of each figure, from its workload and further words (regime, run)."""
    plain = [_join(kind, work, words) for work, words in shown]
    found = []
    for (work, words), stem in zip(shown, plain, strict=True):
        alike = [other for (other, _), name in zip(shown, plain, strict=True) if name == stem]
        tags = [
            tag.format(getattr(work, field))
            for field, tag in _TAGS.items()
            if len({getattr(other, field) for other in alike}) > 1
            or getattr(work, field) != _DEFAULTS.get(field, getattr(work, field))
        ]
        found.append(_join(kind, work, [*words, *tags]))
    return found


def _join(kind: str, work: Workload, words: Sequence[str]) -> str:
    return "-".join([kind, work.model, f"r{work.ranks}", *words])
