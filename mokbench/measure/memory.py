"""Peak memory of this process between two points, from the kernel's own high-water mark."""

from pathlib import Path


class PeakMemory:
    """Bytes by which resident memory rose above its level at construction, at its highest.

    Shared pages count once they are touched, so a segment that several ranks map counts in each.
    Reads None where the kernel offers no resettable high-water mark (anything but Linux).
    """

    def __init__(self) -> None:
        self._start: int | None = None
        try:
            # "5" resets VmHWM to the present VmRSS, see proc(5), /proc/pid/clear_refs.
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            self._start = _status_bytes("VmRSS")
        except (OSError, KeyError):
            pass

    def rise_bytes(self) -> int | None:
        """Highest resident memory since construction, less that at construction."""
        if self._start is None:
            return None
        return max(0, _status_bytes("VmHWM") - self._start)


def _status_bytes(field: str) -> int:
    """A kB field of /proc/self/status in bytes; KeyError when it is not there."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise KeyError(field)
