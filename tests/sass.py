"""Which memory a kernel's SASS reaches, and with what scope.

Every global access is traced back to the kernel parameter that its address came from, through
registers and over all paths: to the table of the ranks' segments, or to a pointer of this rank
alone. What is not understood raises, so that nothing is passed over.
"""

import re
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SEGMENT, OWN = "segment", "own"

# Register -> the parameters that its value came from.
State = dict[str, frozenset[str]]

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?\s*([A-Z0-9_.]+)\s*([^;]*);")
_LABEL = re.compile(r"^([.$][\w.$]+):")
_PREDICATE = re.compile(r"\bU?P\d\b")
_REGISTER = re.compile(r"\b(U?R)(\d+)\b")
_CONSTANT = re.compile(r"c\[0x([0-9a-f]+)\]\[(?:U?RZ|(U?R\d+)(?:\.\w+)?)?\+?(-?0x[0-9a-f]+)?\]")
_GLOBAL = ("LDG", "LD", "STG", "ST", "ATOMG", "ATOM", "REDG", "RED")


def _opcodes(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Neither change a general register nor reach memory that ranks share.
_SILENT = _opcodes(
    "BAR BRA BREAK BRX BSSY BSYNC CALL CCTL CGAERRBAR DEPBAR ELECT ENDCOLLECTIVE ERRBAR EXIT FCHK "
    "FENCE FSETP HGMMA ISETP MEMBAR NANOSLEEP NOP PLOP3 R2P RET STS STSM SYNCS UISETP UPLOP3 "
    "USETMAXREG "
    # Bulk copies: their tensor maps are of this rank's own memory.
    "UTMACMDFLUSH UTMALDG UTMASTG WARPGROUP WARPSYNC YIELD"
)
# Results that are no addresses: data, indices of threads, time.
_DATA = _opcodes(
    "ATOMS B2R BREV CS2R F2F F2FP F2I FADD FFMA FLO FMUL I2F I2FP LDS MATCH MUFU P2R POPC REDUX "
    "S2R S2UR SHFL UFLO VOTE VOTEU FMNMX FSEL HADD2"
)
# Results that come from the operands.
_ALU = _opcodes(
    "HFMA2 IABS IADD3 IMAD LDC LEA LOP3 MOV PRMT R2UR SEL SHF UIADD3 UIMAD ULDC ULEA ULOP3 UMOV "
    "UPRMT USEL USHF VIADD VIADDMNMX VIMNMX"
)


@dataclass(frozen=True)
class Parameters:
    """Where a kernel's argument struct has the segments' table and pointers; offsets in bytes."""

    num_bytes: int
    segments: range
    pointers: frozenset[int]


@dataclass(frozen=True)
class Access:
    """One global load, store or atomic; ``scope`` is SYS, GPU or weak."""

    text: str
    sources: frozenset[str]
    scope: str


@dataclass(frozen=True)
class Instruction:
    """One line of SASS; ``guard`` is its predicate."""

    text: str
    guard: str
    opcode: str
    operands: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]


@cache
def tool(name: str) -> Path:
    """A disassembler of the PyPI packages nvidia-cuda-nvdisasm and nvidia-cuda-cuobjdump."""
    import nvidia

    for root in nvidia.__path__:
        for found in sorted(Path(root).glob(f"**/bin/{name}")):
            return found
    raise FileNotFoundError(name)


def accesses(code: bytes, symbol: str, parameters: Parameters) -> list[Access]:
    """Every global access of the one kernel in a cubin."""
    base = constant_bytes(code, symbol) - parameters.num_bytes
    program, successors = _flow(_disassemble(code))
    states: list[State | None] = [None] * len(program)
    states[0] = {}
    waiting = [0]
    while waiting:
        at = waiting.pop()
        before = states[at]
        assert before is not None
        after = _step(program[at], before, base, parameters)
        for follower in successors[at]:
            known = states[follower]
            merged = after if known is None else _merge(known, after)
            if merged != known:
                states[follower] = merged
                waiting.append(follower)
    found = []
    for instruction, state in zip(program, states, strict=True):
        if state is not None and instruction.name in _GLOBAL:
            scope = re.search(r"STRONG\.(SYS|GPU|SM)", instruction.opcode)
            sources = _address_sources(instruction, state)
            found.append(Access(instruction.text, sources, scope[1] if scope else "weak"))
    return found


