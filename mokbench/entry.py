"""One system in a group of rows: what was found out about it before anything is timed."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mokbench import reference
from mokbench.layer import Layer
from mokbench.systems import Noted, System, TakesInt64
from mokbench.workload import Cell


@dataclass
class Entry:
    """One system with its options, prepared once for all its rows of the group."""

    cells: list[Cell]
    system: System
    facts: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None
    # What the harness found out for the system, a line each.
    found: list[str] = field(default_factory=list)
    # Only preparing can tell: a library that is too old, a compiler that is missing.
    unsupported: str | None = None

    def take(self, layer: Layer) -> None:
        """Inputs in the types that the system takes; x is not copied."""
        topk_idx = layer.topk_idx
        topk_idx = topk_idx.long() if isinstance(self.system, TakesInt64) else topk_idx
        self.inputs: tuple[Tensor, Tensor, Tensor] = (layer.x, topk_idx, layer.topk_weights)

    def note(self) -> None:
        """What the rows of this system say about how it ran."""
        own = self.system.notes if isinstance(self.system, Noted) else ()
        if lines := [*self.found, *own]:
            self.facts["notes"] = lines

    @property
    def usable(self) -> bool:
        """Whether it passed the oracle."""
        return self.problem is None and self.unsupported is None

    def judge(self, by_rank: list[dict[str, Any]], dtype: torch.dtype) -> None:
        """Same verdict on all ranks, from all ranks' errors; ``dtype`` is the input's."""
        sums = [rank["sums"] for rank in by_rank]
        cell = self.cells[0]
        accuracy = reference.judge(sums, cell.workload.dtype, cell.dispatch_dtype)
        repeat = all(rank["repeat"] for rank in by_rank)
        peaks = [rank["peak_memory_bytes"] for rank in by_rank]
        self.facts = {
            "rel_error": accuracy.rel_error,
            "nan_count": accuracy.nan_count,
            "bitwise_repeat": repeat,
            "t_first_us": max(rank["t_first_us"] for rank in by_rank),
            "peak_memory_bytes": None if None in peaks else max(peaks),
        }
        wrong_dtypes = {rank["dtype"] for rank in by_rank} - {str(dtype)}
        if wrong_dtypes:
            found = ", ".join(sorted(wrong_dtypes))
            self.problem = f"output is {found}, not the input's {dtype}"
        elif not accuracy.ok:
            self.problem = (
                f"output differs from the FP32 reference: relative error {accuracy.rel_error:.3g} "
                f"(worst token {accuracy.max_token_error:.3g}), allowed {accuracy.tolerance:.3g}; "
                f"NaN count {accuracy.nan_count}"
            )
        elif self.system.deterministic and not repeat:
            self.problem = "two runs on the same inputs gave different bits"


def by_system(cells: list[Cell]) -> list[list[Cell]]:
    """Cells that share a prepared system, in order of first appearance."""
    members: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        members.setdefault((cell.system, cell.options), []).append(cell)
    return list(members.values())
