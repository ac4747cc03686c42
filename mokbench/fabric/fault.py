"""The fault record that a kernel leaves at the head of its segment, read back and raised."""

import re
import struct
from functools import lru_cache
from typing import Any

from mokbench.errors import MokbenchError
from mokbench.jit import kernel_root

# FaultRecord of protocol.h: ten u32, then waited_ns.
_RECORD = struct.Struct("<10IQ")
RECORD_BYTES = _RECORD.size
_COMPLETE = 2


class FaultError(MokbenchError):
    """A bounded wait of a kernel expired; ``record`` holds the fields, ``waited_s`` in seconds."""

    def __init__(self, record: dict[str, Any]) -> None:
        super().__init__(
            f"rank {record['rank']}: role {record['role']} gave up at site {record['site']}"
            f"[{record['slot']}] after {record['waited_s']:.3f} s (expected {record['expected']}, "
            f"observed {record['observed']}, epoch {record['epoch']}): "
            f"rank {record['late_rank']} is late"
        )
        self.record = record


def parse(head: bytes) -> dict[str, Any] | None:
    """The record in the first ``RECORD_BYTES`` of a segment, or None where no wait expired."""
    state, rank, role, site, slot, expected, observed, late, epoch, _, waited_ns = _RECORD.unpack(
        head[:RECORD_BYTES]
    )
    if state != _COMPLETE:
        return None
    return {
        "rank": rank,
        "role": names("kRoleNames")[role],
        "site": names("kSiteNames")[site],
        "slot": slot,
        "expected": expected,
        "observed": observed,
        "late_rank": late,
        "epoch": epoch,
        "waited_s": waited_ns / 1e9,
    }


@lru_cache
def names(table: str) -> tuple[str, ...]:
    """A table of names of protocol.h, which is the only place where they are written."""
    text = (kernel_root() / "protocol.h").read_text(encoding="utf-8")
    found = re.search(table + r"\[\]\s*=\s*\{([^}]*)\}", text)
    assert found is not None, f"{table} is not in protocol.h"
    return tuple(re.findall(r'"([^"]+)"', found[1]))
