"""A YAML file as plain values, each of which knows its line and column.

Scalars follow YAML 1.2, not PyYAML's 1.1: ``no`` and ``on`` stay text (a boolean field reads them
as people mean them), ``1e-3`` is a number, ``0o17`` is 15, ``1:30`` and dates stay text.
Duplicate keys are problems, aliases and merge keys work, but may not recurse or multiply.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from mokbench.errors import ConfigError
from mokbench.source import Loc, Node, Place, Source

MAX_FILE_BYTES = 1 << 20
MAX_VALUES = 100_000
MAX_DEPTH = 32
_LONG_TEXT = 1 << 14

_PLAIN = "plain"
_STRING = "tag:yaml.org,2002:str"
_STRUCTURES = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_NULLS = frozenset(("", "~", "null", "Null", "NULL"))
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+|0b[01]+)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def read(path: Path) -> Source:
    """Parse a file. Raises ConfigError for what cannot be read or is no YAML."""
    if path.is_dir():
        raise ConfigError([f"{path}: is a folder; give a config file, such as {path}/NAME.yaml"])
    if not path.exists():
        raise ConfigError([f"{path}: no such file"])
    if not path.is_file():
        raise ConfigError([f"{path}: is a device or pipe; a config is an ordinary file"])
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ConfigError([f"{path}: has {size} bytes; a config has at most {MAX_FILE_BYTES}"])
        return parse(path.read_bytes().decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(
            [f"{path}: is not UTF-8 text (byte {error.start}: {error.reason})"]
        ) from None
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from None


def parse(text: str, file: str) -> Source:
    """Parse YAML text; ``file`` names it in messages. Raises ConfigError where it is no YAML."""
    try:
        tree = _compose(text)
        if tree is None:
            raise ConfigError([f"{file}:1:1: the file is empty; a config is a YAML mapping"])
        builder = _Builder(file)
        root = builder.build(tree, (), frozenset())
    except yaml.reader.ReaderError as error:
        place = _place_of(text, error.position)
        raise ConfigError([f"{file}:{place}: not YAML text: {error.reason}"]) from None
    except yaml.MarkedYAMLError as error:
        raise ConfigError([f"{file}:{_explain(error)}"]) from None
    except RecursionError:
        raise ConfigError([f"{file}: values are nested deeper than {MAX_DEPTH} levels"]) from None
    if not isinstance(root.value, dict):
        raise ConfigError([f"{file}:{root.place}: found {root.shown()}; allowed: a mapping"])
    return Source(file, text, root, builder.problems)


class _Loader(yaml.SafeLoader):
    """Marks every plain scalar ``plain`` instead of guessing its type."""


_loaders: list[Any] = [_Loader]
if yaml.__with_libyaml__:

    class _FastLoader(yaml.CSafeLoader):
        """The same through libyaml, which takes a tenth of the time."""

    _loaders.append(_FastLoader)
for _each in _loaders:
    _each.yaml_implicit_resolvers = {}
    _each.add_implicit_resolver(_PLAIN, re.compile(""), None)


def _compose(text: str) -> yaml.Node | None:
    """The tree of a text, None of an empty one.

    What libyaml refuses, the other loader gets to judge: its messages are the better ones.
    """
    node: yaml.Node | None
    if len(text) >= _LONG_TEXT and len(_loaders) > 1:
        with contextlib.suppress(yaml.YAMLError):
            node = _loaders[1](text).get_single_node()
            return node
    node = _Loader(text).get_single_node()
    return node


class _Builder:
    """Turns PyYAML's nodes into ours; aliases are expanded, within limits."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.problems: list[tuple[Place, str]] = []
        self.num_values = 0

    def build(self, node: yaml.Node, loc: Loc, inside: frozenset[int]) -> Node:
        place = _place(node)
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            self._stop(place, f"more than {MAX_VALUES} values once aliases are expanded")
        if id(node) in inside:
            self._stop(place, "an alias contains itself")
        if len(inside) >= MAX_DEPTH:
            self._stop(place, f"values are nested deeper than {MAX_DEPTH} levels")
        if node.tag not in (_PLAIN, _STRING, *_STRUCTURES):
            self.problems.append((place, f"tag {node.tag} is not used in configs; leave it out"))
        inside = inside | {id(node)}
        if isinstance(node, yaml.MappingNode):
            return Node(loc, place, self._mapping(node, loc, inside))
        if isinstance(node, yaml.SequenceNode):
            items = [self.build(item, (*loc, i), inside) for i, item in enumerate(node.value)]
            return Node(loc, place, items)
        text = self._text(str(node.value), place)
        return Node(loc, place, self._scalar(text, place) if node.tag == _PLAIN else text, text)

    def _stop(self, place: Place, message: str) -> None:
        raise ConfigError([f"{self.file}:{place}: {message}"])

    def _text(self, text: str, place: Place) -> str:
        """Refuse half characters, which a quoted \\ud800 makes and nothing can store."""
        if any(0xD800 <= ord(char) <= 0xDFFF for char in text):
            self.problems.append((place, "text with a lone surrogate (\\ud800 to \\udfff)"))
            return ""
        return text

    def _scalar(self, text: str, place: Place) -> str | int | float | bool | None:
        try:
            return resolve(text)
        except ValueError:
            self.problems.append((place, f"a number of {len(text)} digits is too long"))
            return None

    def _mapping(self, node: yaml.MappingNode, loc: Loc, inside: frozenset[int]) -> dict[str, Node]:
        own: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key_node, value_node in node.value:
            place = _place(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append((place, "a key is a list or mapping; allowed: a word"))
                continue
            key = str(key_node.value)
            if key == "<<" and key_node.tag == _PLAIN:
                for name, child in self._merge(value_node, loc, inside):
                    merged.setdefault(name, child)
                continue
            child = self.build(value_node, (*loc, key), inside)
            child.key = place
            if key in own:
                first = own[key].key
                self.problems.append((place, f"duplicate key {key!r}; it first stands at {first}"))
                continue
            own[key] = child
        return merged | own

    def _merge(
        self, node: yaml.Node, loc: Loc, inside: frozenset[int]
    ) -> Iterator[tuple[str, Node]]:
        parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for part in parts:
            built = self.build(part, loc, inside)
            if isinstance(built.value, dict):
                yield from built.value.items()
            else:
                message = (
                    f"<< merges mappings, found {built.shown()}; allowed: *anchor of a mapping"
                )
                self.problems.append((built.place, message))


def resolve(text: str) -> str | int | float | bool | None:
    """Value of a plain scalar by YAML 1.2's core schema; 017 stays text, since it is 17 or 15."""
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if _INT.fullmatch(text):
        return int(text.replace("_", ""), 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    if special := _SPECIAL.fullmatch(text):
        return float(f"{special[1] or ''}inf") if special[2] else float("nan")
    return text


def _place(node: yaml.Node) -> Place:
    return Place(node.start_mark.line + 1, node.start_mark.column + 1)


def _place_of(text: str, index: int) -> Place:
    before = text[:index]
    return Place(before.count("\n") + 1, index - (before.rfind("\n") + 1) + 1)


def _explain(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    place = Place(mark.line + 1, mark.column + 1) if mark else Place(1, 1)
    if "single document" in (error.context or ""):
        return f"{place}: a second document starts here; allowed: one config a file"
    context = f" ({error.context})" if error.context else ""
    return f"{place}: YAML syntax: {error.problem}{context}"
