"""Which cell a row measured, so that rows of one id that are not alike are never one series."""

import hashlib
import json
from pathlib import PurePath

from mokbench.systems import options_of
from mokbench.workload import Cell

# Begins a digest that covers options left at their defaults; older ones do not.
_OF_ALL = "all-"


def cell_digest(cell: Cell) -> str:
    """Which cell this is, all of its system's options included: ``all-`` and 16 hex digits.

    Its id is only a name and left out; it names no option that has its default, and defaults
    change.
    """
    content = {key: value for key, value in cell.to_dict().items() if key != "id"}
    content["options"] = options_of(cell).model_dump(mode="json")
    routing = content["workload"]["routing"]
    if not content["workload"]["mnnvl"]:
        del content["workload"]["mnnvl"]  # as digests were before it was there
    if routing.get("trace"):
        # A checkout elsewhere measures the same; the routes have a digest of their own.
        routing["trace"] = PurePath(routing["trace"]).name
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
    return _OF_ALL + hashlib.sha256(text.encode()).hexdigest()[:16]


def lacks_defaults(digest: str) -> bool:
    """Whether an older mokbench made a digest, which left out the options that had defaults."""
    return not digest.startswith(_OF_ALL)
