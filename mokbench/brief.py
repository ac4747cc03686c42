"""A value that is not what it should be, as an error line shows it."""

_MOST, _SHOWN = 40, 12


def brief(value: object) -> str:
    """Write ``value`` as Python would, so that "1" is not 1; cut where it is long."""
    text = repr(value)
    if len(text) <= _MOST:
        return text
    return f"{text[:_SHOWN]}... ({len(text)} characters)"
