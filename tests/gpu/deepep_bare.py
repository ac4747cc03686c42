"""DeepEP timed with nothing of mokbench's harness: its API, CUDA events, NCCL to align the ranks.

What the harness reports as dispatch_us and combine_us must be the same region: from aligned ranks
until the stream has the rows, device work only. Also how the harness and this loop take turns.
"""

from statistics import median

import torch
import torch.distributed as dist

from mokbench.fabric.cuda import CudaFabric
from mokbench.layer import Layer
from mokbench.measure.gpu_timing import GpuTimer
from mokbench.routing import RoutingSpec
from mokbench.systems import Setup
from mokbench.systems.cuda_deepep import Deepep
from mokbench.systems.deepep_support import token_capacity
from mokbench.systems.options import DeepepOptions
from mokbench.workload import Dtype, Model, Workload

MODEL = Model("qwen3-235b-a22b", 4096, 1536, 128, 8)
ROUNDS, PASSES = 5, 8
# DeepEP's own test writes as much to empty the L2.
FLUSH_BYTES = 256 << 20
# About a millisecond: the CPU queues a pass meanwhile.
SLEEP_CYCLES = 2_000_000


def workload(ranks: int, tokens: int, spec="balanced", model: Model = MODEL) -> Workload:
    return Workload(model, ranks, tokens, Dtype.BF16, RoutingSpec.model_validate(spec))


def prepared(fabric: CudaFabric, work: Workload, **options):
    """A Deepep and what its run takes on this rank."""
    layer = Layer.build(work, fabric.rank, str(fabric.device))
    system, tokens = Deepep(), max(1, layer.max_tokens)
    chosen = DeepepOptions(**options)
    system.prepare(Setup(work, chosen, fabric.rank, tokens, layer.w13, layer.w2, fabric))
    return system, layer, (layer.x, layer.topk_idx.long(), layer.topk_weights)


class BareLoop:
    """Dispatch and combine of one buffer of its own, at the arguments that the adapter gives."""

    def __init__(self, fabric: CudaFabric, layer: Layer, num_sms: int) -> None:
        import deep_ep

        model = layer.workload.model
        self._model, self._layer, self._num_sms = model, layer, num_sms
        self._fabric, self._group = fabric, fabric.nccl_group
        self._capacity = token_capacity(layer.max_tokens)
        self._buffer = deep_ep.ElasticBuffer(
            self._group,
            num_max_tokens_per_rank=self._capacity,
            hidden=model.hidden,
            num_topk=model.top_k,
            allow_hybrid_mode=False,
            explicitly_destroy=True,
        )
        self._topk_idx = layer.topk_idx.long()
        self._flush = torch.zeros(FLUSH_BYTES, dtype=torch.uint8, device=fabric.device)
        self._flag = torch.zeros(1, device=fabric.device)

    def _dispatch(self):
        return self._buffer.dispatch(
            self._layer.x,
            topk_idx=self._topk_idx,
            topk_weights=self._layer.topk_weights,
            num_experts=self._model.experts,
            num_max_tokens_per_rank=self._capacity,
            num_sms=self._num_sms,
            do_handle_copy=False,
            do_cpu_sync=False,
            do_expand=True,
        )

    def _meet(self) -> None:
        dist.all_reduce(self._flag, group=self._group)

    def _align(self) -> None:
        torch.cuda._sleep(SLEEP_CYCLES)
        self._meet()

    def passes_us(self, count: int) -> torch.Tensor:
        """Dispatch and combine of ``count`` passes on this rank: float64 [count, 2]."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(4 * count)]
        for i in range(count):
            self._flush.zero_()
            self._align()
            events[4 * i].record()
            rows, _, _, handle, _ = self._dispatch()
            events[4 * i + 1].record()
            self._meet()  # on a shared GPU what follows would slow those that are not done
            outputs = rows * 0.5  # an expert MLP would have written rows of this size
            self._align()
            events[4 * i + 2].record()
            self._buffer.combine(outputs, handle=handle, num_sms=self._num_sms)
            events[4 * i + 3].record()
            self._meet()
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) * 1e3 for a, b in zip(events[::2], events[1::2], strict=True)]
        return torch.tensor(times, dtype=torch.float64).reshape(count, 2)

    def close(self) -> None:
        torch.cuda.synchronize()
        self._buffer.destroy()


def compare(fabric: CudaFabric, token_counts: tuple[int, ...] = (1024, 4096)) -> dict[str, dict]:
    """By token count: the harness's and the loop's medians over rounds, us, and their ratios."""
    found = {}
    timer = GpuTimer(fabric)
    for tokens in token_counts:
        system, layer, here = prepared(fabric, workload(fabric.ranks, tokens), num_sms=16)
        bare = BareLoop(fabric, layer, num_sms=16)

        def ours(system=system, here=here) -> torch.Tensor:
            def dispatch() -> None:
                system.dispatch(*here)

            return timer.phases(dispatch, system.compute, system.combine, PASSES)

        rounds: dict[str, list[torch.Tensor]] = {"harness": [], "bare": []}
        ours(), bare.passes_us(3)
        for _ in range(ROUNDS):
            for name, samples in (("harness", ours()), ("bare", bare.passes_us(PASSES))):
                slowest = fabric.gather_samples(samples).amax(dim=0)
                rounds[name].append(slowest.median(dim=0).values)
        found[f"t{tokens}"] = _summary(rounds)
        bare.close()
        system.close()
    return found


def _summary(rounds: dict[str, list[torch.Tensor]]) -> dict[str, float]:
    found = {}
    for place, phase in enumerate(("dispatch", "combine")):
        ours, bare = ([float(each[place]) for each in rounds[name]] for name in rounds)
        found[f"{phase}_us"] = median(ours)
        found[f"{phase}_bare_us"] = median(bare)
        found[f"{phase}_over_bare"] = median(a / b for a, b in zip(ours, bare, strict=True))
    return found
