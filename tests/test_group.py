"""Rows of a bench that has a peak and rates, as a GPU has, on one rank of the host fabric."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_run import fake_machine
from torch.distributed import FileStore

from mokbench import metrics, reference, rows
from mokbench.bench import HostBench, Sharing
from mokbench.config import MeasureOptions
from mokbench.errors import MokbenchError
from mokbench.fabric.host import HostFabric
from mokbench.figures import SHARED_GPU, SHARED_GPUS
from mokbench.gpus import Gpus
from mokbench.group import GroupRun
from mokbench.layer import Layer
from mokbench.rates import RatePoint
from mokbench.report import wording
from mokbench.routing_spec import RoutingSpec
from mokbench.systems import system_class
from mokbench.topology import one_machine
from mokbench.workload import Cell, Dtype, Model, Regime, Workload

WORK = Workload(Model("tiny", 64, 64, 8, 2), 1, 16, Dtype.BF16, RoutingSpec())
RATES = {"read_bytes_per_s": 2e9, "peer_bytes_per_s": None}
OPTIONS = MeasureOptions(noise=0.2, blocks=2, max_time="50ms", warmup=1)


class Matmul:
    """A reference of a known size."""

    flops = 10**6

    def run(self):
        return torch.ones(64, 64) @ torch.ones(64, 64)


class GpuLikeBench(HostBench):
    """The host's fabric with a matmul peak, graphs, and two ranks a GPU."""

    def __init__(self, fabric, graphed=None):
        super().__init__(fabric)
        self.sharing = Sharing(ranks_per_gpu=2, num_sms=66)
        if graphed:
            self.timer.graphed = graphed

    def reference(self, dtype):
        assert dtype == torch.bfloat16
        return Matmul()


@pytest.fixture
def fabric(tmp_path):
    opened = HostFabric(0, 1, FileStore(str(tmp_path / "store"), 1), f"test-{tmp_path.name}", 5.0)
    yield opened
    opened.close()


def cell(graph=False):
    return Cell(f"c{graph}", "host", "local", (), WORK, Regime.ISOLATED, graph)


def run(bench, cells, rates=RATES):
    group = GroupRun(bench, Layer.build(WORK, 0), OPTIONS, lambda *_: None, rates)
    return group.workload_facts(), group.run(cells)


def test_a_row_is_held_against_the_peak_of_its_turn_and_the_rates(fabric):
    facts, results = run(GpuLikeBench(fabric), [cell()])
    result = results["cFalse"]
    assert result["problem"] is None
    assert facts["flops"] == 6 * 16 * 2 * 64 * 64
    # Two ranks a GPU: the GPU's peak is both ranks' share.
    peak = result["peak_tflops"] * 1e12 / 2
    routing = Layer.build(WORK, 0).routing
    bound = metrics.roofline(routing, WORK, metrics.Rates(peak, 2e9, None), 2)
    assert result["roofline_us"] == pytest.approx(bound.seconds * 1e6)
    assert result["roofline_bound"] == bound.bound
    assert result["rejected"] == []


def test_without_rates_nothing_is_held_against_anything(fabric):
    _, results = run(GpuLikeBench(fabric), [cell()], rates=None)
    assert "peak_tflops" not in results["cFalse"]
    assert results["cFalse"]["blocks"]


def test_a_graph_that_computes_something_else_fails_its_row_only(fabric):
    def wrong(step):
        return lambda: step() + 1

    _, results = run(GpuLikeBench(fabric, wrong), [cell(), cell(graph=True)])
    assert results["cFalse"]["problem"] is None
    assert "other bits" in results["cTrue"]["problem"]


def test_a_pass_that_cannot_be_captured_fails_its_row_only(fabric):
    def refuse(step):
        raise MokbenchError("the pass cannot be captured in a CUDA graph: it syncs")

    _, results = run(GpuLikeBench(fabric, refuse), [cell(), cell(graph=True)])
    assert results["cFalse"]["blocks"]
    assert "cannot be captured" in results["cTrue"]["problem"]


def test_a_graph_that_is_right_is_timed(fabric):
    _, results = run(GpuLikeBench(fabric, lambda step: step), [cell(graph=True)])
    assert results["cTrue"]["problem"] is None
    assert results["cTrue"]["blocks"]


class PeakBench(GpuLikeBench):
    """Notes in ``events`` when a row's memory peak is read."""

    def __init__(self, fabric, events):
        super().__init__(fabric)
        self.events = events

    def peak_memory(self):
        return self

    def rise_bytes(self):
        self.events.append("read")
        return 77


def test_memory_of_the_oracle_is_no_part_of_a_systems_peak(fabric, monkeypatch):
    events = []

    def noted(owner, name):
        real = getattr(owner, name)

        def noting(*arguments):
            events.append(name)
            return real(*arguments)

        monkeypatch.setattr(owner, name, noting)

    for owner, name in (
        (GroupRun, "_settle"),
        (torch.Tensor, "clone"),
        (reference, "error_sums"),
    ):
        noted(owner, name)
    _, results = run(PeakBench(fabric, events), [cell()])
    assert results["cFalse"]["peak_memory_bytes"] == 77
    first_pass = events.index("_settle")
    assert events[first_pass : first_pass + 4] == ["_settle", "read", "clone", "_settle"]
    assert events.index("error_sums") > first_pass


