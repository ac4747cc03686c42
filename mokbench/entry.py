"""One system in a group of rows: what was found out about it before anything is timed."""

from dataclasses import dataclass, field
from typing import Any

import torch

from mokbench import reference
from mokbench.systems import System
from mokbench.workload import Cell


@dataclass
class Entry:
    """One system with its options, prepared once for all its rows of the group."""

    cells: list[Cell]
    system: System
    facts: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None
    # Only preparing can tell: a library that is too old, a compiler that is missing.
    unsupported: str | None = None

    @property
    def usable(self) -> bool:
        """Whether it passed the oracle."""
        return self.problem is None and self.unsupported is None

    def judge(self, by_rank: list[dict[str, Any]], dtype: torch.dtype) -> None:
        """Same verdict on all ranks, from all ranks' errors; ``dtype`` is the input's."""
        sums = [rank["sums"] for rank in by_rank]
        accuracy = reference.judge(sums, self.cells[0].workload.dtype)
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
