"""Step time of each system at each routing over its own at balanced routing."""

from collections.abc import Iterable
from typing import NamedTuple

from mokbench.record import Record
from mokbench.report import units, wording
from mokbench.report.rows import Row, Rows, Workload
from mokbench.report.tables import Column, Table
from mokbench.stats import Ratio, separate_ratio


class _Key(NamedTuple):
    run: str
    tokens: int
    routing: str
    system: str


def slowdown_tables(rows: Rows) -> list[Table]:
    """One table a shape and regime: a line per token count and routing, a column per system."""
    groups: dict[tuple[Workload, str], list[Row]] = {}
    for row in rows.with_status("ok"):
        work = Workload.of(row.record)._replace(tokens_per_rank=0, routing="")
        groups.setdefault((work, wording.regime(row.record)), []).append(row)
    several = len(rows.runs) > 1
    tables = (_table(work, regime, found, several) for (work, regime), found in groups.items())
    return [table for table in tables if table is not None]


def _table(work: Workload, regime: str, rows: Iterable[Row], several_runs: bool) -> Table | None:
    found: dict[_Key, Record] = {}
    for row in rows:
        record = row.record
        key = _Key(row.run, record.tokens_per_rank, record.routing, record.name)
        found.setdefault(key, record)
    skewed = [key for key in found if key.routing != "balanced"]
    systems = list(
        dict.fromkeys(key.system for key in skewed if key._replace(routing="balanced") in found)
    )
    if not systems:
        return None
    # The sort is stable, so that runs and routings keep the order they have in the report.
    lines = sorted(dict.fromkeys(key[:3] for key in skewed), key=lambda line: line[1])
    cells = []
    for run, tokens, routing in lines:
        ratios = (_slowdown(found, _Key(run, tokens, routing, name)) for name in systems)
        cells.append((run, str(tokens), routing, *map(units.ratio, ratios)))
    columns = (
        Column("run", right=False),
        Column("tokens per rank", right=False),
        Column("routing", right=False),
        *(Column(name.replace(",", ", ")) for name in systems),
    )
    first = 0 if several_runs else 1
    said = (wording.NO_VERDICT,) if work.fabric == "host" else ()
    title = wording.shape(work, regime)
    table = Table(title, columns, tuple(cells), sentences=said, alike=True)
    return table.keeping(range(first, len(columns)))


def _slowdown(found: dict[_Key, Record], key: _Key) -> Ratio | None:
    base, skewed = found.get(key._replace(routing="balanced")), found.get(key)
    if base is None or skewed is None or not base.step_time_us or not skewed.step_time_us:
        return None
    return separate_ratio(skewed.step_time_us, base.step_time_us)
