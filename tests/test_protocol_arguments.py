"""What the twin refuses, and how it says so."""

import errno
import re
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest

from mokbench.twin import load_twin

SHAPE = {
    "num_ranks": 1,
    "num_experts": 4,
    "top_k": 2,
    "max_tokens": 8,
    "hidden": 16,
    "intermediate": 8,
    "element_bytes": 4,
    "block_m": 4,
}


@pytest.fixture
def name():
    made = f"mokbench-test-{uuid.uuid4().hex[:12]}"
    yield made
    Path("/dev/shm", made).unlink(missing_ok=True)


def make(protocol, name, shape=SHAPE, **changes):
    """A rank of a one-rank workspace whose GEMMs copy: y is x * sum of weights."""
    twin = load_twin()
    config = twin.TwinConfig(**shape)
    memory = twin.SharedMemory(name, twin.segment_bytes(protocol, config), True)
    memory.unlink()
    element = np.float32 if config.element_bytes == 4 else np.uint16
    if protocol == "mok":
        rows, kind = (16, 8, 4), twin.MokRank
    else:
        rows, kind = (twin.PushRank.capacity_rows(config), 4, 8), twin.PushRank
        rows = (rows[0], 4, rows[0])
    names = ("x_ring", "hidden_ring", "y_tile")
    if protocol == "push":
        names = ("x_rows", "hidden_tile", "y_rows")
    widths = (config.hidden, config.intermediate, config.hidden)
    arrays = {
        n: np.zeros(s, element) for n, s in zip(names, zip(rows, widths, strict=True), strict=True)
    }
    arguments = {"rank": 0, "wait_bound_s": 5.0, **arrays, **changes}
    nothing = lambda expert, in_row, out_row, rows: None  # noqa: E731
    return kind(memory, config, gemm1=nothing, gemm2=nothing, **arguments)


