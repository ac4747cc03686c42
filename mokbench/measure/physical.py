"""Bytes that the links' own counters saw per step, from one chain of at least a second."""

import math
from dataclasses import dataclass

import torch

from mokbench.fabric.group import RankGroup
from mokbench.measure.link_counters import MIN_CHAIN_S, LinkCounters
from mokbench.measure.timing import Step, Timer


@dataclass(frozen=True)
class PhysicalBytes:
    """Payload bytes of one step, sent by all ranks; null with a ``note`` where not readable.

    ``raw_bytes`` adds what the link's protocol put around them.
    """

    payload_bytes: int | None
    raw_bytes: int | None
    note: str | None


def physical_bytes(
    group: RankGroup, timer: Timer, counters: LinkCounters, step: Step, step_us: float
) -> PhysicalBytes:
    """Read the counters around a chain; collective, the same answer on every rank.

    Each GPU's counters are read by its own rank, so there must be one rank a GPU.
    """
    passes = math.ceil(MIN_CHAIN_S * 1e6 / step_us)
    # Nothing of any rank may move while any rank reads.
    group.barrier()
    before = counters.read()
    group.barrier()
    timer.steady(step, passes)
    group.barrier()
    moved = counters.since(before)
    sent = [
        (moved.payload_tx.value, moved.payload_tx.note),
        (moved.raw_tx.value, moved.raw_tx.note),
    ]
    by_rank = group.gather(sent)
    totals = [_total([told[i] for told in by_rank]) for i in range(2)]
    notes = [note for _, note in totals if note]
    return PhysicalBytes(
        _per_pass(totals[0][0], passes),
        _per_pass(totals[1][0], passes),
        f"physical_bytes: {notes[0]}" if notes else None,
    )


def _total(counts: list[tuple[int | None, str | None]]) -> tuple[int | None, str | None]:
    """Sum over ranks; null, with the first reason, as soon as one rank has none."""
    for rank, (value, note) in enumerate(counts):
        if value is None:
            return None, f"rank {rank}: {note}"
    return sum(value for value, _ in counts if value is not None), None


def _per_pass(total: int | None, passes: int) -> int | None:
    return None if total is None else round(total / passes)


def gpu_uuid(device: torch.device) -> str:
    """How NVML calls the GPU that torch calls ``device``."""
    return str(torch.cuda.get_device_properties(device).uuid)
