"""What the person at the terminal sees while a sweep runs; on standard error, never data."""

import contextlib
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from mokbench.record import Record

_MIN_MEASURED = 4


class Progress(Protocol):
    """Told about rows as they end and about phases as they begin."""

    def say(self, text: str) -> None:
        """A sentence about the run as a whole."""

    def phase(self, cell_id: str, phase: str) -> None:
        """The row that is being worked on now, and how far it is."""

    def row(self, record: Record) -> None:
        """A row was stored."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Eta:
    """Time left, from the measured rows of this command; refused ones take no time.

    Nothing is said before ``_MIN_MEASURED`` rows: rows of a turn end together, and the first one
    carries the start of the ranks.
    """

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self.done = total, 0
        self._measured = 0
        self._clock, self._start = clock, clock()

    def step(self, record: Record) -> str:
        """One more row is done: the time left as text, empty when nothing is known."""
        self.done += 1
        self._measured += record.status != "unsupported"
        if self._measured < _MIN_MEASURED:
            return ""
        left = (self._clock() - self._start) / self._measured * (self.total - self.done)
        return f"{left:.0f} s left" if left >= 1 else ""


class PlainProgress:
    """One line a row, for logs and pipes."""

    def __init__(self, total: int) -> None:
        self._eta = Eta(total)
        self._announced: set[str] = set()

    def say(self, text: str) -> None:
        """See Progress."""
        # A run goes on when nobody reads what it says, or where there is no room for it.
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)

    def phase(self, cell_id: str, phase: str) -> None:
        """A row's first sample is announced: its turn may take long, and its rows end together."""
        if phase == "measure" and cell_id not in self._announced:
            self._announced.add(cell_id)
            self.say(f"measuring {cell_id}")

    def row(self, record: Record) -> None:
        """See Progress."""
        left = self._eta.step(record)
        count = f"[{self._eta.done}/{self._eta.total}]"
        self.say(f"{count} {describe(record)}" + (f"  ({left})" if left else ""))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to undo."""


class TerminalProgress:
    """A bar with the present row and the time left; failed rows scroll by above it."""

    def __init__(self, total: int, console: Console) -> None:
        self._eta = Eta(total)
        self._bar = RichProgress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
        )
        self._task: TaskID = self._bar.add_task("", total=total, left="")

    def say(self, text: str) -> None:
        """See Progress."""
        self._bar.update(self._task, description=text)

    def phase(self, cell_id: str, phase: str) -> None:
        """See Progress."""
        self._bar.update(self._task, description=f"{phase} {cell_id}")

    def row(self, record: Record) -> None:
        """See Progress."""
        self._bar.update(self._task, advance=1, left=self._eta.step(record))
        if record.status == "failed":
            self._bar.console.print(describe(record), markup=False, highlight=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


class QuietProgress(PlainProgress):
    """Failed rows only."""

    def say(self, text: str) -> None:
        """Nothing."""

    def row(self, record: Record) -> None:
        """See Progress."""
        if record.status == "failed":
            super().say(describe(record))


def describe(record: Record) -> str:
    """One line about a stored row."""
    if record.status == "ok" and record.step_time_us is not None:
        return f"{record.id}: {record.step_time_us.median:.1f} us"
    return f"{record.id}: {record.status}: {record.reason}"


def make_progress(total: int, quiet: bool) -> Progress:
    """The progress that fits standard error: a bar on a terminal, lines elsewhere."""
    if quiet:
        return QuietProgress(total)
    console = Console(stderr=True)
    return TerminalProgress(total, console) if console.is_terminal else PlainProgress(total)
