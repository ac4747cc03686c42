"""Numbers, durations, shares and switches as people write them in a config."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

_DURATION = re.compile(r"([0-9.]+(?:[eE][-+]?[0-9]+)?)\s*(us|ms|s|sec|m|min|h)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_PERCENT = re.compile(r"([0-9.]+(?:[eE][-+]?[0-9]+)?)\s*%")
_SWITCHES = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAX_SECONDS = 7 * 86400.0


def allowed(text: str) -> PydanticCustomError:
    """Make an error that says only what is allowed; place and value are added later."""
    return PydanticCustomError("allowed", "{text}", {"text": text})


def whole(value: Any) -> Any:
    """Read an integer, also written 1e3 or "4"; not true, not 2.5, not 017 (17 or 15?)."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and re.fullmatch(r"[1-9][0-9]*|0", value):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise allowed("a whole number")


def seconds(value: Any) -> Any:
    """Read a duration: a plain number is seconds, text carries its unit."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    try:
        if match:
            return float(match[1]) * _SECONDS[match[2]]
    except ValueError:
        pass
    raise allowed("a duration such as 500ms, 2s, 5min or a number of seconds")


def percent(value: Any) -> Any:
    """Read ``2%`` as 0.02; everything else stays."""
    if isinstance(value, str) and (match := _PERCENT.fullmatch(value.strip())):
        try:
            return float(match[1]) / 100
        except ValueError:
            return value
    return value


def share(value: Any) -> Any:
    """Read a part of one: ``2%`` or 0.02."""
    value = percent(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    raise allowed("a share such as 2% or 0.02")


def switch(value: Any) -> Any:
    """Read a boolean, also written yes, no, on or off."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _SWITCHES:
        return _SWITCHES[value.lower()]
    raise allowed("true or false (yes, no, on, off)")


def file_safe_name(value: Any) -> Any:
    """Read a name that can be part of file names and cell ids."""
    if isinstance(value, str) and _NAME.fullmatch(value):
        return value
    raise allowed("1 to 64 ASCII letters, digits, '.', '_' or '-', starting with a letter or digit")


def _schema(pattern: str) -> WithJsonSchema:
    number = {"type": "number", "exclusiveMinimum": 0}
    return WithJsonSchema({"anyOf": [number, {"type": "string", "pattern": f"^{pattern}$"}]})


PERCENT = {"type": "string", "pattern": f"^{_PERCENT.pattern}$"}

FileSafeName = Annotated[
    str,
    BeforeValidator(file_safe_name),
    WithJsonSchema({"type": "string", "pattern": f"^{_NAME.pattern}$"}),
]
WHOLE = BeforeValidator(whole)
Seconds = Annotated[
    float,
    Field(gt=0, le=_MAX_SECONDS, allow_inf_nan=False),
    BeforeValidator(seconds),
    _schema(_DURATION.pattern),
]
Share = Annotated[
    float,
    Field(gt=0, le=1, allow_inf_nan=False),
    BeforeValidator(share),
    _schema(_PERCENT.pattern),
]
Switch = Annotated[
    bool,
    BeforeValidator(switch),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"enum": sorted(_SWITCHES)}]}),
]
