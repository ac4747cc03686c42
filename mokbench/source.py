"""The values of a parsed file, each with its line and column, for errors that say where."""

from dataclasses import dataclass
from typing import Any

Key = str | int
Loc = tuple[Key, ...]

MAX_SHOWN_CHARS = 60


@dataclass(frozen=True, order=True)
class Place:
    """Line and column, both from 1."""

    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.line}:{self.column}"


@dataclass
class Node:
    """One value: a scalar, a list of nodes or a mapping of nodes.

    ``loc`` leads here from the root as written; ``text`` is a scalar's text; ``key`` is where the
    key of a mapping's value stands.
    """

    loc: Loc
    place: Place
    value: Any
    text: str = ""
    key: Place | None = None

    def child(self, key: Key) -> "Node | None":
        """Find the value under a key or index, None where there is none."""
        if isinstance(self.value, dict) and isinstance(key, str):
            return self.value.get(key)
        if isinstance(self.value, list) and isinstance(key, int) and key < len(self.value):
            child: Node = self.value[key]
            return child
        return None

    def plain(self) -> Any:
        """Drop positions; what is called ``name`` is text whatever it looks like."""
        if isinstance(self.value, dict):
            return {
                key: child.text if key == "name" and child.text else child.plain()
                for key, child in self.value.items()
            }
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def shown(self) -> str:
        """Short form for messages."""
        if isinstance(self.value, dict):
            return f"a mapping with {', '.join(self.value) or 'nothing in it'}"[:MAX_SHOWN_CHARS]
        if isinstance(self.value, list):
            return f"a list of {len(self.value)} values" if self.value else "an empty list"
        if self.value is None:
            return "nothing"
        text = (
            self.text if len(self.text) <= MAX_SHOWN_CHARS else self.text[:MAX_SHOWN_CHARS] + "..."
        )
        return repr(text) if isinstance(self.value, str) else text


class Source:
    """A parsed file: its text, its values, and what was wrong with its keys."""

    def __init__(self, file: str, text: str, root: Node, problems: list[tuple[Place, str]]) -> None:
        self.file = file
        self.text = text
        self.root = root
        self.problems = problems
        self.removed: list[Loc] = []

    def find(self, loc: Loc) -> tuple[Node, Loc]:
        """Find the deepest node on a way down, and what is left of the way there.

        Where one value stands for a list of one, the list's index is passed over.
        """
        node = self.root
        for depth, key in enumerate(loc):
            if isinstance(key, int) and not isinstance(node.value, list):
                continue
            child = node.child(key)
            if child is None:
                return node, loc[depth:]
            node = child
        return node, ()

    def remove(self, nodes: list[Node]) -> None:
        """Take values out, so that the rest can still be checked."""
        self.removed += [node.loc for node in nodes]
        gone = {id(node) for node in nodes}
        if id(self.root) in gone:
            self.root.value = {}
        _prune(self.root, gone)

    def remove_private(self) -> None:
        """Drop the top-level keys that start with ``x-``: room for anchors."""
        kept = {key: node for key, node in self.root.value.items() if not key.startswith("x-")}
        self.root.value = kept

    def damaged(self, *loc: Key) -> bool:
        """Whether something at, below or above a place was taken out."""
        return any(gone[: len(loc)] == loc or loc[: len(gone)] == gone for gone in self.removed)


def _prune(node: Node, gone: set[int]) -> None:
    if isinstance(node.value, dict):
        node.value = {k: child for k, child in node.value.items() if id(child) not in gone}
        for child in node.value.values():
            _prune(child, gone)
    elif isinstance(node.value, list):
        node.value = [child for child in node.value if id(child) not in gone]
        for child in node.value:
            _prune(child, gone)
