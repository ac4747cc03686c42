"""Signaling latency on the fabric: hops, entry, and ready, against the number of ranks."""

import time
from collections.abc import Iterator
from typing import Any

from mokbench.fabric.group import RankGroup
from mokbench.measure.cores import own_cores

# A pair of ranks that must take turns on one core needs milliseconds a round: stop asking early.
_ROUNDS = 400
_TRIAL_ROUNDS = 20
_BUDGET_S = 0.25


def signal_samples(fabric: RankGroup) -> list[dict[str, Any]]:
    """Raw rounds in us for every number of ranks worth having; collective, the same on all ranks.

    One entry per number of ranks: {"ranks", "samples": {quantity: [us, ...]}} with the quantities
    of docs/metrics.md. A round's value is the slowest participating rank's.
    """
    points = []
    for ranks in _rank_counts(fabric.ranks):
        samples: dict[str, list[float]] = {}
        if ranks == 2:
            samples["signal_hop_us"] = _rounds(fabric, "hop", ())["hop"]
        if ranks == min(2, fabric.ranks):
            samples["local_hop_us"] = _rounds(fabric, "local_hop", ())["local_hop"]
        if ranks > 1:
            samples["signal_entry_us"] = _rounds(fabric, "entry", (ranks,))["entry"]
            for protocol in ("pull", "push"):
                ready = _rounds(fabric, protocol, (ranks,))
                samples[f"signal_ready_us.{protocol}"] = ready[protocol]
                samples[f"signal_after_arrival_us.{protocol}"] = ready["after_arrival"]
                if bound := ready.get("clock_offset_bound"):
                    samples[f"clock_offset_bound_us.{protocol}"] = bound
        points.append({"ranks": ranks, "samples": samples})
    return points


def _rank_counts(ranks: int) -> Iterator[int]:
    """1 alone, else every count up to 8 and powers of two beyond, the full count last."""
    if ranks == 1:
        yield 1
    for count in range(2, ranks + 1):
        if count <= 8 or count == ranks or count & (count - 1) == 0:
            yield count


def _rounds(fabric: RankGroup, kind: str, args: tuple[int, ...]) -> dict[str, list[float]]:
    """Rounds of one quantity, as many as fit the budget; slowest rank per round."""
    rounds = _fitting(fabric, kind, args)
    if rounds < _ROUNDS:
        # The first trial compiles and loads what is not there yet, seconds that no round takes.
        rounds = _fitting(fabric, kind, args)
    own = _measure(fabric, kind, rounds, args)
    merged: dict[str, list[float]] = {}
    for name in own:
        by_rank = [values[name] for values in fabric.gather(own) if values[name]]
        merged[name] = [max(round_us) for round_us in zip(*by_rank, strict=True)]
    return merged


def _fitting(fabric: RankGroup, kind: str, args: tuple[int, ...]) -> int:
    """How many rounds fit the budget by a trial's time, the same on all ranks."""
    start = time.perf_counter()
    _measure(fabric, kind, _TRIAL_ROUNDS, args)
    spent_s = max(fabric.gather(time.perf_counter() - start))
    return int(min(_ROUNDS, max(_TRIAL_ROUNDS, _BUDGET_S / max(spent_s, 1e-9) * _TRIAL_ROUNDS)))


def _measure(
    fabric: RankGroup, kind: str, rounds: int, args: tuple[int, ...]
) -> dict[str, list[float]]:
    ranks = 1 if kind == "local_hop" else 2 if kind == "hop" else args[0]
    with own_cores(fabric.rank, ranks):
        return _run_rounds(fabric, kind, rounds, args)


def _run_rounds(
    fabric: RankGroup, kind: str, rounds: int, args: tuple[int, ...]
) -> dict[str, list[float]]:
    signal = fabric.signal
    if kind in ("pull", "push"):
        ready, after_arrival = signal.ready(kind, rounds, *args)
        rounds_us = {kind: ready, "after_arrival": after_arrival}
        # The twin's threads share one clock; on the GPU it is one value a call, not one a round.
        bound_us = getattr(signal, "clock_offset_bound_us", None)
        return rounds_us if bound_us is None else rounds_us | {"clock_offset_bound": bound_us}
    if kind == "entry":
        return {kind: signal.entry(rounds, *args)}
    if kind == "hop":
        return {kind: signal.hop(rounds)}
    # Two threads of one rank; the other ranks sleep, so that they do not take its cores.
    return {kind: signal.local_hop(rounds) if fabric.rank == 0 else []}
