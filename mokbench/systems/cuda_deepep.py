"""DeepEP dispatch and combine around the same grouped GEMMs as push; deep_ep is the user's own.

Nothing of DeepEP is here: the package is imported when a cell needs it. Dispatch is over when rows
and weights lie where the GEMMs want them; combine begins at the expert outputs.
"""

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, cast

from mokbench import deep_ep_package
from mokbench.errors import UnsupportedError
from mokbench.systems import InPhases, Setup, expect_options, options_of
from mokbench.systems.deepep_support import (
    INSTALL,
    cell_reason,
    chosen_api,
    mapped_reason,
    nccl_reason,
    token_capacity,
)
from mokbench.systems.gemm_choice import expanded_bytes
from mokbench.systems.gpu_support import require_share
from mokbench.systems.options import DeepepOptions
from mokbench.workload import Cell

if TYPE_CHECKING:
    from torch import Tensor

    from mokbench.fabric.cuda import CudaFabric

_MAX_WARM_TOKENS = 16
_ALIGN_BYTES = 2 << 20
# Besides the buffer: counters, and room for the communicator.
_FIXED_BYTES = 64 << 20


class Exchange(Protocol):
    """Dispatch, experts and combine through one interface of DeepEP."""

    num_sms: int
    advised_sms: int

    @property
    def candidates(self) -> Sequence[int]:
        """SM counts worth trying; none where they cannot be chosen."""

    @property
    def notes(self) -> Sequence[str]:
        """What was made."""

    def dispatch(self, x: "Tensor", topk_idx: "Tensor", topk_weights: "Tensor") -> None:
        """As Phased.dispatch, with topk_idx int64."""

    def compute(self) -> None:
        """As Phased.compute."""

    def combine(self) -> "Tensor":
        """As Phased.combine."""

    def close(self) -> None:
        """Free everything; collective."""


class Deepep(InPhases):
    """DeepEP around grouped GEMMs, through ElasticBuffer or the legacy Buffer."""

    name: ClassVar[str] = "deepep"
    # Rows arrive in the order of atomic counters, and split GEMM tiles round by place.
    deterministic: ClassVar[bool] = False
    traffic: ClassVar[str | None] = "per_node"
    signal: ClassVar[str | None] = None
    takes_int64: ClassVar[bool] = True

    def __init__(self) -> None:
        self._exchange: Exchange | None = None

    @staticmethod
    def supports(cell: Cell) -> str | None:
        """What deepep_support knows about this cell and this machine."""
        return cell_reason(cell, expect_options(options_of(cell), DeepepOptions))

    @staticmethod
    def workspace_bytes(cell: Cell) -> int:
        """Buffer by DeepEP's formula, received rows at their worst, the GEMMs' outputs."""
        options, work = expect_options(options_of(cell), DeepepOptions), cell.workload
        model, ranks = work.model, work.ranks
        tokens, local = token_capacity(max(1, work.tokens_per_rank)), model.experts // ranks
        most = ranks * tokens * min(model.top_k, local)
        exact = min(most, work.tokens_per_rank * model.top_k)
        received = 2 * model.hidden * (exact if options.cpu_sync else most)
        dequantized = 2 * model.hidden * most if options.dispatch_dtype == "fp8" else 0
        experts = expanded_bytes(model, local, most, options.gemm)
        return buffer_bytes(cell) + _FIXED_BYTES + received + dequantized + experts

    def prepare(self, setup: Setup) -> None:
        """Import, connect, allocate, and compile every kernel by passes that nobody times."""
        options = expect_options(setup.options, DeepepOptions)
        api = chosen_api(options, deep_ep_package.find())
        asked, share = options.num_sms, setup.fabric.num_sms
        if isinstance(asked, int):
            require_share(asked, share, ", auto or best")
        deep_ep = _import(setup.fabric, api)
        self._options, self._version = options, str(getattr(deep_ep, "__version__", "unknown"))
        self._exchange = _agreed(
            setup.fabric, "does not start", lambda: _exchange(api, deep_ep, setup, options)
        )
        exchange = self._exchange
        # Each rank asks the driver for its links, and with different counts ranks would wait for
        # one another for good.
        exchange.advised_sms = min(setup.fabric.gather(exchange.advised_sms))
        exchange.num_sms = exchange.advised_sms if isinstance(asked, str) else asked
        _agreed(setup.fabric, "fails in its first pass", lambda: self._warm(setup))

    @property
    def candidates(self) -> Sequence[int]:
        """SM counts to try, where the option asks for the best."""
        return self._prepared.candidates if self._options.num_sms == "best" else ()

    def set_num_sms(self, num_sms: int) -> None:
        """From the next pass on; the first with a new count compiles."""
        self._prepared.num_sms = num_sms

    @property
    def notes(self) -> Sequence[str]:
        """Version, what was made, and with how many SMs it runs."""
        exchange = self._prepared
        return (f"deep_ep {self._version}, num_sms {exchange.num_sms}", *exchange.notes)

    def dispatch(self, x: "Tensor", topk_idx: "Tensor", topk_weights: "Tensor") -> None:
        """Rows to their experts."""
        self._prepared.dispatch(x, topk_idx, topk_weights)

    def compute(self) -> None:
        """Expert MLPs, weighted."""
        self._prepared.compute()

    def combine(self) -> "Tensor":
        """Expert outputs back, added."""
        return self._prepared.combine()

    def close(self) -> None:
        """Destroy the buffer with all ranks, unless one of them just failed."""
        exchange, self._exchange = self._exchange, None
        # Destroying waits for all ranks on the GPU; after a failure the process ends, and frees it.
        if exchange is not None and sys.exc_info()[0] is None:
            exchange.close()

    @property
    def _prepared(self) -> Exchange:
        assert self._exchange is not None, "prepare() comes first"
        return self._exchange

    def _warm(self, setup: Setup) -> None:
        """Two passes on made-up tokens: DeepEP compiles and loads its kernels as they are used."""
        import torch

        model, device = setup.workload.model, setup.fabric.device
        tokens = min(_MAX_WARM_TOKENS, max(1, setup.max_tokens))
        x = torch.zeros(tokens, model.hidden, dtype=torch.bfloat16, device=device)
        topk_idx = torch.arange(tokens * model.top_k, device=device) % model.experts
        topk_weights = torch.ones(tokens, model.top_k, device=device)
        for _ in range(2):
            self.run(x, topk_idx.view(tokens, model.top_k), topk_weights)
        torch.cuda.synchronize()


