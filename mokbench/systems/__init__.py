"""Systems under test: what each must offer, and where each one is found.

A system is one class in one file of this package. The harness owns timing: a system never times
itself, never prints, and never reads the configuration. See docs/add-a-system.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, cast, runtime_checkable

from mokbench import twin
from mokbench.errors import UnsupportedError
from mokbench.reach import reach_reason
from mokbench.systems.options import SYSTEM_OPTIONS, SystemOptions
from mokbench.workload import Cell, Workload

if TYPE_CHECKING:
    from torch import Tensor

    from mokbench.kernel_phases import PhaseTimes

_CLASSES = {
    "mok": "mokbench.systems.mok:Mok",
    "push": "mokbench.systems.push:Push",
    "deepep": "mokbench.systems.deepep:Deepep",
    "alltoall": "mokbench.systems.alltoall:Alltoall",
    "local": "mokbench.systems.local:Local",
}


# Where a fabric has a class of its own; elsewhere the host's says that it cannot.
_CUDA_CLASSES = {
    "mok": "mokbench.systems.cuda_mok:Mok",
    "push": "mokbench.systems.cuda_push:Push",
    "deepep": "mokbench.systems.cuda_deepep:Deepep",
    "alltoall": "mokbench.systems.cuda_alltoall:Alltoall",
    "local": "mokbench.systems.cuda_local:Local",
}


@dataclass(frozen=True)
class Setup:
    """All that a system gets to prepare one workload on one rank.

    ``w13`` is [local experts, 2 * intermediate, hidden] (gate rows, then up rows), ``w2`` is
    [local experts, hidden, intermediate]; rank r holds experts [r * E / N, (r + 1) * E / N).
    ``max_tokens`` is the largest token count of any rank. ``fabric`` is a HostFabric or a
    CudaFabric, by the cell's fabric; on the latter all tensors are on the rank's GPU.
    """

    workload: Workload
    options: SystemOptions
    rank: int
    max_tokens: int
    w13: "Tensor"
    w2: "Tensor"
    fabric: Any

    @property
    def num_local_experts(self) -> int:
        """Experts of each rank."""
        return self.workload.model.experts // self.workload.ranks


class System(Protocol):
    """One system under test on one rank; constructed, prepared, run many times, closed.

    ``deterministic`` systems must give the same bits twice. ``traffic`` says how often a token
    crosses the link: "per_route" once per (token, expert), "per_rank" once per (token, rank) that
    it has an expert on, "per_node" once per other node, whose rank of the same place passes it on
    to each rank there that has an expert ("per_rank" within a node or an MNNVL domain), "all" once
    per other rank, wanted there or not, None never. ``signal`` is the protocol whose signaling
    figures its rows carry. ``host_link`` is what it moves tokens over on the host fabric: "shm"
    (peers' memory), "tcp" (the ranks' gloo group) or "none".
    """

    name: ClassVar[str]
    deterministic: ClassVar[bool]
    traffic: ClassVar[str | None]
    signal: ClassVar[str | None]
    host_link: ClassVar[str]

    @staticmethod
    def supports(cell: Cell) -> str | None:
        """Why this cell cannot run here and what would help, or None. Cheap, no torch."""

    @staticmethod
    def num_threads(cell: Cell) -> int:
        """Threads of one rank that compute, copy or spin in a wait at once during a pass.

        More of them in all ranks than cores, and the row is marked as oversubscribed.
        """

    @staticmethod
    def workspace_bytes(cell: Cell) -> int:
        """Bytes one rank allocates beyond weights, inputs and outputs; for the plan."""

    def prepare(self, setup: Setup) -> None:
        """Allocate for this workload; collective over all ranks. Raises MokbenchError."""

    def run(self, x: "Tensor", topk_idx: "Tensor", topk_weights: "Tensor") -> "Tensor":
        """One layer pass, collective over all ranks.

        x [T, hidden], topk_idx [T, top_k] int32 (-1 = masked), topk_weights [T, top_k] float32,
        returns y [T, hidden] in x's dtype, valid until the next call.
        """

    def close(self) -> None:
        """Free everything; also after a failed prepare or run."""


@runtime_checkable
class Phased(Protocol):
    """A system that has its phases apart, so that dispatch and combine can be timed alone."""

    def dispatch(self, x: "Tensor", topk_idx: "Tensor", topk_weights: "Tensor") -> None:
        """Tokens to the ranks of their experts."""

    def compute(self) -> None:
        """Expert MLPs on what dispatch brought."""

    def combine(self) -> "Tensor":
        """Expert outputs back to their tokens' ranks, weighted and summed."""


