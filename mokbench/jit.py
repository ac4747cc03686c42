"""NVRTC compilation of the kernels, an on-disk cache of cubins, and what ptxas said about each.

Compiling needs no GPU and no driver, so every kernel a machine may need can be compiled, and its
resources checked, anywhere. A kernel is named by its C++ expression, for example
``mokbench::push_dispatch<mokbench::Config{.num_ranks=4}>``; that name is the cache's as well.
"""

import hashlib
import io
import json
import os
import re
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from mokbench.errors import MokbenchError, UnsupportedError

_OPTIONS = ("--std=c++20", "--ptxas-options=-v,--warn-on-spills", "--generate-line-info")
# Ranks of one host compile at the same time, each for itself.
_MAX_COMPILERS = 8
# ptxas warnings about wgmma that the hardware then runs one after another.
_SERIALISED = re.compile(r"\(C75\d\d\)[^\n]*")
_USAGE = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers"
    r"(?:[^\n]*?(?P<shared>\d+) bytes smem)?",
    re.S,
)
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.M)


class CompileError(MokbenchError):
    """NVRTC refused a kernel; the message holds its log."""


@dataclass(frozen=True)
class Resources:
    """What one kernel uses, from ptxas; bytes a thread for stack and spills, a CTA for shared."""

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_shared_bytes: int
    wgmma_warnings: tuple[str, ...]


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel: its code, the mangled symbol of ``expression``, and its resources."""

    expression: str
    symbol: str
    code: bytes
    resources: Resources
    log: str


_ABOUT, _CUBIN = TypeAdapter(dict[str, Any]), TypeAdapter(Cubin)


def kernel_root() -> Path:
    """The folder with the kernels' sources, in an installed package and in a checkout."""
    installed = Path(__file__).parent / "kernels"
    return installed if installed.is_dir() else Path(__file__).parents[1] / "kernels"


def cache_folder() -> Path | None:
    """MOKBENCH_CACHE, else mokbench under the user's cache folder; None where there is no home."""
    if chosen := os.environ.get("MOKBENCH_CACHE"):
        return Path(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "mokbench"
    try:
        return Path.home() / ".cache" / "mokbench"
    except RuntimeError:  # a user without an entry, in a container without HOME
        return None


def build(source: str, expression: str, arch: str) -> Cubin:
    """The cubin of ``expression`` in ``source`` (a path under kernels/), from the cache if there.

    ``arch`` is for example sm_90a. Raises CompileError with NVRTC's log, UnsupportedError where
    cuda-core or NVRTC is missing.
    """
    nvrtc = _nvrtc_version()
    folder = cache_folder()
    if folder is None:
        return _compile(source, expression, arch)
    path = folder / f"{_key(source, expression, arch, nvrtc)}.cubin"
    cached = _read(path)
    if cached is None:
        cached = _compile(source, expression, arch)
        _write(path, cached)
    return cached


def build_all(kernels: Sequence[tuple[str, str]], arch: str) -> list[Cubin]:
    """``build`` of each (source, expression), in order, several at a time: NVRTC frees the GIL."""
    # cuda-core is imported here once: threads that import it together wait for each other.
    _nvrtc_version()
    with ThreadPoolExecutor(min(_MAX_COMPILERS, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda kernel: build(kernel[0], kernel[1], arch), kernels))


def _key(source: str, expression: str, arch: str, nvrtc: str) -> str:
    digest = hashlib.sha256(repr((expression, arch, nvrtc, _OPTIONS)).encode())
    for name, text in sorted(sources_of(source).items()):
        digest.update(f"{name}\0{text}\0".encode())
    return digest.hexdigest()[:32]


def sources_of(source: str) -> dict[str, str]:
    """The file and all it includes from kernels/, name -> text."""
    found: dict[str, str] = {}
    waiting = [source]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = (kernel_root() / name).read_text(encoding="utf-8")
            waiting += _INCLUDE.findall(found[name])
    return found


def _compile(source: str, expression: str, arch: str) -> Cubin:
    program, options_class = _core()
    options = options_class(
        name="kernel.cu",
        arch=arch,
        std="c++20",
        include_path=[str(kernel_root())],
        ptxas_options=["-v", "--warn-on-spills"],
        lineinfo=True,
        # Generic lambdas cannot carry __device__.
        device_as_default_execution_space=True,
        no_cache=True,
    )
    log = io.StringIO()
    text = f'#include "{source}"\n'
    try:
        code = program(text, "c++", options).compile(
            "cubin", name_expressions=(expression,), logs=log
        )
    except Exception as error:
        # cuda-core raises its own NVRTCError, and RuntimeError in older releases.
        raise CompileError(
            f"{source}: {expression} does not compile for {arch}:\n{log.getvalue()}\n{error}"
        ) from error
    symbol = code.symbol_mapping[expression]
    symbol = symbol.decode() if isinstance(symbol, bytes) else symbol
    said = log.getvalue().rstrip("\0 \n")
    return Cubin(expression, symbol, bytes(code.code), resources(said), said)


def resources(log: str) -> Resources:
    """Resources of the one kernel in a compile log; raises CompileError without a report."""
    found = _USAGE.search(log)
    if found is None:
        raise CompileError(f"ptxas reported no resources:\n{log}")
    return Resources(
        registers=int(found["registers"]),
        stack_bytes=int(found["stack"]),
        spill_store_bytes=int(found["stores"]),
        spill_load_bytes=int(found["loads"]),
        static_shared_bytes=int(found["shared"] or 0),
        wgmma_warnings=tuple(_SERIALISED.findall(log)),
    )


def _read(path: Path) -> Cubin | None:
    """A cached kernel; None when it is not there or not whole, and is then made again."""
    try:
        about = _ABOUT.validate_json(path.with_suffix(".json").read_bytes())
        code = path.read_bytes()
        if hashlib.sha256(code).hexdigest() != about.get("sha256"):
            return None
        return _CUBIN.validate_python({**about, "code": code})
    except (OSError, ValueError):  # pydantic's ValidationError is a ValueError
        return None


def _write(path: Path, cubin: Cubin) -> None:
    """Store a kernel for the other ranks and later runs; a cache that cannot be written is none."""
    about = asdict(cubin)
    code = about.pop("code")
    about["sha256"] = hashlib.sha256(code).hexdigest()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, code)
        _replace(path.with_suffix(".json"), json.dumps(about).encode())
    except OSError:
        return


def _replace(path: Path, content: bytes) -> None:
    """Write whole or not at all: ranks may store the same kernel at the same time."""
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _core() -> tuple[Any, Any]:
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise UnsupportedError(
            f"kernels are compiled with cuda-core, which is missing here ({error}); "
            "run: pip install 'mokbench[cuda]'"
        ) from error
    return Program, ProgramOptions


def _nvrtc_version() -> str:
    _core()
    from cuda.bindings import nvrtc

    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise UnsupportedError(
            f"NVRTC is missing here ({error}); run: pip install 'mokbench[cuda]'"
        ) from error
    return f"{major}.{minor}"
