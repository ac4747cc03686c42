"""What is measured: a model's MoE layer, the workload on it, and one cell of a sweep.

Everything here is frozen, so that a cell can be a dictionary key, cross a process boundary
and be compared by value.
"""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self

from mokbench.placement import ExplicitPlacement, Placement
from mokbench.placement import label as placement_label
from mokbench.routing_spec import RoutingSpec

Scalar = str | int | float | bool


class Dtype(StrEnum):
    """Element type of x, the weights and y; sums are FP32."""

    BF16 = "bf16"
    FP32 = "fp32"

    @property
    def num_bytes(self) -> int:
        """Bytes of one element."""
        return 2 if self is Dtype.BF16 else 4


class Regime(StrEnum):
    """How passes follow one another; the two are different quantities and never mixed."""

    ISOLATED = "isolated"
    STEADY = "steady"


@dataclass(frozen=True)
class Model:
    """One MoE layer: W13 [E, 2 * intermediate, hidden], W2 [E, hidden, intermediate]."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int


@dataclass(frozen=True)
class Workload:
    """One layer pass: the same tokens, routing and weights for every system that is compared.

    ``mnnvl``: one NVLink domain joins the ranks of several nodes, so that they reach one another's
    memory. Both it and ``nodes`` are what the run found (mokbench/topology.py), no axis.
    """

    model: Model
    ranks: int
    tokens_per_rank: int
    dtype: Dtype
    routing: RoutingSpec
    placement: Placement = "contiguous"
    seed: int = 0
    nodes: int = 1
    mnnvl: bool = False

    @property
    def placement_label(self) -> str:
        """What ids, rows and reports call the placement."""
        return placement_label(self.placement)


@dataclass(frozen=True)
class Cell:
    """One row of a sweep: a system (with its options) on a workload in one regime.

    ``options`` holds only the options that differ from the system's defaults, sorted by name.
    """

    id: str
    fabric: str
    system: str
    options: tuple[tuple[str, Scalar], ...]
    workload: Workload
    regime: Regime
    graph: bool = False

    @property
    def variant(self) -> str:
        """Readable form of the options, empty for the defaults: ``block_m=128,ring_tiles=2``."""
        return ",".join(f"{name}={value}" for name, value in self.options)

    @property
    def dispatch_dtype(self) -> str:
        """What rows travel as on their way to the experts: the option, or the workload's dtype."""
        return str(dict(self.options).get("dispatch_dtype", self.workload.dtype))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; ``from_dict`` gives an equal cell back."""
        data = asdict(self)
        data["workload"]["routing"] = self.workload.routing.model_dump(mode="json")
        if isinstance(self.workload.placement, ExplicitPlacement):
            data["workload"]["placement"] = self.workload.placement.model_dump(mode="json")
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Inverse of ``to_dict``."""
        work = dict(data["workload"])
        work["model"] = Model(**work["model"])
        work["dtype"] = Dtype(work["dtype"])
        work["routing"] = RoutingSpec.model_validate(work["routing"])
        if isinstance(work["placement"], dict):
            work["placement"] = ExplicitPlacement.model_validate(work["placement"])
        rest = {k: v for k, v in data.items() if k not in ("workload", "options", "regime")}
        options = tuple((str(k), v) for k, v in data["options"])
        return cls(
            workload=Workload(**work), options=options, regime=Regime(data["regime"]), **rest
        )
