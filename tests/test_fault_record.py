"""The fault record of a segment, as Python reads it."""

import struct

from mokbench.fabric.fault import RECORD_BYTES, FaultError, names, parse


def head(state: int) -> bytes:
    return struct.pack("<10IQ", state, 3, 1, 2, 5, 7, 6, 2, 9, 0, 1_500_000_000)


def test_a_complete_record_names_everything():
    record = parse(head(2))
    assert record == {
        "rank": 3,
        "role": names("kRoleNames")[1],
        "site": names("kSiteNames")[2],
        "slot": 5,
        "expected": 7,
        "observed": 6,
        "late_rank": 2,
        "epoch": 9,
        "waited_s": 1.5,
    }
    assert RECORD_BYTES == 48
    text = str(FaultError(record))
    assert text.startswith("rank 3: role pull gave up at site ring_free[5] after 1.500 s")
    assert text.endswith("rank 2 is late")


def test_no_record_and_a_half_written_one_are_none():
    assert parse(bytes(48)) is None
    assert parse(head(1)) is None


def test_names_are_those_of_the_twin():
    from mokbench.twin import load_twin

    twin = load_twin()
    assert list(names("kRoleNames")) == list(twin.ROLES)
    assert list(names("kSiteNames")) == list(twin.SITES)