def constant_bytes(code: bytes, symbol: str) -> int:
    """Size of the kernel's constant bank 0, at whose end the parameters are (64-bit ELF)."""
    (table,) = struct.unpack_from("<Q", code, 40)
    size, count, names = struct.unpack_from("<HHH", code, 58)
    headers = [struct.unpack_from("<IIQQQQ", code, table + i * size) for i in range(count)]
    strings = headers[names][4]
    for name, _, _, _, _, num_bytes in headers:
        start = strings + name
        if code[start : code.index(b"\0", start)] == b".nv.constant0." + symbol.encode():
            return int(num_bytes)
    raise LookupError(f"no constant bank of {symbol}")


def _disassemble(code: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        done = subprocess.run(
            [tool("nvdisasm"), "-c", file.name], capture_output=True, text=True, check=True
        )
    return done.stdout


def _flow(text: str) -> tuple[list[Instruction], list[list[int]]]:
    """Instructions, and which may follow each."""
    program: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line.strip()):
            labels[label[1]] = len(program)
        elif match := _LINE.search(line):
            guard, opcode, rest = (match[2] or "").strip(), match[3], match[4]
            operands = tuple(part.strip() for part in re.split(r",\s*(?![^\[]*\])", rest))
            program.append(Instruction(match[0], guard, opcode, operands))
    joins: dict[str, set[int]] = {}
    for at, instruction in enumerate(program):
        if instruction.name == "CALL":
            joins.setdefault("CALL", set()).add(at + 1)
        if instruction.name == "BSSY":
            joins.setdefault(instruction.operands[0], set()).add(labels[_target(instruction)])
    return program, [
        _followers(instruction, at, labels, joins) for at, instruction in enumerate(program)
    ]


def _target(instruction: Instruction) -> str:
    match = re.search(r"`\(([^)]+)\)", instruction.text)
    assert match, f"no label: {instruction.text}"
    return match[1]


def _followers(
    instruction: Instruction, at: int, labels: dict[str, int], joins: dict[str, set[int]]
) -> list[int]:
    following = [at + 1]
    if instruction.name == "EXIT":
        return following if instruction.guard or instruction.operands[0] else []
    if instruction.name == "BRA":
        always = instruction.opcode == "BRA" and not instruction.guard
        target = labels[_target(instruction)]
        return [target] if always and len(instruction.operands) == 1 else [target, *following]
    if instruction.name == "BRX":
        targets = re.findall(r"[.$][\w.$]+", instruction.text.partition("BRANCH_TARGETS")[2])
        assert targets, f"no labels: {instruction.text}"
        return [*(labels[label] for label in targets), *(following if instruction.guard else [])]
    if instruction.name == "CALL":
        return [labels[_target(instruction)]]
    if instruction.name == "RET":
        # To whoever called any function of the kernel.
        return [*joins["CALL"], *(following if instruction.guard else [])]
    if instruction.name == "WARPSYNC" and "`(" in instruction.text:
        return [labels[_target(instruction)], *following]
    if instruction.name == "BSYNC":
        # Threads go on where the BSSY said; that is nearly always the next line.
        targets = joins[instruction.operands[0]]
        return following if at + 1 in targets else [*sorted(targets), at + 1]
    if instruction.name not in _SILENT | _DATA | _ALU | set(_GLOBAL):
        raise NotImplementedError(f"teach tests/sass.py: {instruction.text}")
    return following


