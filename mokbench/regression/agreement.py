"""What launches must have measured alike before their values are one series."""

from collections.abc import Collection, Iterable

from mokbench.cell_digest import lacks_defaults
from mokbench.errors import ResultsError
from mokbench.regression.launch import Launch, Measured

_WORDS = {
    "": "without a mark",
    "shared": "on a shared GPU",
    "oversubscribed": "on an oversubscribed host",
    "host": "on the host fabric",
}


def refuse_disagreeing(launches: Iterable[Launch]) -> None:
    """Raise ResultsError where an ok cell was not one and the same measurement in all launches.

    Which of them is the one to judge is nothing that their order may decide.
    """
    first: dict[str, tuple[Measured, str]] = {}
    for launch in launches:
        for cell, measured in launch.measured().items():
            known, run = first.setdefault(cell, (measured, launch.run))
            if known != measured:
                raise ResultsError(
                    f"{cell}: {run} measured it {_told(known, measured)}, {launch.run} "
                    f"{_told(measured, known)}: these are no launches of one thing; give only "
                    "runs of the same config on a machine that was used the same way"
                )


def refuse_others(launches: Iterable[Launch], known: Launch, cells: Collection[str]) -> None:
    """Raise ResultsError where launches measured one of ``cells`` otherwise than ``known`` did."""
    judged = known.measured()
    for launch in launches:
        for cell, measured in launch.measured().items():
            if cell in cells and cell in judged and measured != judged[cell]:
                raise ResultsError(
                    f"{cell}: {launch.run} measured it {_told(measured, judged[cell])}, the judged "
                    f"{known.run} {_told(judged[cell], measured)}: that settles nothing; confirm "
                    "with the config of the runs, by a base whose options mean the same"
                )


def not_comparable(measured: Measured, others: Collection[Measured], where: str) -> str | None:
    """Why nothing of ``others``, what ``where`` measured, goes with ``measured``, or None."""
    digest, mark = measured
    digests = {other for other, _ in others}
    if measured in others and not lacks_defaults(digest):
        return None
    if any(map(lacks_defaults, [digest, *digests])):
        return (
            "not comparable: stored by an older mokbench, whose digest leaves out options that had "
            "defaults, and defaults change"
        )
    if digest in digests:
        had = " and ".join(sorted(_WORDS[old] for other, old in others if other == digest))
        return f"measured {_WORDS[mark]}, by {where} {had}: these do not compare"
    return f"its options or routing are not what {where} measured under this id"


def _told(measured: Measured, other: Measured) -> str:
    """What is not the same in the other: the mark, or else the digest."""
    (digest, mark), (other_digest, _) = measured, other
    if digest == other_digest:
        return _WORDS[mark]
    cell, _, routing = digest.partition(".")
    lacks = [what for what, part in (("options", cell), ("routing", routing)) if part == "-"]
    return f"with digest {digest}" + (f" (its {' and '.join(lacks)} not known)" if lacks else "")