class InPhases(Phased):
    """A system whose pass is its phases, one after the other."""

    def run(self, x: "Tensor", topk_idx: "Tensor", topk_weights: "Tensor") -> "Tensor":
        """See System.run; what a phase only queues or waits for, its own docstring says."""
        self.dispatch(x, topk_idx, topk_weights)
        self.compute()
        return self.combine()


@runtime_checkable
class Noted(Protocol):
    """A system that chose something the reader of its rows should know, once prepared."""

    @property
    def notes(self) -> Sequence[str]:
        """A line each, the same on all ranks."""


@runtime_checkable
class Tuned(Protocol):
    """A system that leaves it to a short measurement here how many SMs it runs on."""

    @property
    def candidates(self) -> Sequence[int]:
        """SM counts to try, the same on all ranks; none where the config names one."""

    def set_num_sms(self, num_sms: int) -> None:
        """Use so many from the next pass on."""


@runtime_checkable
class TakesInt64(Protocol):
    """A system whose library takes top-k ids as torch.topk gives them.

    Its topk_idx is converted outside of what is timed, as the router's is outside of a layer.
    """

    takes_int64: ClassVar[bool]


@runtime_checkable
class Checked(Protocol):
    """A system whose kernels record faults that Python has to look for."""

    def check(self) -> None:
        """Raise the fault that this rank recorded since it was prepared; synchronizes."""


@runtime_checkable
class Stamped(Protocol):
    """A system whose kernel can write down when each of its phases began and ended."""

    def phase_times(self) -> "PhaseTimes | None":
        """Of this rank's last pass, on the clock that all ranks of its GPU share; None: not asked.

        Not collective, but waits for the GPU. All ranks are asked or none is.
        """


def system_class(name: str, fabric: str = "host") -> type[System]:
    """The class of a system; its file is imported now, its libraries when it needs them."""
    classes = _CLASSES if fabric == "host" else {**_CLASSES, **_CUDA_CLASSES}
    module, _, attribute = classes[name].partition(":")
    return cast(type[System], getattr(import_module(module), attribute))


def options_of(cell: Cell) -> SystemOptions:
    """The cell's options with the system's defaults filled in."""
    return SYSTEM_OPTIONS[cell.system].model_validate(dict(cell.options))


Options = TypeVar("Options", bound=SystemOptions)


def expect_options(options: SystemOptions, kind: type[Options]) -> Options:
    """``options`` as ``kind``: systems get their own options or it is a bug."""
    assert isinstance(options, kind), f"{type(options).__name__} is not {kind.__name__}"
    return options


def host_only(cell: Cell, what: str) -> str | None:
    """The reason for a cell on a fabric that ``what`` has no code for yet."""
    if cell.fabric != "host":
        return f"{what} runs on the host fabric only so far; set fabric: host"
    if cell.graph:
        return "CUDA graphs need the cuda fabric; the host fabric runs graph: false only"
    return None


def twin_only(cell: Cell, what: str) -> str | None:
    """The reason for a cell of a system that is the host twin: one node, and the twin built."""
    reason = host_only(cell, what) or reach_reason(cell, "memory", what)
    if reason is None:
        try:
            twin.load_twin()
        except UnsupportedError as error:
            reason = str(error)
    return reason