def row(link, ranks_per_gpu, num_ranks=4, **fields):
    """A row of the cuda fabric with a step of 1000 us and round figures around it."""
    work = replace(WORK, ranks=num_ranks)
    measured = Cell("c", "cuda", "push", (), work, Regime.ISOLATED)
    block = np.zeros((num_ranks, 8, 3))
    block[:, :, 1], block[:, :, 2] = 1000.0, 1500.0
    facts = {
        "traffic": {
            "per_rank": {
                "dispatch_useful": 300,
                "dispatch_wire": 300,
                "combine_useful": 100,
                "combine_wire": 100,
            }
        },
        "pairs": {"per_rank": np.zeros((num_ranks, num_ranks), dtype=np.int64)},
        "flops": 8e9,
        "num_ranks": num_ranks,
        "num_tokens": 64,
        "ranks_per_gpu": ranks_per_gpu,
        "num_sms": 132 // ranks_per_gpu,
        "mma_flops_per_cycle": 132 * 4096,
        "imbalance": dict.fromkeys(metrics.Imbalance.__dataclass_fields__, 1.0),
        "expert_counts": [1],
        "routing_digest": "d",
    }
    result = {
        "blocks": [block],
        "rejected": [block[:, :2]],
        "block_us": [1000.0],
        "rank_spread_us": 0.0,
        "measured_s": 1.0,
        "stop_reason": "noise",
        "sm_clock_mhz": 1500.0,
        "l2_state": "flushed",
        "peak_memory_bytes": 12345,
        "peak_tflops": 700.0,
        "roofline_us": 500.0,
        "roofline_bound": "compute",
        "dispatch_samples_us": [200.0],
        "combine_samples_us": [100.0],
        "phases_s": 0.1,
        **fields,
    }
    point = RatePoint(
        ranks=num_ranks,
        ranks_per_gpu=ranks_per_gpu,
        fabric="cuda",
        link=link,
        copy_bytes_per_s=1e12,
        read_bytes_per_s=1e12,
        peer_bytes_per_s=4e5,
        skew_self_test_us=200.0,
        overlap_ms=None,
    )
    around = rows.Surroundings(
        link, one_machine("host", Gpus())(num_ranks), False, 0.5, {}, None, point
    )
    return rows.measured_record(measured, system_class("push"), facts, result, around)


def test_a_row_with_a_link_has_its_utilization_and_bytes():
    physical = {"payload_bytes": 444, "raw_bytes": 555, "note": None}
    record, samples = row("nvlink", 1, physical=physical)
    # 400 useful bytes of 4 ranks in 1 ms are 1e5 bytes/s a rank, of 4e5 that a copy reaches.
    assert record.link_utilization == pytest.approx(0.25)
    assert record.wire_utilization == pytest.approx(0.25)
    assert record.dispatch_link_utilization == pytest.approx(75 / 200e-6 / 4e5)
    assert record.combine_link_utilization == pytest.approx(25 / 100e-6 / 4e5)
    assert record.physical_bytes == 444
    assert record.tflops_per_gpu == pytest.approx(8e9 / 1e-3 / 4 / 1e12)
    assert record.roofline_ratio == pytest.approx(2.0)
    assert record.link_peak_gbs == pytest.approx(4e-4)
    assert record.sm_clock_mhz == 1500
    assert record.peak_memory_bytes == 12345
    assert record.rejected_samples == 2
    assert samples["accepted"].tolist() == [True] * 32 + [False] * 8
    assert rows.TWIN_NOTE not in record.notes


def test_ranks_that_share_several_gpus_have_their_link_and_no_rate_of_it():
    record, _ = row("nvlink", 2)
    assert (record.link, record.ranks_per_gpu) == ("nvlink", 2)
    assert record.link_peak_gbs is None
    assert record.link_utilization is None
    assert SHARED_GPUS in record.notes
    assert SHARED_GPU not in record.notes
    assert wording.marks([record], fake_machine()) == [SHARED_GPUS]


def test_a_row_of_a_shared_gpu_claims_no_link():
    record, _ = row("hbm", 4)
    assert record.link_utilization is None
    assert record.wire_utilization is None
    assert record.physical_bytes is None
    assert SHARED_GPU in record.notes
    assert any("physical_bytes: unavailable" in note for note in record.notes)
    # The four ranks' work is that of one GPU.
    assert record.tflops_per_gpu == pytest.approx(8e9 / 1e-3 / 1e12)
    assert record.num_sms == 33


def test_a_row_tells_its_cycles_and_whether_its_hold_expired():
    record, _ = row("nvlink", 1)
    assert record.mma_utilization == pytest.approx(8e9 / 4 / (132 * 4096 * 1500e6 * 1e-3))
    assert record.hold_expired_share is None
    assert not [note for note in record.notes if "MHz" in note or "SM clock" in note]
    record, _ = row("nvlink", 1, hold_expired_share=1.0, peak_sm_clock_mhz=1750.0)
    assert (record.hold_expired_share, record.peak_sm_clock_mhz) == (1.0, 1750.0)
    (held,) = [note for note in record.notes if "before the CPU had queued the pass" in note]
    assert held.startswith("in 100 % of its samples")
    assert held.endswith("here 1500 MHz")
    assert any(note.startswith("peak_tflops is from an SM clock") for note in record.notes)
    record, _ = row("nvlink", 1, hold_expired_share=0.0, peak_sm_clock_mhz=1540.0)
    assert not [note for note in record.notes if "MHz" in note or "SM clock" in note]
