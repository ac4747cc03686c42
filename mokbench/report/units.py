"""How figures are written: us, binary sizes, ratios with their interval."""

from mokbench.figures import StepTime
from mokbench.stats import Ratio

NOTHING = "-"


def number(value: float | None) -> str:
    """Three significant digits, or all whole ones: 0.512, 12.3, 4567; never an exponent."""
    if value is None:
        return NOTHING
    if abs(value) >= 100:
        return f"{value:.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 1 or value == 0 else f"{value:.3f}"


def step(time: StepTime | None) -> str:
    """Median and 95 % interval: ``123 (120-127)``."""
    if time is None:
        return NOTHING
    if time.ci_low is None or time.ci_high is None:
        return f"{number(time.median)} (no CI)"
    return f"{number(time.median)} ({number(time.ci_low)}-{number(time.ci_high)})"


def ratio(value: Ratio | None) -> str:
    """Ratio and 95 % interval: ``0.84 (0.81-0.87)``."""
    if value is None:
        return NOTHING
    if value.low is None or value.high is None:
        return f"{quotient(value.value)} (no CI)"
    return f"{quotient(value.value)} ({quotient(value.low)}-{quotient(value.high)})"


def quotient(value: float | None) -> str:
    """Write a dimensionless figure near 1 with two decimals."""
    return f"{value:.2f}" if value is not None and 0.1 <= value < 10 else number(value)


def size(num_bytes: float | None) -> str:
    """Bytes with binary prefixes: ``12.0 MiB``."""
    if num_bytes is None:
        return NOTHING
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{number(num_bytes)} {unit}"
        num_bytes /= 1024
    return f"{number(num_bytes)} TiB"


def error(value: float | None) -> str:
    """Write a relative error with two digits: ``3.1e-03``."""
    return NOTHING if value is None else f"{value:.1e}"


def count(value: int, noun: str) -> str:
    """``1 row``, ``2 rows``."""
    return f"{value} {noun}" if value == 1 else f"{value} {noun}s"
