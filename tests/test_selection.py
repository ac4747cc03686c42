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


@pytest.mark.parametrize(
    "term, message",
    [
        ("system", "write KEY=VALUE"),
        ("sistem=mok", "KEY one of id, system"),
        ("system=moc", "no such cell; there is mok, push"),
    ],
)
def test_bad_terms_say_what_there_is(term, message):
    with pytest.raises(ConfigError, match=message):
        select(CELLS, (term,))


def test_a_cell_survives_its_dictionary():
    assert Cell.from_dict(CELLS[0].to_dict()) == CELLS[0]
