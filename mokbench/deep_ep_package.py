"""What deep_ep package is here, read from its files: importing it needs a GPU and loads NCCL."""

import ast
import re
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

NAMES = ("deep_ep", "deep-ep")


@dataclass(frozen=True)
class DeepEpPackage:
    """``elastic`` and ``legacy``: whether ElasticBuffer (2.x) and Buffer (1.x) are in it."""

    version: str | None
    elastic: bool
    legacy: bool

    @property
    def generation(self) -> str:
        """For people: ``second generation (ElasticBuffer)``."""
        if self.elastic:
            return "second generation (ElasticBuffer)"
        return "first generation (Buffer)" if self.legacy else "of unknown generation"


def find() -> DeepEpPackage | None:
    """The package that ``import deep_ep`` would take, None where there is none."""
    spec = find_spec("deep_ep")
    if spec is None or spec.origin is None:
        return None
    source = Path(spec.origin).read_text(encoding="utf-8")
    return read(source, next(filter(None, map(_installed, NAMES)), None))


def read(source: str, installed: str | None) -> DeepEpPackage:
    """From the text of its __init__.py and the version that its metadata tell, if any do."""
    names = _names(source)
    written = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)['\"]", source, re.MULTILINE)
    version = installed or (written[1] if written else None)
    return DeepEpPackage(version, "ElasticBuffer" in names, "Buffer" in names)


def _names(source: str) -> set[str]:
    """Every name that the module binds at its top level; what a comment says is none."""
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return set()
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return found


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
