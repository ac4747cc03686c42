"""The errors mokbench raises on purpose; anything else is a bug."""

from collections.abc import Mapping
from typing import Any


class MokbenchError(Exception):
    """Base of every error whose message is meant for the user."""


class ConfigError(MokbenchError):
    """A bad config, option or input file: exit code 2.

    ``problems`` holds one ``file:line:column: field: found; allowed`` line each.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class UnsupportedError(MokbenchError):
    """A system cannot run a cell on this machine; the message says why and what would help."""


class ResultsError(MokbenchError):
    """A run folder cannot be written or read; the message says what is safe and what to do."""


class RankError(MokbenchError):
    """A rank failed, died or hung: ``rank`` is at fault, ``fault`` the protocol's record."""

    def __init__(self, message: str, rank: int, fault: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.fault = dict(fault) if fault else None