def inputs(tokens=3, hidden=16, top_k=2):
    x = np.ones((tokens, hidden), np.float32)
    idx = np.tile(np.arange(top_k, dtype=np.int32), (tokens, 1))
    return {
        "x": x,
        "topk_idx": idx,
        "topk_weights": np.ones((tokens, top_k), np.float32),
        "y": x.copy(),
    }


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_experts": 5, "num_ranks": 2}, "num_experts is 5; allowed are multiples of 2"),
        ({"num_ranks": 0}, "num_ranks is 0; allowed are 1 to 128"),
        ({"num_experts": 1028}, "num_experts is 1028; allowed are 1 to 1024"),
        ({"top_k": 5}, "top_k is 5; allowed are 1 to 4"),
        ({"top_k": 17, "num_experts": 64}, "top_k is 17; allowed are 1 to 16"),
        ({"max_tokens": 0}, "max_tokens is 0; allowed are 1 to"),
        ({"hidden": 12}, "hidden is 12; allowed are multiples of 8"),
        ({"intermediate": 0}, "intermediate is 0; allowed are 8 to"),
        ({"element_bytes": 8}, r"element_bytes is 8; allowed are 2 \(BF16\) and 4 \(FP32\)"),
        ({"block_m": 257}, "block_m is 257; allowed are 1 to 256"),
        ({"ring_tiles": 0}, "ring_tiles is 0; allowed are 1 to 64"),
        ({"hidden_ring_tiles": 65}, "hidden_ring_tiles is 65; allowed are 1 to 64"),
        ({"pull_workers": 0}, "pull_workers is 0; allowed are 1 to 16"),
        ({"hidden": -8}, "hidden is -8; allowed are whole numbers"),
        (
            {"num_ranks": 16, "num_experts": 16, "top_k": 16, "max_tokens": 2**24},
            "num_ranks \\* max_tokens \\* top_k is 4294967296; allowed are 1 to 2147483647",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_config(changes, text):
    with pytest.raises(ValueError, match=text):
        load_twin().TwinConfig(**{**SHAPE, **changes})


BAD_INPUTS = [
    ({"x": np.ones((9, 16), np.float32)}, "x has 9 tokens and max_tokens is 8; .* at least 9"),
    ({"x": np.ones((3, 8), np.float32)}, r"x has shape \[3, 8\]; it needs \[T, 16\]"),
    ({"x": np.ones((3, 16), np.float64)}, "x is of float64; element_bytes 4 needs float32"),
    ({"x": np.ones((3, 32), np.float32)[:, ::2]}, "x is not contiguous"),
    ({"x": np.ones(16, np.float32)}, r"x has shape \[16\]"),
    ({"topk_idx": np.zeros((3, 2), np.int64)}, "topk_idx is of int64; it needs int32"),
    ({"topk_idx": np.zeros((2, 2), np.int32)}, "topk_idx has 2 tokens, x has 3"),
    (
        {"topk_idx": np.array([[0, 1]] * 2 + [[0, 4]], np.int32)},
        r"topk_idx\[2\]\[1\] is 4; allowed",
    ),
    ({"topk_idx": np.array([[0, -2]] * 3, np.int32)}, r"topk_idx\[0\]\[1\] is -2; allowed"),
    (
        {"topk_idx": np.array([[2, 2]] * 3, np.int32)},
        r"topk_idx\[0\]\[1\] is 2 as is another route",
    ),
    ({"topk_weights": np.ones((3, 3), np.float32)}, r"topk_weights has shape \[3, 3\]"),
    ({"topk_weights": np.ones((3, 2), np.float16)}, "topk_weights is of float16; it needs float32"),
    ({"y": np.ones((4, 16), np.float32)}, "y has 4 rows; it needs 3"),
]


@pytest.mark.parametrize("protocol", ["mok", "push"])
@pytest.mark.parametrize(("bad", "text"), BAD_INPUTS, ids=range(len(BAD_INPUTS)))
def test_bad_inputs_leave_the_rank_usable(protocol, name, bad, text):
    rank = make(protocol, name)
    with pytest.raises(ValueError, match=text):
        rank.run(**{**inputs(), **bad})
    good = inputs()
    rank.run(**good)
    assert np.array_equal(good["y"], np.zeros((3, 16)))
    rank.close()


def test_read_only_inputs_are_welcome_and_a_read_only_output_is_not(name):
    rank = make("mok", name)
    given = inputs()
    for key in ("x", "topk_idx", "topk_weights"):
        given[key].flags.writeable = False
    rank.run(**given)
    given["y"].flags.writeable = False
    with pytest.raises(TypeError):
        rank.run(**given)


@pytest.mark.parametrize(
    ("protocol", "bad", "text"),
    [
        ("mok", {"x_ring": np.zeros((15, 16), np.float32)}, "x_ring has 15 rows; it needs 16"),
        ("mok", {"hidden_ring": np.zeros((8, 16), np.float32)}, "hidden_ring has shape"),
        ("mok", {"y_tile": np.zeros((4, 16), np.uint16)}, "y_tile is of uint16"),
        ("push", {"x_rows": np.zeros((15, 16), np.float32)}, "x_rows has 15 rows; it needs 16"),
        ("push", {"y_rows": np.zeros((17, 16), np.float32)}, "y_rows has 17 rows; it needs 16"),
        ("push", {"hidden_tile": np.zeros((5, 8), np.float32)}, "hidden_tile has 5 rows"),
        ("mok", {"rank": 1}, "rank is 1; allowed are 0 to 0"),
        ("mok", {"wait_bound_s": 0.0}, "wait_bound_s is 0.000000; allowed are more than 0"),
        ("mok", {"wait_bound_s": float("nan")}, "wait_bound_s is nan"),
        ("push", {"max_delay_us": -1.0}, "max_delay_us is -1"),
    ],
)
def test_bad_buffers_and_options(name, protocol, bad, text):
    with pytest.raises(ValueError, match=text):
        make(protocol, name, **bad)


def test_bf16_tensors_and_other_16_bit_types(name):
    torch = pytest.importorskip("torch")
    rank = make("mok", name, {**SHAPE, "element_bytes": 2})
    given = inputs()
    given["x"] = torch.ones(3, 16, dtype=torch.bfloat16)
    given["y"] = torch.ones(3, 16, dtype=torch.bfloat16)
    rank.run(**given)
    assert torch.equal(given["y"], torch.zeros(3, 16, dtype=torch.bfloat16))
    given["x"] = torch.ones(3, 16, dtype=torch.float16)
    with pytest.raises(ValueError, match="x is of float16; element_bytes 2 needs bfloat16"):
        rank.run(**given)


def test_memory_of_the_wrong_size(name):
    twin = load_twin()
    config = twin.TwinConfig(**SHAPE)
    memory = twin.SharedMemory(name, twin.segment_bytes("mok", config) + 4096, True)
    config = twin.TwinConfig(**{**SHAPE, "max_tokens": 64})
    buffers = [np.zeros(s, np.float32) for s in ((16, 16), (8, 8), (4, 16))]
    with pytest.raises(ValueError, match=r"has 12288 bytes; 1 segments of (\d+) bytes need \1"):
        twin.MokRank(memory, config, 0, print, print, *buffers, 5.0)


def test_closed_rank_and_closed_memory(name):
    twin = load_twin()
    rank = make("push", name)
    rank.close()
    rank.close()
    with pytest.raises(RuntimeError, match="this rank is closed"):
        rank.run(**inputs())
    memory = twin.SharedMemory(name, 2**20, True)
    memory.close()
    with pytest.raises(ValueError, match="is closed"):
        twin.SignalRank(memory, 1, 0, 1.0)


def test_rank_outlives_the_callers_memory_object(name):
    """make() keeps no reference to its SharedMemory; the rank's mapping stays."""
    rank = make("mok", name)
    for _ in range(3):
        rank.run(**inputs())


def test_python_ends_cleanly_with_ranks_still_open():
    """Role threads keep a Python state after their first callback; one rank is part of a cycle."""
    code = (
        "import test_protocol_arguments as t, os\n"
        "open_rank = t.make('mok', f'mokbench-test-{os.getpid()}')\n"
        "open_rank.run(**t.inputs())\n"
        "cycle = [t.make('mok', f'mokbench-test-{os.getpid()}')]\n"
        "cycle.append(cycle); cycle[0].run(**t.inputs()); del cycle\n"
        "t.make('mok', f'mokbench-test-{os.getpid()}').run(**t.inputs())\n"
        "print('end')"
    )
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {folders}\n{code}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_second_thread_is_refused(name):
    twin = load_twin()
    config = twin.TwinConfig(**SHAPE)
    memory = twin.SharedMemory(name, twin.segment_bytes("push", config), True)
    refused = []

    def gemm(*_):
        try:
            rank.reset()
        except RuntimeError as error:
            refused.append(str(error))

    buffers = [np.zeros(s, np.float32) for s in ((16, 16), (4, 8), (16, 16))]
    rank = twin.PushRank(memory, config, 0, gemm, lambda *_: None, *buffers, 5.0)
    rank.run(**inputs())
    assert refused
    assert set(refused) == {"this rank is in use by another thread"}


def test_shared_memory_is_seen_under_its_name_until_unlinked(name):
    twin = load_twin()
    memory = twin.SharedMemory(name, 8192, True)
    assert memory.size == 8192
    file = Path("/dev/shm", name)
    assert file.stat().st_size == 8192
    assert file.stat().st_blocks * 512 == 8192  # every page is there
    assert file.stat().st_mode & 0o077 == 0
    with pytest.raises(FileExistsError):
        twin.SharedMemory(name, 8192, True)
    with pytest.raises(ValueError, match="has 8192 bytes, not the 4096 that this rank needs"):
        twin.SharedMemory(name, 4096, False)
    attached = twin.SharedMemory(f"/{name}", 8192, False)
    memory.unlink()
    assert not file.exists()
    assert attached.size == 8192
    for call in (memory.unlink, lambda: twin.SharedMemory(name, 8192, False)):
        with pytest.raises(FileNotFoundError):
            call()


def test_full_shared_memory_says_what_it_needs_and_has(name):
    free = shutil.disk_usage("/dev/shm").free
    size = free + 2**30
    with pytest.raises(OSError, match=f"needs {size} bytes") as caught:
        load_twin().SharedMemory(name, size, True)
    assert caught.value.errno == errno.ENOSPC
    available = int(re.search(r"and (\d+) are available", str(caught.value)).group(1))
    assert abs(available - free) < 2**30
    assert not Path("/dev/shm", name).exists()


@pytest.mark.parametrize("bad", ["", "/", "a/b", "x" * 251])
def test_bad_memory_names(bad):
    with pytest.raises(ValueError, match="allowed are 1 to 250 characters"):
        load_twin().SharedMemory(bad, 4096, True)


def test_copy_rate():
    twin = load_twin()
    for kind in ("memcpy", "pull", "push"):
        rates = twin.copy_rate(kind, 4096, 64, 5)
        assert len(rates) == 5
        assert all(0.01 < rate < 10000 for rate in rates)
    with pytest.raises(ValueError, match="kind is 'cp'; allowed are memcpy, pull and push"):
        twin.copy_rate("cp", 4096, 64, 5)
    with pytest.raises(ValueError, match="allowed are 1 byte to 4 GiB"):
        twin.copy_rate("pull", 2**40, 2**40, 1)


def test_names_of_roles_and_sites():
    twin = load_twin()
    assert twin.ROLES == ("caller", "pull", "gemm1", "gemm2", "observer")
    assert twin.SITES[:2] == ("entry", "schedule")
    assert len(set(twin.SITES)) == 12
