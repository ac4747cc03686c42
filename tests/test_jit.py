"""Kernels compile for the GPUs they are for, without one; the cache gives back what was stored."""

import ctypes
import hashlib
import shutil

import pytest
from shipped_kernels import CONFIG_KERNELS, GEMM_KERNELS, MOK_KERNELS, PUSH_KERNELS, SHIPPED

from mokbench import jit
from mokbench.errors import UnsupportedError
from mokbench.gemm_config import SOURCE, GemmConfig
from mokbench.mok_config import SOURCE as MOK_SOURCE
from mokbench.systems.cuda_mok_workspace import MokArgs

pytest.importorskip("cuda.core", reason="needs cuda-core: pip install 'mokbench[cuda]'")

FIRST = (SHIPPED[0].source, SHIPPED[0].expression)


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MOKBENCH_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "source, expression",
    [(s.source, s.expression) for s in SHIPPED] + PUSH_KERNELS + CONFIG_KERNELS,
)
def test_shipped_kernels_compile_without_spills(source, expression):
    cubin = jit.build(source, expression, "sm_90a")
    assert cubin.code[:4] == b"\x7fELF"
    assert cubin.symbol.startswith("_Z")
    assert cubin.resources.spill_store_bytes == 0
    assert cubin.resources.spill_load_bytes == 0
    # An object that refers into itself is kept in local memory, and polls then reload addresses.
    assert cubin.resources.stack_bytes == 0
    assert cubin.resources.wgmma_warnings == ()
    # 65536 registers of an SM over the 512 threads of the largest CTA.
    assert 0 < cubin.resources.registers <= 128


