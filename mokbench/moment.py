"""Points in time as files hold them: ISO 8601 with a zone, so that any two have an order."""

from datetime import UTC, datetime
from typing import Annotated

from pydantic import AfterValidator

from mokbench.brief import brief


def now() -> str:
    """Say when this is, to the second, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def read(text: str) -> datetime:
    """Read what a file holds. ValueError for what is no date with a time and a zone."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{brief(text)} is no date and time (ISO 8601)") from None
    if found.tzinfo is None:
        raise ValueError(f"{brief(text)} has no zone")
    return found


def _checked(text: str) -> str:
    read(text)
    return text


Moment = Annotated[str, AfterValidator(_checked)]
