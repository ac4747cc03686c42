import dataclasses

import pytest

from mokbench.errors import ConfigError
from mokbench.routing import RoutingSpec
from mokbench.selection import select
from mokbench.workload import Cell, Dtype, Model, Regime, Workload


def cell(system: str, tokens: int, regime: Regime = Regime.ISOLATED) -> Cell:
    work = Workload(Model("tiny", 64, 64, 8, 2), 4, tokens, Dtype.BF16, RoutingSpec())
    return Cell(f"tiny.{system}.t{tokens}.{regime}", "host", system, (), work, regime)


CELLS = [cell(system, tokens) for system in ("mok", "push") for tokens in (16, 128)]


def test_keys_are_anded_and_values_of_one_key_ored():
    assert select(CELLS, ()) == CELLS
    assert select(CELLS, ("system=mok", "tokens_per_rank=16")) == [CELLS[0]]
    assert select(CELLS, ("system=mok", "system=push", "tokens_per_rank=128")) == CELLS[1::2]
    assert select(CELLS, ("id=*t16*",)) == CELLS[::2]


def test_values_of_a_key_may_be_listed_with_commas():
    assert select(CELLS, ("system=mok,push", "tokens_per_rank=16")) == CELLS[::2]
    tuned = dataclasses.replace(CELLS[0], options=(("block_m", 32), ("ring_tiles", 2)))
    other = dataclasses.replace(CELLS[0], options=(("block_m", 32),))
    assert select([tuned, other], ("variant=block_m=32,ring_tiles=2",)) == [tuned]


@pytest.mark.parametrize(
    "term, message",
    [
        ("system", "write KEY=VALUE"),
        ("sistem=mok", "KEY one of id, system"),
        ("system=moc", "no such cell; there is mok, push"),
        ("system=mok,psh", "--only system=psh: no such cell; there is mok, push"),
    ],
)
def test_bad_terms_say_what_there_is(term, message):
    with pytest.raises(ConfigError, match=message):
        select(CELLS, (term,))


def test_a_cell_survives_its_dictionary():
    assert Cell.from_dict(CELLS[0].to_dict()) == CELLS[0]