@pytest.fixture(scope="module")
def gemms(tmp_path_factory):
    """All of them, two at a time: they take seconds each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOKBENCH_CACHE", str(tmp_path_factory.mktemp("gemms")))
        kernels = GEMM_KERNELS + MOK_KERNELS
        return dict(zip(kernels, jit.build_all(kernels, "sm_90a"), strict=True))


@pytest.mark.parametrize("kernel", GEMM_KERNELS + MOK_KERNELS, ids=lambda kernel: kernel[1][-140:])
def test_gemms_compile_without_spills_and_serialised_wgmma(gemms, kernel):
    used = gemms[kernel].resources
    assert (used.spill_store_bytes, used.spill_load_bytes, used.stack_bytes) == (0, 0, 0)
    assert used.wgmma_warnings == ()
    # 65536 registers of an SM over 384 threads, whose roles share them out anew.
    assert used.registers <= 168


def test_serialised_wgmma_is_seen(tmp_path, monkeypatch):
    # Sums that are read while the tensor cores still make others of the same tile.
    copy = tmp_path / "kernels"
    shutil.copytree(jit.kernel_root(), copy)
    tile = copy / "gemm/tile.cuh"
    text = tile.read_text(encoding="utf-8")
    wait = "      ptx::wgmma_wait_group<0>();\n      if (!goes_on) break;"
    assert text.count(wait) == 1, "tile.cuh has changed: adapt the mutant"
    tile.write_text(text.replace(wait, "      if (!goes_on) break;"), encoding="utf-8")
    monkeypatch.setattr(jit, "kernel_root", lambda: copy)
    cubin = jit.build(SOURCE, GemmConfig().expression, "sm_90a")
    assert any("(C75" in warning for warning in cubin.resources.wgmma_warnings)


def test_the_cache_gives_back_what_was_compiled(monkeypatch):
    first = jit.build(*FIRST, "sm_90a")
    monkeypatch.setattr(jit, "_compile", lambda *_: pytest.fail("compiled again"))
    assert jit.build(*FIRST, "sm_90a") == first


def test_a_damaged_cache_entry_is_made_again(monkeypatch):
    first = jit.build(*FIRST, "sm_90a")
    again = []
    # NVRTC puts a random word into internal names, so two compilations differ in their bytes.
    monkeypatch.setattr(jit, "_compile", lambda *_: again.append(first) or first)
    (path,) = jit.cache_folder().glob("*.cubin")
    path.write_bytes(path.read_bytes()[:-1])
    assert jit.build(*FIRST, "sm_90a") == first
    assert len(again) == 1
    path.with_suffix(".json").write_text("{", encoding="utf-8")
    assert jit.build(*FIRST, "sm_90a") == first
    assert len(again) == 2
    assert jit.build(*FIRST, "sm_90a") == first
    assert len(again) == 2, "what was made again is stored"


@pytest.mark.parametrize(
    "entry",
    [
        "null",
        "7",
        "[]",
        "{}",
        "[" * 100_000,
        '{"sha256": null}',
        '{"sha256": "%s", "resources": null}',
        '{"sha256": "%s", "expression": "e", "symbol": "s", "log": "", "resources": [1]}',
    ],
    ids=["null", "number", "list", "empty", "deep", "no hash", "no resources", "a list of one"],
)
def test_a_malformed_cache_entry_is_absent(tmp_path, entry):
    path = tmp_path / "k.cubin"
    path.write_bytes(b"code")
    digest = hashlib.sha256(b"code").hexdigest()
    path.with_suffix(".json").write_text(entry.replace("%s", digest), encoding="utf-8")
    assert jit._read(path) is None


def no_home():
    raise RuntimeError("Could not determine home directory.")


def test_a_named_cache_needs_no_home(tmp_path, monkeypatch):
    monkeypatch.setattr(jit.Path, "home", no_home)
    assert jit.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("MOKBENCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert jit.cache_folder() == tmp_path / "xdg/mokbench"


def test_without_a_home_kernels_are_compiled_and_not_kept(monkeypatch):
    monkeypatch.setattr(jit.Path, "home", no_home)
    monkeypatch.delenv("MOKBENCH_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(jit, "_compile", lambda *named: named)
    monkeypatch.setattr(jit, "_write", lambda *_: pytest.fail("kept somewhere"))
    assert jit.build(*FIRST, "sm_90a") == (*FIRST, "sm_90a")


def test_a_change_of_any_source_is_another_kernel(tmp_path, monkeypatch):
    copy = tmp_path / "kernels"
    shutil.copytree(jit.kernel_root(), copy)
    monkeypatch.setattr(jit, "kernel_root", lambda: copy)
    jit.build(*FIRST, "sm_90a")
    header = copy / "protocol.h"
    header.write_text(header.read_text(encoding="utf-8") + "// changed\n", encoding="utf-8")
    jit.build(*FIRST, "sm_90a")
    assert len(list(jit.cache_folder().glob("*.cubin"))) == 2


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("x", encoding="utf-8")
    monkeypatch.setenv("MOKBENCH_CACHE", str(blocked))
    assert jit.build(*FIRST, "sm_90a").code


def test_an_error_carries_the_compilers_log():
    with pytest.raises(jit.CompileError, match="no_such_kernel"):
        jit.build("signal.cuh", "mokbench::no_such_kernel<2>", "sm_90a")


def test_spills_and_warnings_are_read_from_the_log():
    log = (
        "ptxas info    : Compiling entry function 'k' for 'sm_90a'\n"
        "    296 bytes stack frame, 564 bytes spill stores, 576 bytes spill loads\n"
        "ptxas info    : Used 64 registers, used 1 barriers, 1024 bytes smem\n"
        "ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are"
        " serialized\n"
    )
    found = jit.resources(log)
    assert (found.registers, found.stack_bytes) == (64, 296)
    assert (found.spill_store_bytes, found.spill_load_bytes) == (564, 576)
    assert found.static_shared_bytes == 1024
    assert len(found.wgmma_warnings) == 1


def test_no_compiler_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cuda.core", None)
    with pytest.raises(UnsupportedError, match="pip install"):
        jit.build(*FIRST, "sm_90a")


def test_structs_have_the_size_that_the_kernels_expect(tmp_path, monkeypatch):
    copy = tmp_path / "kernels"
    shutil.copytree(jit.kernel_root(), copy)
    monkeypatch.setattr(jit, "kernel_root", lambda: copy)
    structs = {shipped.args for shipped in SHIPPED if issubclass(shipped.args, ctypes.Structure)}
    structs.add(MokArgs)
    sizes = {struct.__name__: ctypes.sizeof(struct) for struct in structs}
    assert len(sizes) >= 5
    asserts = "\n".join(
        f"static_assert(sizeof(mokbench::{name}) == {size});" for name, size in sizes.items()
    )
    sources = sorted({shipped.source for shipped in SHIPPED} | {MOK_SOURCE})
    includes = "".join(f'#include "{source}"\n' for source in sources)
    text = f"{includes}{asserts}\n"
    (copy / "sizes.cuh").write_text(text + "__global__ void sizes() {}\n", encoding="utf-8")
    assert jit.build("sizes.cuh", "sizes", "sm_90a").code


def test_kernels_built_together_are_those_built_one_by_one():
    kernels = [(s.source, s.expression) for s in SHIPPED[:3]]
    found = jit.build_all(kernels, "sm_90a")
    assert [cubin.expression for cubin in found] == [expression for _, expression in kernels]
    assert found == [jit.build(*kernel, "sm_90a") for kernel in kernels]


def test_a_kernel_that_does_not_compile_stops_those_built_with_it():
    with pytest.raises(jit.CompileError, match="no_such_kernel"):
        jit.build_all([FIRST, (SHIPPED[0].source, "mokbench::no_such_kernel")], "sm_90a")
