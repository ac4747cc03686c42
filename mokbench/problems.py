"""What is wrong with a config: one line a problem, with place, field, found and allowed."""

import difflib
import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from mokbench.errors import ConfigError
from mokbench.source import MAX_SHOWN_CHARS, Loc, Node, Place, Source

_ALLOWED = {
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "multiple_of": "a multiple of {multiple_of}",
    "literal_error": "{expected}",
    "enum": "{expected}",
    "allowed": "{text}",
    "finite_number": "a finite number",
    "string_pattern_mismatch": "text of the form {pattern}",
}
_ALLOWED_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
    "model": "a mapping",
    "dict": "a mapping",
}


class Problems:
    """Collects every problem of one source, so that the user sees all of them at once."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._lines: dict[tuple[Place, str], None] = dict.fromkeys(source.problems)

    def add(self, loc: Loc, message: str, *, at_key: bool = False) -> None:
        """Note a problem at a value, or at its key."""
        node, rest = self.source.find(loc)
        place = node.key if at_key and node.key and not rest else node.place
        field = field_name(node, rest)
        self._lines[place, f"{field}: {message}" if field else message] = None

    def add_errors(self, errors: Iterable[ErrorDetails], model: type[BaseModel]) -> list[Node]:
        """Note what pydantic found; the answer holds the nodes to take out before looking on."""
        nodes = []
        for error in errors:
            loc = error["loc"]
            node, rest = self.source.find(loc)
            nodes.append(node)
            if error["type"] == "extra_forbidden":
                self.add(
                    loc,
                    f"unknown key; {suggest(str(loc[-1]), _keys(model, loc[:-1]))}",
                    at_key=True,
                )
            elif error["type"] == "missing":
                self.add(loc, "missing")
            elif error["type"] == "value_error":
                self.add(loc, str(error.get("ctx", {}).get("error", error["msg"])))
            else:
                inner = any(isinstance(key, str) for key in rest)
                found = _shown(error["input"]) if inner else node.shown()
                self.add(loc, f"found {found}; {self._allowed(error, found)}")
        return nodes

    @staticmethod
    def _allowed(error: ErrorDetails, found: str) -> str:
        text = allowed_text(error)
        if error["type"] in ("literal_error", "enum"):
            return suggest(found.strip("'"), re.findall(r"'([^']*)'", text))
        return f"allowed: {text}"

    def __bool__(self) -> bool:
        return bool(self._lines)

    def raise_all(self) -> None:
        """Raise ConfigError with every problem in the file's order, if there is one."""
        if self._lines:
            file = self.source.file
            raise ConfigError([f"{file}:{place}: {text}" for place, text in sorted(self._lines)])


def field_name(node: Node, rest: Loc) -> str:
    """``sweep.ranks[2]``; a part of what a scalar stands for names the scalar: ``model.hidden``."""
    name = ""
    for key in node.loc + tuple(key for key in rest if isinstance(key, str)):
        name += f"[{key}]" if isinstance(key, int) else f".{key}" if name else str(key)
    is_part_of_text = isinstance(node.value, str) and any(isinstance(key, str) for key in rest)
    return f"{name} (of {node.shown()})" if is_part_of_text else name


def suggest(found: str, names: Iterable[str]) -> str:
    """``did you mean ranks?; allowed: ranks, model``."""
    names = list(names)
    near = close(found, names)
    hint = f"did you mean {' or '.join(near)}?; " if near else ""
    return f"{hint}allowed: {', '.join(names)}"


def close(found: str, names: Iterable[str]) -> list[str]:
    """At most two names that were probably meant: similar ones, else longer ones."""
    by_folded = {name.lower(): name for name in names}
    near = difflib.get_close_matches(found.lower(), by_folded, n=2, cutoff=0.6)
    if not near and len(found) > 2:
        near = [name for name in by_folded if found.lower() in name][:2]
    return [by_folded[name] for name in near]


def allowed_text(error: ErrorDetails) -> str:
    """Say what would have been right, by pydantic's error type."""
    kind = error["type"]
    if kind in _ALLOWED:
        return _ALLOWED[kind].format(**error.get("ctx", {}))
    return _ALLOWED_KINDS.get(kind.split("_")[0], error["msg"])


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."


def _keys(model: type[BaseModel], loc: Loc) -> list[str]:
    """Keys allowed in the mapping at a location, short forms included, from the JSON schema."""
    schema = _json_schema(model)
    here = _branches(schema, schema)
    for key in loc:
        below = (
            branch.get("items") if isinstance(key, int) else branch.get("properties", {}).get(key)
            for branch in here
        )
        here = [leaf for part in below if part for leaf in _branches(part, schema)]
    return list(dict.fromkeys(name for branch in here for name in branch.get("properties", ())))


@cache
def _json_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Making a schema takes 60 ms, and a config may have many unknown keys."""
    return model.model_json_schema()


def _branches(part: dict[str, Any], schema: dict[str, Any]) -> list[dict[str, Any]]:
    if "$ref" in part:
        return _branches(schema["$defs"][part["$ref"].rsplit("/", 1)[-1]], schema)
    if "anyOf" in part:
        return [leaf for option in part["anyOf"] for leaf in _branches(option, schema)]
    return [part]
