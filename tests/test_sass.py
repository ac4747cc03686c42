"""Every access to a rank's segment has system scope in the SASS, or is known to stay in one rank.

Ranks that share a GPU share its L2, which hides a missing scope: only reading the code shows it.
"""

import ctypes
import re
import shutil
from pathlib import Path

import pytest

from mokbench import jit

pytest.importorskip("cuda.core", reason="needs cuda-core: pip install 'mokbench[cuda]'")
pytest.importorskip("torch")
import sass
from shipped_kernels import SHIPPED, Shipped, mok_config

from mokbench.mok_config import SOURCE as MOK_SOURCE
from mokbench.systems.cuda_mok_workspace import MokArgs

# 64-bit arguments that are no pointers.
VALUES = {"wait_bound_ns", "spin_ns", "lead_ns"}


@pytest.fixture(scope="module", autouse=True)
def private_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOKBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        try:
            sass.tool("nvdisasm")
        except (ImportError, FileNotFoundError):
            pytest.skip("needs nvdisasm: pip install nvidia-cuda-nvdisasm")
        yield


def parameters_of(shipped: Shipped) -> sass.Parameters:
    segments, pointers = range(0), set()
    for name, kind in getattr(shipped.args, "_fields_", ()):
        offset = getattr(shipped.args, name).offset
        if name == "segments":
            segments = range(offset, offset + ctypes.sizeof(kind))
        elif kind is ctypes.c_uint64 and name not in VALUES:
            pointers.add(offset)
    return sass.Parameters(ctypes.sizeof(shipped.args), segments, frozenset(pointers))


def accesses_of(shipped: Shipped) -> list[sass.Access]:
    cubin = jit.build(shipped.source, shipped.expression, "sm_90a")
    return sass.accesses(cubin.code, cubin.symbol, parameters_of(shipped))


def problems_of(shipped: Shipped) -> list[str]:
    """Accesses of unknown origin, and accesses of segments with too narrow a scope."""
    allowed = {"SYS", "GPU"} if shipped.local else {"SYS"}
    found = []
    for access in accesses_of(shipped):
        if not access.sources:
            found.append(f"of unknown origin: {access.text}")
        elif sass.SEGMENT in access.sources and access.scope not in allowed:
            found.append(f"{access.scope} scope: {access.text}")
    return found


@pytest.mark.parametrize("shipped", SHIPPED, ids=lambda s: s.name[:40])
def test_segments_are_reached_with_system_scope(shipped):
    assert problems_of(shipped) == []
    reached = [a for a in accesses_of(shipped) if sass.SEGMENT in a.sources]
    assert bool(reached) == shipped.segments
    assert any(a.scope == "GPU" for a in reached) == shipped.local


def mutated(monkeypatch, tmp_path: Path, file: str, change) -> None:
    """Let the kernels be compiled from a copy in which one file was changed."""
    copy = tmp_path / "kernels"
    shutil.copytree(jit.kernel_root(), copy)
    path = copy / file
    before = path.read_text(encoding="utf-8")
    after = change(before)
    assert after != before, f"{file} has changed: adapt the mutant"
    path.write_text(after, encoding="utf-8")
    monkeypatch.setattr(jit, "kernel_root", lambda: copy)


def shipped_named(*names: str) -> list[Shipped]:
    return [next(s for s in SHIPPED if s.name.startswith(name)) for name in names]


SYSTEM_ASM = re.findall(
    r'asm volatile\("((?:ld|st|atom|red)\.[^" ]*\.sys\.[^" ]*)',
    (jit.kernel_root() / "ptx.cuh").read_text(encoding="utf-8"),
)
# Kernels that between them use all of ptx.cuh's system-scope instructions that any kernel uses.
MUTATED = ("signal_entry<2>", "push_give_back", "push_reduce")
# Of mok's pass alone, which MUTATED does not have: see problems_of_mok.
NOT_SHIPPED = {"red.release.sys.global.add.u32"}


def test_there_are_system_scope_instructions_to_mutate():
    assert len(SYSTEM_ASM) >= 9


@pytest.mark.parametrize("asm", SYSTEM_ASM)
@pytest.mark.parametrize("narrow", [".gpu", "weak"])
def test_a_narrower_scope_is_caught(asm, narrow, tmp_path, monkeypatch):
    if narrow == "weak":
        if asm.startswith(("atom", "red")):
            pytest.skip("an atomic is never weak")
        kind, *_, space = re.match(r"(ld|st)\.(\w+)\.sys(\.global.*)", asm).groups()
        weaker = kind + space
    else:
        weaker = asm.replace(".sys", ".gpu")
    mutated(monkeypatch, tmp_path, "ptx.cuh", lambda text: text.replace(f'"{asm} ', f'"{weaker} '))
    caught = any(problems_of(shipped) for shipped in shipped_named(*MUTATED))
    assert caught != (asm in NOT_SHIPPED)