def _step(instruction: Instruction, before: State, base: int, parameters: Parameters) -> State:
    """Sources of all registers after an instruction.

    Under the key "R4@!P0" is what R4 holds where its last write, guarded by @!P0, took place; it
    is dropped when P0 may change.
    """
    guard = instruction.guard
    changed = set(_PREDICATE.findall(" ".join(instruction.operands)))
    if instruction.name in ("R2P", "PLOP3"):
        changed = set(_PREDICATE.findall(" ".join(before)))
    after = {
        key: sources
        for key, sources in before.items()
        if not changed or not changed.intersection(_PREDICATE.findall(key))
    }
    sources: frozenset[str] = frozenset()
    if instruction.name in _ALU:
        for operand in instruction.operands[1:]:
            # The addend of a wide product is a pair.
            wide = ".WIDE" in instruction.opcode and operand is instruction.operands[-1]
            if operand.startswith("c["):
                sources |= _constant_sources(operand, base, parameters)
            else:
                sources |= _register_sources(operand, before, guard, 2 if wide else 1)
    for register in _written(instruction):
        after = {key: found for key, found in after.items() if not key.startswith(f"{register}@")}
        if guard:
            after[register + guard] = sources
            after[register] = sources | before.get(register, frozenset())
        else:
            after[register] = sources
    return after


def _written(instruction: Instruction) -> list[str]:
    """General and uniform registers that an instruction writes."""
    name, opcode = instruction.name, instruction.opcode
    if name in _SILENT | {"STG", "ST", "REDG", "RED"}:
        return []
    # Some have a predicate before their result; RZ as result is no register.
    results = [o for o in instruction.operands if not re.fullmatch(r"U?P(T|\d)", o)]
    if not results or not re.fullmatch(r"U?R\d+", results[0]):
        return []
    width = 1
    if ".128" in opcode:
        width = 4
    elif ".64" in opcode.replace("U64", "") or ".WIDE" in opcode or opcode == "CS2R":
        width = 2
    kind, number = _REGISTER.findall(results[0])[0]
    return [f"{kind}{int(number) + i}" for i in range(width)]


def _constant_sources(operand: str, base: int, parameters: Parameters) -> frozenset[str]:
    """What an operand in constant memory is: the segments' table, a pointer, or a plain value."""
    match = _CONSTANT.search(operand)
    if match is None:
        return frozenset()
    bank, index, offset = int(match[1], 16), match[2], int(match[3] or "0", 16) - base
    if bank != 0:
        return frozenset({OWN})  # addresses of the module's own globals
    if index:
        # The table of segments is all that is indexed.
        if not parameters.segments:
            raise NotImplementedError(
                f"an indexed constant of a kernel without segments: {operand}"
            )
        return frozenset({SEGMENT})
    if offset in parameters.segments:
        return frozenset({SEGMENT})
    return frozenset({OWN}) if offset & ~4 in parameters.pointers else frozenset()


def _register_sources(operand: str, state: State, guard: str, width: int) -> frozenset[str]:
    """Sources of the registers in an operand, as an instruction under ``guard`` finds them."""
    found: frozenset[str] = frozenset()
    for kind, number in _REGISTER.findall(operand):
        for i in range(width):
            register = f"{kind}{int(number) + i}"
            found |= state.get(register + guard, state.get(register, frozenset()))
    return found


def _address_sources(instruction: Instruction, state: State) -> frozenset[str]:
    """Sources of the address: the [..] that is not a descriptor."""
    address = re.search(r"\[([^\]]+)\]", re.sub(r"desc\[UR\d+\]", "", instruction.text))
    assert address, f"no address: {instruction.text}"
    return _register_sources(address[1], state, instruction.guard, 2)


def _merge(one: State, other: State) -> State:
    """What holds on either way; of guarded writes only what both ways have."""
    return {
        key: one.get(key, frozenset()) | other.get(key, frozenset())
        for key in one.keys() | other.keys()
        if "@" not in key or (key in one and key in other)
    }
