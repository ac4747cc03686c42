"""One line of the doctor's report, and how a check that fails becomes one."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

import pynvml

from mokbench.measure.nvml_gpu import code_name


class State(StrEnum):
    """What a line means: as it should be, worth knowing, worth fixing, not known."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"
    UNREADABLE = "unreadable"


@dataclass(frozen=True)
class Finding:
    """What was found; ``advice`` says what to do about it."""

    name: str
    text: str
    state: State = State.OK
    advice: str | None = None

    def named(self, name: str) -> Self:
        """The same under another name."""
        return replace(self, name=name)


def isolated(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """The check's findings; one that raises is itself a finding, and the others go on."""
    try:
        return list(check())
    except Exception as error:
        return [Finding(name, f"could not be read: {reason(error)}", State.UNREADABLE)]


def reason(error: Exception) -> str:
    """One line about an error, NVML's with the name of its code."""
    if isinstance(error, pynvml.NVMLError):
        return f"NVML {code_name(error)}"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