def test_a_plain_access_of_a_peer_is_caught(tmp_path, monkeypatch):
    def plain(text: str) -> str:
        return text.replace(
            "pass.partial(a.rank, slot), kFromPeers", "pass.partial(a.rank, slot), kFromHere"
        )

    mutated(monkeypatch, tmp_path, "push/combine.cuh", plain)
    (reduce,) = shipped_named("push_reduce")
    assert any("weak" in problem for problem in problems_of(reduce))


def test_a_pointer_from_memory_is_not_passed_over(tmp_path, monkeypatch):
    def indirect(text: str) -> str:
        return text.replace(
            "a.began_ns[blockIdx.x] = began_ns;", "*(u64*)a.ended_ns[7] = began_ns;"
        )

    mutated(monkeypatch, tmp_path, "overlap.cuh", indirect)
    (probe,) = shipped_named("overlap_probe")
    assert any("unknown" in problem for problem in problems_of(probe))


# So long that the paths through it meet: of some addresses no more is known than that they are a
# segment's or this rank's own.
MOK = (MOK_SOURCE, mok_config((256, 192, 16, 4), ranks=4, tile_rows=32).expression)


def mok_accesses() -> list[sass.Access]:
    cubin = jit.build(*MOK, "sm_90a")
    shipped = Shipped(*MOK, MokArgs)
    own = parameters_of(shipped)
    maps = 1 + 2 * (2 + 32 // 16)
    num_bytes = -(-own.num_bytes // 64) * 64 + 128 * maps
    parameters = sass.Parameters(num_bytes, own.segments, own.pointers)
    return sass.accesses(cubin.code, cubin.symbol, parameters)


def problems_of_mok() -> list[str]:
    """Accesses of what is a segment for certain, with too narrow a scope."""
    return [
        f"{access.scope} scope: {access.text}"
        for access in mok_accesses()
        if access.sources == {sass.SEGMENT} and access.scope == "weak"
    ]


def test_mok_reaches_segments_with_scope():
    assert problems_of_mok() == []
    kinds = {(a.scope, "128" in a.text) for a in mok_accesses() if a.sources == {sass.SEGMENT}}
    assert {("SYS", True), ("SYS", False), ("GPU", False)} <= kinds


@pytest.mark.parametrize("asm", ["ld.relaxed.sys.global.v4.u32", "st.relaxed.sys.global.v4.u32"])
def test_a_row_of_mok_without_scope_is_caught(asm, tmp_path, monkeypatch):
    weaker = asm.replace(".relaxed.sys", "")
    mutated(monkeypatch, tmp_path, "ptx.cuh", lambda text: text.replace(f'"{asm} ', f'"{weaker} '))
    assert problems_of_mok()


def local_uses(text: str) -> list[str]:
    """Statements of a kernel source that access a counter with the scope of one rank."""
    code = re.sub(r"//.*", "", text)
    return [s for s in re.split(r"[;{}]", code) if "<Scope::kLocal>" in s]


# What is inside one rank: its own counters, and its own memory (push's grid barrier).
OWN_RANK = re.compile(r"agent\.rank|local_counter\(|\ba\.barrier\b")


ROOT = jit.kernel_root()
SOURCES = [ROOT / "protocol.h", *sorted(ROOT.glob("**/*.cuh"))]


def test_some_kernels_use_gpu_scope():
    used = {path.name for path in SOURCES if local_uses(path.read_text(encoding="utf-8"))}
    assert {"protocol.h", "signal.cuh", "pass.cuh"} <= used


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_gpu_scope_is_asked_for_the_own_rank_only(path):
    text = path.read_text(encoding="utf-8")
    uses = local_uses(text)
    assert [use for use in uses if not OWN_RANK.search(use)] == []
    # signal.cuh's own counters are those of the own rank, by this one function.
    if "local_counter(" in text:
        assert "return agent.counter(agent.rank, l.local, which);" in text


def test_gpu_scope_for_a_peer_is_caught():
    text = (jit.kernel_root() / "signal.cuh").read_text(encoding="utf-8")
    wrong = text.replace("store_release<Scope::kSystem>", "store_release<Scope::kLocal>")
    assert [use for use in local_uses(wrong) if not OWN_RANK.search(use)]
