"""Raw samples of one row, a parquet file: written with types, read only where all is as written."""

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mokbench.errors import ResultsError
from mokbench.figures import first_problem

if TYPE_CHECKING:
    import pandas as pd

# duration_us and start_us are of one rank's iteration, on that rank's own clock: where it starts is
# no date, and other after a restart of the ranks. (Older GPU folders have us since 1970 there, in
# steps of 0.256.) sm_clock_mhz is NaN where there is none to read; samples whose clock was too low
# are there but not accepted.
SAMPLE_TYPES = {
    "block": "int32",
    "iteration": "int32",
    "rank": "int32",
    "start_us": "float64",
    "duration_us": "float64",
    "sm_clock_mhz": "float64",
    "accepted": "bool",
}


def content(samples: "pd.DataFrame") -> bytes:
    """Bytes of the file that holds ``samples``."""
    buffer = io.BytesIO()
    frame = samples[list(SAMPLE_TYPES)].astype(SAMPLE_TYPES)
    frame.to_parquet(buffer, engine="pyarrow", compression="zstd", index=False)
    return buffer.getvalue()


def read(path: Path) -> "pd.DataFrame":
    """Read a file; ResultsError for one that is gone, or holds what ``content`` never wrote."""
    import pandas as pd

    try:
        frame = pd.read_parquet(path)
        if problem := _problem(frame):
            raise ValueError(problem)
    except (OSError, ValueError) as error:
        raise ResultsError(
            f"{path}: cannot be read: {first_problem(error)}; its row is still good"
        ) from error
    return frame


def _problem(frame: "pd.DataFrame") -> str | None:
    missing = [name for name in SAMPLE_TYPES if name not in frame.columns]
    if missing:
        return f"it has no column {missing[0]}"
    for name, kind in SAMPLE_TYPES.items():
        if frame[name].dtype.kind != np.dtype(kind).kind:
            return f"its column {name} is {frame[name].dtype}, {kind} is needed"
    for name in ("start_us", "duration_us"):
        if not np.isfinite(frame[name].to_numpy()).all():
            return f"its column {name} holds a number that is not finite"
    return None
