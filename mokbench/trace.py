"""Routing traces: npz files of recorded top-k ids. docs/trace-format.md is the format.

Nothing in a file is trusted: pickled objects are refused, and every id, weight and shape is checked
before it is used. Errors are ConfigErrors that name the file, the array and the position.
"""

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mokbench.errors import ConfigError

if TYPE_CHECKING:
    from mokbench.workload import Cell

_FORMAT = "write it with mokbench.trace.write, see docs/trace-format.md"


@dataclass(frozen=True, eq=False)
class TraceLayer:
    """One layer of a trace: int32 [tokens, K] ids, float32 [tokens, K] weights if recorded.

    ``sha256`` is the hash of ids and weights, so two files with the same layer agree.
    """

    topk_idx: NDArray[np.int32]
    topk_weights: NDArray[np.float32] | None
    sha256: str


def write(
    path: str | os.PathLike[str],
    topk_idx: ArrayLike,
    topk_weights: ArrayLike | None = None,
    **metadata: str | float,
) -> None:
    """Write a trace: ids [layers, tokens, K] (-1 = masked), weights of the same shape or None.

    ``metadata`` is kept as JSON; ``experts=`` is compared with the model's when the trace is read.
    Raises ValueError for a wrong shape, dtype or id. The file appears whole or not at all.
    """
    ids = np.asarray(topk_idx)
    if ids.ndim != 3 or ids.dtype.kind not in "iu":
        raise ValueError(f"topk_idx must be integer [layers, tokens, k], not {_shape(ids)}")
    if ids.size and not (ids.min() >= -1 and ids.max() < 2**31):
        raise ValueError(f"ids go from -1 (masked) up, found {ids.min()} to {ids.max()}")
    arrays: dict[str, Any] = {"topk_idx": ids.astype(np.int32)}
    if metadata:
        arrays["metadata"] = np.array(json.dumps(metadata))
    if topk_weights is not None:
        weights = np.asarray(topk_weights)
        if weights.shape != ids.shape or weights.dtype.kind != "f":
            raise ValueError(f"topk_weights must be float {ids.shape}, not {_shape(weights)}")
        arrays["topk_weights"] = weights.astype(np.float32)
    target = Path(path)
    partial = target.with_name(target.name + ".partial")
    try:
        with partial.open("wb") as file:
            np.savez_compressed(file, **arrays)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def read(path: str | os.PathLike[str], layer: int, experts: int, top_k: int) -> TraceLayer:
    """One layer, checked against the model; cached until the file changes.

    Raises ConfigError: no such file, not a whole npz, pickled objects, wrong dtype or shape, layer
    or id out of range, an expert twice in a token's row, K or experts other than the model's, a
    weight that is NaN, infinite or negative, a token whose weights are all 0.
    """
    file = Path(path)
    try:
        state = file.stat()
        if not file.is_file():
            raise _bad(path, "is not a file")
        with file.open("rb"):
            pass
    except OSError as error:
        raise _bad(path, f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise _bad(path, f"cannot be read: {error}") from error
    return _read(str(path), layer, experts, top_k, (state.st_mtime_ns, state.st_size))


@lru_cache(maxsize=16)
def _read(path: str, layer: int, experts: int, top_k: int, _state: tuple[int, int]) -> TraceLayer:
    arrays = _load(path)
    ids = arrays["topk_idx"]
    if ids.dtype.kind not in "iu" or ids.ndim != 3:
        raise _bad(
            path, f"topk_idx is {_shape(ids)}; allowed: integer with shape [layers, tokens, k]"
        )
    num_layers, num_tokens, width = ids.shape
    if not 0 <= layer < num_layers:
        raise _bad(path, f"layer {layer} is out of range; it has layers 0 to {num_layers - 1}")
    if num_tokens == 0:
        raise _bad(path, "has no tokens; at least 1 is needed")
    if width != top_k:
        raise _bad(path, f"has {width} experts per token, the model's top_k is {top_k}")
    _check_metadata(path, arrays.get("metadata"), experts)
    _check_ids(path, ids[layer], layer, experts)
    chosen = np.ascontiguousarray(ids[layer], dtype="<i4")
    weights = arrays.get("topk_weights")
    if weights is not None:
        weights = _layer_weights(path, weights, ids.shape, chosen, layer)
    digest = hashlib.sha256(repr(chosen.shape).encode() + chosen.tobytes())
    if weights is not None:
        digest.update(weights.tobytes())
    return TraceLayer(chosen, weights, digest.hexdigest())


def _load(path: str) -> dict[str, NDArray[Any]]:
    """Read the arrays that the format names and no others."""
    if not zipfile.is_zipfile(path):
        raise _bad(path, f"is not a whole npz file (cut short, or another format); {_FORMAT}")
    try:
        with np.load(path, allow_pickle=False) as file:
            names = [n for n in ("topk_idx", "topk_weights", "metadata") if n in file.files]
            if "topk_idx" not in names:
                found = ", ".join(file.files) or "nothing"
                raise _bad(path, f"has no array topk_idx, found {found}; {_FORMAT}")
            arrays = {name: file[name] for name in names}
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError) as error:
        raise _bad(path, f"is damaged: {error}; {_FORMAT}") from error
    except ConfigError:
        raise
    except Exception as error:
        # numpy and the decompressors raise whatever damaged bytes lead them to.
        raise _bad(path, f"cannot be loaded: {error or type(error).__name__}; {_FORMAT}") from error
    # A member that is not an npy stream comes back as bytes.
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise _bad(path, f"{name} is not a numpy array; {_FORMAT}")
    return arrays


