import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mokbench import trace
from mokbench.errors import ConfigError
from mokbench.routing import RoutingSpec, generate
from mokbench.workload import Dtype, Model, Workload

# 2 layers, 3 tokens, k = 2, 8 experts.
IDS = np.array([[[0, 1], [2, 3], [4, 5]], [[7, 6], [5, 0], [-1, 3]]])
WEIGHTS = np.array([[[3, 1], [1, 1], [1, 3]], [[1, 1], [9, 1], [5, 2]]], dtype=np.float64)


def workload(path: Path, layer: int = 0, ranks: int = 2, tokens: int = 2, **spec: Any) -> Workload:
    return Workload(
        model=Model("test", 64, 64, 8, 2),
        ranks=ranks,
        tokens_per_rank=tokens,
        dtype=Dtype.BF16,
        routing=RoutingSpec.model_validate({"trace": str(path), "layer": layer, **spec}),
    )


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "recorded.npz"
    trace.write(path, IDS, WEIGHTS, model="test", experts=8)
    return path


def test_what_was_written_is_read(recorded: Path) -> None:
    layer = trace.read(recorded, 1, 8, 2)
    assert np.array_equal(layer.topk_idx, IDS[1])
    assert layer.topk_weights is not None
    assert layer.topk_weights.tolist() == [[1, 1], [9, 1], [0, 2]]  # masked weight dropped
    assert layer.topk_idx.dtype == np.int32
    assert list(recorded.parent.iterdir()) == [recorded]


def test_plain_numpy_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "plain.npz"
    np.savez(path, topk_idx=IDS.astype(np.int16), anything_else=np.zeros(3))
    layer = trace.read(path, 0, 8, 2)
    assert np.array_equal(layer.topk_idx, IDS[0])
    assert layer.topk_weights is None


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int64, np.uint64, ">i4"])
def test_every_integer_type_is_read(tmp_path: Path, dtype: Any) -> None:
    path = tmp_path / "plain.npz"
    np.savez(path, topk_idx=IDS[:1].astype(dtype))
    assert np.array_equal(trace.read(path, 0, 256, 2).topk_idx, IDS[0])


def test_tokens_go_to_ranks_in_order_and_wrap_around(recorded: Path) -> None:
    routing = generate(workload(recorded))
    assert routing.topk_idx[0].tolist() == [[0, 1], [2, 3]]
    assert routing.topk_idx[1].tolist() == [[4, 5], [0, 1]]
    assert routing.topk_weights[0].tolist() == [[0.75, 0.25], [0.5, 0.5]]
    assert routing.topk_weights[1].tolist() == [[0.25, 0.75], [0.75, 0.25]]


def test_uneven_ranks_take_as_many_tokens_as_they_have(recorded: Path) -> None:
    routing = generate(workload(recorded, tokens=2, empty_ranks=1))
    full = int(np.argmax(routing.num_tokens))
    assert routing.topk_idx[full].tolist() == [[0, 1], [2, 3]]
    assert routing.topk_idx[1 - full].shape == (0, 2)


def test_masked_tokens_stay_masked(recorded: Path) -> None:
    routing = generate(workload(recorded, layer=1, ranks=1, tokens=3))
    assert routing.topk_idx[0].tolist() == [[7, 6], [5, 0], [-1, 3]]
    assert routing.topk_weights[0][2].tolist() == [0.0, 1.0]


def test_seeded_weights_without_recorded_ones(tmp_path: Path) -> None:
    path = tmp_path / "plain.npz"
    trace.write(path, IDS)
    weights = generate(workload(path)).topk_weights[0]
    assert weights.sum(axis=1) == pytest.approx([1, 1])
    assert (weights > 0).all()


