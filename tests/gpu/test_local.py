"""Local on the GPU: awkward routings, bitwise repeat, a CUDA graph; and the layer made there."""

import torch
from cuda_ranks import run_ranks

from mokbench import reference
from mokbench.layer import Layer
from mokbench.routing import RoutingSpec, generate
from mokbench.streams import streams_for
from mokbench.systems import Setup
from mokbench.systems.cuda_local import Local
from mokbench.systems.options import LocalOptions
from mokbench.tolerances import tolerance
from mokbench.workload import Dtype, Model, Workload

ODD = Model("odd", 2880, 128, 24, 8)
AWKWARD = ["balanced", {"hot_expert": 0.9}, {"empty_experts": 5, "masked": 0.3}, {"masked": 1.0}]
# Each line compiles, for seconds. Up to 512 routes triton sorts, then torch, from 4097 as int16.
SHAPES = [
    (ODD, 300, AWKWARD),
    (Model("k1", 256, 128, 12, 1), 300, ["balanced", {"masked": 0.3}]),
    (Model("many", 512, 256, 96, 8), 1024, ["balanced", {"hot_expert": 0.9}]),
]


def workload(model, tokens, spec, dtype=Dtype.BF16):
    return Workload(model, 1, tokens, dtype, RoutingSpec.model_validate(spec))


def layers_of(model, tokens, specs, device):
    return [Layer.build(workload(model, tokens, spec), 0, device) for spec in specs]


def prepared(layer, fabric, compile_, gemm="torch"):
    system = Local()
    options = LocalOptions(compile=compile_, gemm=gemm)
    system.prepare(Setup(layer.workload, options, 0, layer.max_tokens, layer.w13, layer.w2, fabric))
    return system


def check(system, layer):
    """Name, verdict, error and whether a second run gave the same bits."""
    arguments = (layer.x, layer.topk_idx, layer.topk_weights)
    first = system.run(*arguments).clone()
    system.run(*arguments).fill_(float("nan"))
    same = torch.equal(first, system.run(*arguments))
    accuracy = reference.compare(first, layer.truth, Dtype.BF16)
    work = layer.workload
    name = f"{work.model.name} t{work.tokens_per_rank} {work.routing.label}"
    return name, accuracy.ok, accuracy.rel_error, same


def check_all(fabric):
    results = []
    for model, tokens, specs in SHAPES:
        layers = layers_of(model, tokens, specs, fabric.device)
        system = prepared(layers[0], fabric, compile_=True)
        results += [check(system, layer) for layer in layers]
        empty = system.run(layers[0].x[:0], layers[0].topk_idx[:0], layers[0].topk_weights[:0])
        assert empty.shape == (0, model.hidden)
        if tokens == 300:
            results.append(replay(system, layers))
        system.close()
    layers = layers_of(ODD, 300, AWKWARD, fabric.device)
    layers += layers_of(ODD, 1, ["balanced", {"masked": 0.5}], fabric.device)
    for gemm, compile_ in (("torch", False), ("ours", False), ("ours", True)):
        system = prepared(layers[0], fabric, compile_, gemm)
        results += [check(system, layer) for layer in layers]
        if gemm == "ours":
            results.append(replay(system, layers[: len(AWKWARD)]))
        system.close()
    return results


def replay(system, layers):
    """A graph captured on one routing and replayed on others, against passes without it."""
    held = [t.clone() for t in (layers[0].x, layers[0].topk_idx, layers[0].topk_weights)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = system.run(*held)
    worst, same = 0.0, True
    for layer in layers:
        arguments = (layer.x, layer.topk_idx, layer.topk_weights)
        for here, new in zip(held, arguments, strict=True):
            here.copy_(new)
        graph.replay()
        same = same and torch.equal(y, system.run(*arguments))
        worst = max(worst, reference.compare(y, layer.truth, Dtype.BF16).rel_error)
    return "graph", worst < tolerance(Dtype.BF16), worst, same


def layer_facts(fabric):
    """How far the truth made on the GPU is from FP64, and whether bytes depend on the range."""
    streams = streams_for(fabric.device)
    work = workload(ODD, 40, {"masked": 0.2}, Dtype.FP32)
    whole = reference.make_weights(work, range(24), streams)
    part = reference.make_weights(work, range(7, 9), streams)
    routing = generate(work)
    truth = reference.reference_truth(work, routing, 0, streams)
    x = reference.make_inputs(work, 0, streams).x.double()
    y = torch.zeros_like(x)
    for t, row in enumerate(routing.topk_idx[0].tolist()):
        for k, expert in enumerate(row):
            if expert >= 0:
                gate, up = (whole.w13[expert].double() @ x[t]).chunk(2)
                hidden = torch.nn.functional.silu(gate) * up
                weight = float(routing.topk_weights[0][t, k])
                y[t] += weight * (whole.w2[expert].double() @ hidden)
    error = reference.compare(y, truth, Dtype.FP32)
    return torch.equal(whole.w13[7:9], part.w13), error.rel_error, str(truth.y.device)


def everything(fabric):
    return layer_facts(fabric), check_all(fabric)


def test_local_matches_the_oracle_and_the_oracle_fp64():
    (answer,) = run_ranks(1, everything, timeout_s=150)
    assert isinstance(answer, tuple), answer
    (same, rel_error, device), results = answer
    assert same
    assert rel_error < 1e-5, "TF32 would give 1e-4 and more"
    assert device.startswith("cuda")
    print(f"local: {len(results)} workloads, worst {max(row[2] for row in results):.4f}")
    assert not [row for row in results if not (row[1] and row[3])]
