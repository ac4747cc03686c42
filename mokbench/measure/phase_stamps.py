"""The phases that a system's kernels stamped in a row's last pass, from all ranks."""

from typing import Any

from mokbench.fabric.group import PeerLostError, RankGroup
from mokbench.figures import first_problem
from mokbench.kernel_phases import PhaseTimes, phases_by_rank
from mokbench.systems import Stamped, System


def read_phases(system: System, group: RankGroup) -> dict[str, Any]:
    """A result's ``kernel_phases``, or a note why not; empty where nothing is stamped. Collective.

    A row is worth more than its phases: whatever goes wrong with them is a note.
    """
    if not isinstance(system, Stamped):
        return {}
    told = group.gather(_own(system))
    times = [found for found, _ in told if found is not None]
    problem = next((f"rank {rank}: {text}" for rank, (_, text) in enumerate(told) if text), None)
    if problem is None and len(times) < len(told):
        return {}
    if problem is None:
        try:
            return {"kernel_phases": phases_by_rank(times, group.ranks_per_gpu)}
        except Exception as error:
            problem = first_problem(error)
    return {"kernel_phases_notes": [f"kernel_phases: unavailable: {problem}"]}


def _own(system: Stamped) -> tuple[PhaseTimes | None, str | None]:
    """Times of this rank, or why there are none: one that raised would leave its peers alone."""
    try:
        return system.phase_times(), None
    except PeerLostError:
        raise
    except Exception as error:
        return None, f"{type(error).__name__}: {first_problem(error)}"