def _check_metadata(path: str, metadata: NDArray[Any] | None, experts: int) -> None:
    if metadata is None:
        return
    try:
        recorded = json.loads(str(metadata[()]))
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"metadata is not JSON: {error}") from error
    found = recorded.get("experts") if isinstance(recorded, dict) else None
    if found is not None and found != experts:
        raise _bad(path, f"was recorded with {found} experts, the model has {experts}")


def _check_ids(path: str, ids: NDArray[Any], layer: int, experts: int) -> None:
    outside = np.argwhere((ids < -1) | (ids >= experts))
    if len(outside):
        token, k = outside[0]
        raise _bad(
            path,
            f"topk_idx[layer {layer}, token {token}, k {k}] is {ids[token, k]}; allowed: 0 to "
            f"{experts - 1}, or -1 for a masked route ({len(outside)} ids are out of range)",
        )
    ordered = np.sort(ids.astype(np.int64), axis=1)
    repeated = np.argwhere((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0))
    if len(repeated):
        token, k = repeated[0]
        raise _bad(
            path,
            f"topk_idx[layer {layer}, token {token}] has expert {ordered[token, k]} twice: "
            f"{ids[token].tolist()}; a token's experts must differ",
        )


def _layer_weights(
    path: str, weights: NDArray[Any], shape: tuple[int, ...], ids: NDArray[np.int32], layer: int
) -> NDArray[np.float32]:
    if weights.dtype.kind != "f" or weights.shape != shape:
        raise _bad(path, f"topk_weights is {_shape(weights)}; allowed: float with shape {shape}")
    with np.errstate(over="ignore"):  # too large for float32 is inf, refused below
        chosen = weights[layer].astype("<f4")
    live = ids >= 0
    wrong = np.argwhere(live & ~(np.isfinite(chosen) & (chosen >= 0)))
    if len(wrong):
        token, k = wrong[0]
        raise _bad(
            path,
            f"topk_weights[layer {layer}, token {token}, k {k}] is {chosen[token, k]}; "
            "allowed: finite and not negative",
        )
    chosen = np.where(live, chosen, np.float32(0))
    zero = np.flatnonzero(live.any(axis=1) & ~(chosen.max(axis=1, initial=0) > 0))
    if len(zero):
        raise _bad(path, f"topk_weights[layer {layer}, token {zero[0]}] are all 0")
    return chosen


def _shape(array: NDArray[Any]) -> str:
    return f"{array.dtype} {array.shape}"


def _bad(path: str | os.PathLike[str], problem: str) -> ConfigError:
    return ConfigError([f"trace {os.fspath(path)}: {problem}"])


def check(cells: Iterable["Cell"]) -> None:
    """Read every trace once: a bad file is a bad config, not a failed row. Raises ConfigError."""
    wanted = {
        (spec.trace, spec.layer or 0, model.experts, model.top_k)
        for spec, model in ((c.workload.routing, c.workload.model) for c in cells)
        if spec.trace is not None
    }
    problems: list[str] = []
    for path, layer, experts, top_k in sorted(wanted):
        try:
            read(path, layer, experts, top_k)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
