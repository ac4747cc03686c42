"""signals.json: signaling against the number of ranks, as a run folder keeps it."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from mokbench.durable import as_results_error, replace_file
from mokbench.errors import ResultsError
from mokbench.figures import SignalPoint, first_problem
from mokbench.row_checks import quantity_problem

_POINTS = TypeAdapter(list[SignalPoint])


def write(path: Path, points: Sequence[SignalPoint]) -> None:
    """Replace what was stored. ResultsError on a full disk."""
    with as_results_error(path, "storing signaling", "the rows are safe; free some space"):
        replace_file(path, _POINTS.dump_json(list(points), indent=1))


def read(path: Path) -> list[SignalPoint]:
    """Read what was stored; empty where nothing was. ResultsError for a damaged file."""
    try:
        points = _POINTS.validate_json(path.read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, ValidationError) as error:
        raise ResultsError(f"{path}: not a signaling file: {first_problem(error)}") from error
    for point in points:
        for name, quantity in point.quantities.items():
            if problem := quantity_problem(name, quantity):
                raise ResultsError(f"{path}: {point.ranks} ranks: {problem}")
    return points
