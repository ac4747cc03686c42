"""The host twin's C++ extension, loaded when it is first used: ``load_twin().MokRank``.

``mokbench._twin`` lies beside this file in an installed package. A checkout that is not installed
has none; then the one of an installed mokbench of the same version is taken.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mokbench import __version__
from mokbench.errors import UnsupportedError

if TYPE_CHECKING:
    from mokbench._twin import ROLES as ROLES
    from mokbench._twin import SITES as SITES
    from mokbench._twin import Fault as Fault
    from mokbench._twin import MokRank as MokRank
    from mokbench._twin import PushRank as PushRank
    from mokbench._twin import SharedMemory as SharedMemory
    from mokbench._twin import SignalRank as SignalRank
    from mokbench._twin import TwinConfig as TwinConfig
    from mokbench._twin import copy_rate as copy_rate
    from mokbench._twin import gemm_layout as gemm_layout
    from mokbench._twin import gemm_tiles as gemm_tiles
    from mokbench._twin import layout as layout
    from mokbench._twin import mok_items as mok_items
    from mokbench._twin import mok_order as mok_order
    from mokbench._twin import mok_pass as mok_pass
    from mokbench._twin import segment_bytes as segment_bytes

_NAME = "mokbench._twin"


def load_twin() -> ModuleType:
    """Return the extension; raise UnsupportedError, with what to do, where there is none."""
    try:
        return _checked(importlib.import_module(_NAME))
    except ModuleNotFoundError as error:
        if error.name != _NAME:
            raise
    except ImportError as error:
        raise UnsupportedError(f"{_NAME} cannot be loaded: {error}; run 'pip install .'") from error
    for path in _candidates():
        module = _load_file(path)
        if module is not None:
            return module
    raise UnsupportedError(
        f"the host fabric needs {_NAME} {__version__}, which is not built for Python "
        f"{sys.version_info.major}.{sys.version_info.minor}; run 'pip install .' in the checkout"
    )


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(load_twin(), name)


def _checked(module: ModuleType) -> ModuleType:
    if module.__version__ != __version__:
        raise UnsupportedError(
            f"{module.__file__} is of version {module.__version__}, mokbench is {__version__}; "
            "run 'pip install .'"
        )
    return module


def _candidates() -> Iterator[Path]:
    here = Path(__file__).resolve().parent
    for entry in sys.path:
        folder = Path(entry or ".").resolve() / "mokbench"
        if folder != here and folder.is_dir():
            yield from (folder / f"_twin{suffix}" for suffix in EXTENSION_SUFFIXES)


def _load_file(path: Path) -> ModuleType | None:
    """Import the file, if it is there, under the extension's name; None for another version."""
    spec = importlib.util.spec_from_file_location(_NAME, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        return None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError:
        return None
    if module.__version__ != __version__:
        return None
    sys.modules[_NAME] = module
    sys.modules["mokbench"]._twin = module  # type: ignore[attr-defined]
    return module