Made = TypeVar("Made")


def _agreed(fabric: "CudaFabric", what: str, make: Callable[[], Made]) -> Made:
    """What ``make`` returns; UnsupportedError alike on all ranks where DeepEP refuses on one.

    A GPU that is too full refuses nothing: that is an error of the row.
    """
    import torch

    made, problem = None, None
    try:
        made = make()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AssertionError) as error:
        problem = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if problems := fabric.problems(problem):
        raise UnsupportedError(f"DeepEP {what}: {problems}")
    return cast(Made, made)


def buffer_bytes(cell: Cell) -> int:
    """ElasticBuffer's own size on one node: the larger of dispatch's and combine's areas."""
    work, model = cell.workload, cell.workload.model
    tokens, top_k = token_capacity(max(1, work.tokens_per_rank)), model.top_k
    dispatch = work.ranks * tokens * (2 * model.hidden + _rounded(12 * top_k + 4, 32))
    per_token = min(work.ranks, top_k)
    combine = tokens * per_token * (2 * model.hidden + _rounded(8 * top_k, 32))
    return _rounded(max(dispatch, combine), _ALIGN_BYTES)


def _rounded(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _import(fabric: "CudaFabric", api: str) -> Any:
    """deep_ep, imported on every rank; UnsupportedError alike on all where one cannot."""
    from mokbench.fabric.nccl import mapped_libraries, runtime_version

    if fabric.maps_peers:
        # Nothing goes over a NIC then, and without one DeepEP would refuse to start.
        os.environ.setdefault("EP_DISABLE_GIN", "1")
    module, problem = None, None
    if api == "elastic":
        problem = mapped_reason(mapped_libraries()) or nccl_reason(runtime_version())
    if problem is None:
        try:
            module = import_module("deep_ep")
        except (ImportError, AssertionError, OSError, RuntimeError) as error:
            text = str(error).strip().splitlines() or [type(error).__name__]
            problem = f"deep_ep does not import: {text[0]}; {INSTALL}"
    found = fabric.gather(problem)
    if any(found):
        raise UnsupportedError(next(filter(None, found)))
    return module


def _exchange(api: str, deep_ep: Any, setup: Setup, options: DeepepOptions) -> Exchange:
    fabric = setup.fabric
    if not fabric.maps_peers and not fabric.topology.is_even:
        raise UnsupportedError(
            "DeepEP numbers ranks node by node, as many on each, and these are on nodes "
            f"{list(fabric.topology.node_of_rank)}; start them in that order"
        )
    if api == "elastic":
        from mokbench.systems.cuda_deepep_elastic import ElasticExchange

        return ElasticExchange(deep_ep, fabric.nccl_group, setup, options)
    from mokbench.systems import cuda_deepep_legacy as legacy

    made = legacy.NormalExchange if api == "normal" else legacy.LowLatencyExchange
    return made(deep_ep, setup, options)
