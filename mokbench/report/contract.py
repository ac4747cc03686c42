"""The machine-readable report: the JSON object whose names are a contract."""

from typing import Any

from mokbench.report.against_deepep import against_deepep
from mokbench.report.comparison import comparisons
from mokbench.report.rows import Rows


def contract(rows: Rows) -> dict[str, Any]:
    """Build the report object: finite numbers only, null where a figure does not apply.

    ``signaling``, ``comparisons``, ``against_deepep``, ``runs`` and each cell's ``run`` are
    additions to the contract's list.
    """
    return {
        "method_version": rows.method_version,
        "machine": rows.machine.model_dump(mode="json"),
        "cells": [{**row.record.to_dict(), "run": row.run} for row in rows.rows],
        "signaling": [{**point.model_dump(mode="json"), "run": run} for run, point in rows.signals],
        "comparisons": [found.to_dict() for found in comparisons(rows)],
        "against_deepep": [found.to_dict() for found in against_deepep(rows)],
        "runs": [
            {"run": name, **meta.model_dump(mode="json", exclude={"machine", "config_text"})}
            for name, meta in rows.runs
        ],
    }