def test_the_file_decides_the_digest_its_path_does_not(recorded: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.npz"
    copy.write_bytes(recorded.read_bytes())
    digest = generate(workload(recorded)).digest()
    assert generate(workload(copy)).digest() == digest
    # The last token is not used by one rank with two tokens, but the trace is another one.
    changed = IDS.copy()
    changed[0, 2] = [7, 6]
    trace.write(copy, changed, WEIGHTS)
    one = generate(workload(recorded, ranks=1))
    other = generate(workload(copy, ranks=1))
    assert np.array_equal(one.topk_idx[0], other.topk_idx[0])
    assert one.digest() != other.digest()


def test_a_layer_is_loaded_once_until_the_file_changes(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = []
    load = trace._load

    def counted(path: str) -> Any:
        loads.append(path)
        return load(path)

    monkeypatch.setattr(trace, "_load", counted)
    first = trace.read(recorded, 0, 8, 2)
    assert trace.read(recorded, 0, 8, 2) is first
    trace.write(recorded, IDS[::-1])
    os.utime(recorded, ns=(1, 1))
    assert np.array_equal(trace.read(recorded, 0, 8, 2).topk_idx, IDS[1])
    assert len(loads) == 2


def test_placement_renames_recorded_experts(recorded: Path) -> None:
    work = workload(recorded)
    moved = generate(Workload(**{**vars(work), "placement": "round_robin"}))
    # Expert e goes to rank e % 2, slot e // 2; a rank holds 4.
    assert moved.topk_idx[0].tolist() == [[0, 4], [1, 5]]


def npz(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def archive(name: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(name, content)
    return buffer.getvalue()


def with_id(layer: int, token: int, k: int, value: int) -> bytes:
    ids = IDS.copy()
    ids[layer, token, k] = value
    return npz(topk_idx=ids)


def with_weight(value: float, dtype: str = "f8") -> bytes:
    weights = WEIGHTS.astype(dtype)
    weights[1, 1, 0] = value
    return npz(topk_idx=IDS, topk_weights=weights)


def corrupted() -> bytes:
    content = bytearray(npz(topk_idx=IDS))
    content[160] ^= 0xFF
    return bytes(content)


def huge_shape() -> bytes:
    head = b"{'descr': '<i4', 'fortran_order': False, 'shape': (1000, 1000000000, 1000), }"
    head += b" " * (63 - (10 + len(head)) % 64) + b"\n"
    npy = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + b"\0" * 64
    return archive("topk_idx.npy", npy)


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "not a whole npz file"),
    "text": (lambda: b"topk_idx: [1, 2]", "not a whole npz file"),
    "truncated": (lambda: npz(topk_idx=IDS)[:-30], "not a whole npz file"),
    "corrupted": (corrupted, "is damaged: Bad CRC|cannot be loaded"),
    "pickled": (lambda: npz(topk_idx=np.array([{}])), "cannot be loaded: Object arrays"),
    "pickled metadata": (
        lambda: npz(topk_idx=IDS, metadata=np.array({"experts": 8}, dtype=object)),
        "cannot be loaded: Object arrays",
    ),
    "not an npy": (lambda: archive("topk_idx", b"hello"), "topk_idx is not a numpy array"),
    "bad header": (lambda: archive("topk_idx.npy", b"\x93NUMPY\x01\x00\xff\xff{"), "cannot be"),
    "huge shape": (huge_shape, "cannot be loaded"),
    "other name": (lambda: npz(ids=IDS), "has no array topk_idx, found ids"),
    "float ids": (
        lambda: npz(topk_idx=IDS * 1.0),
        r"topk_idx is float64 \(2, 3, 2\); allowed: int",
    ),
    "bool ids": (lambda: npz(topk_idx=IDS > 0), "topk_idx is bool"),
    "one layer, no axis": (lambda: npz(topk_idx=IDS[0]), r"topk_idx is int64 \(3, 2\); allowed"),
    "no layers": (lambda: npz(topk_idx=IDS[:0]), "layer 1 is out of range"),
    "layer missing": (
        lambda: npz(topk_idx=IDS[:1]),
        "layer 1 is out of range; it has layers 0 to 0",
    ),
    "no tokens": (lambda: npz(topk_idx=IDS[:, :0]), "has no tokens"),
    "other k": (
        lambda: npz(topk_idx=IDS[:, :, :1]),
        "has 1 experts per token, the model's top_k is 2",
    ),
    "id too large": (
        lambda: with_id(1, 2, 1, 8),
        r"topk_idx\[layer 1, token 2, k 1\] is 8; allowed: 0 to 7, or -1 .*\(1 ids are",
    ),
    "id too small": (lambda: with_id(1, 0, 0, -2), r"\[layer 1, token 0, k 0\] is -2"),
    "id beyond int32": (lambda: with_id(1, 0, 0, 2**40), "is 1099511627776"),
    "expert twice": (
        lambda: with_id(1, 1, 1, 5),
        r"topk_idx\[layer 1, token 1\] has expert 5 twice: \[5, 5\]",
    ),
    "NaN weight": (
        lambda: with_weight(np.nan),
        r"\[layer 1, token 1, k 0\] is nan; allowed: finite",
    ),
    "infinite weight": (lambda: with_weight(np.inf), "is inf; allowed"),
    "weight beyond float32": (lambda: with_weight(1e300), "is inf; allowed"),
    "negative weight": (lambda: with_weight(-0.5), "is -0.5; allowed"),
    "integer weights": (lambda: with_weight(1, "i4"), "topk_weights is int32 .*allowed: float"),
    "weights of another shape": (
        lambda: npz(topk_idx=IDS, topk_weights=WEIGHTS[:, :2]),
        r"topk_weights is float64 \(2, 2, 2\); allowed: float with shape \(2, 3, 2\)",
    ),
    "weights all zero": (
        lambda: npz(topk_idx=IDS, topk_weights=WEIGHTS * 0),
        r"topk_weights\[layer 1, token 0\] are all 0",
    ),
    "other experts": (
        lambda: npz(topk_idx=IDS, metadata=np.array(json.dumps({"experts": 128}))),
        "was recorded with 128 experts, the model has 8",
    ),
    "metadata": (lambda: npz(topk_idx=IDS, metadata=np.array("{")), "metadata is not JSON"),
}


@pytest.mark.parametrize("content, message", HOSTILE.values(), ids=HOSTILE)
def test_hostile_files(tmp_path: Path, content: Callable[[], bytes], message: str) -> None:
    path = tmp_path / "hostile.npz"
    path.write_bytes(content())
    with pytest.raises(ConfigError, match=message) as caught:
        generate(workload(path, layer=1))
    assert str(caught.value).startswith(f"trace {path}: ")


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "cut.npz"
    trace.write(path, IDS, WEIGHTS)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError):
            trace.read(path, 0, 8, 2)


def test_only_the_layer_in_use_is_judged(tmp_path: Path) -> None:
    path = tmp_path / "half.npz"
    path.write_bytes(with_id(1, 0, 0, 99))
    assert np.array_equal(trace.read(path, 0, 8, 2).topk_idx, IDS[0])


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.npz: cannot be read: No such file"):
        trace.read(tmp_path / "nowhere.npz", 0, 8, 2)
    with pytest.raises(ConfigError, match="is not a file"):
        trace.read(tmp_path, 0, 8, 2)


@pytest.mark.parametrize(
    "ids, weights, message",
    [
        (IDS[0], None, r"integer \[layers, tokens, k\], not int64 \(3, 2\)"),
        (IDS * 1.0, None, "not float64"),
        (IDS - 2, None, "found -3 to 5"),
        (IDS + 2**40, None, "ids go from -1"),
        (IDS, WEIGHTS[0], r"must be float \(2, 3, 2\)"),
        (IDS, IDS, "must be float .*, not int64"),
    ],
)
def test_writer_refuses_what_the_reader_would(
    tmp_path: Path, ids: Any, weights: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        trace.write(tmp_path / "bad.npz", ids, weights)
    assert list(tmp_path.iterdir()) == []
