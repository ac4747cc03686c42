"""Phases inside of a kernel: from its CTAs' stamps to all ranks of a pass side by side."""

import json

import numpy as np
import pytest
from mok_stamps_data import NOW, stamps
from runs import inject, mokbench, write_config

from mokbench.errors import MokbenchError
from mokbench.fabric.group import PeerLostError
from mokbench.kernel_phases import PhaseTimes, phases_by_rank
from mokbench.measure.phase_stamps import read_phases
from mokbench.mok_config import STAMPS
from mokbench.mok_stamps import mok_phase_times
from mokbench.results import RunFolder
from mokbench.systems import Stamped
from mokbench.systems.cuda_mok import Mok


def spans_ns(times, at=NOW):
    return {name: (begin - at, end - at) for name, (begin, end) in times.spans_ns.items()}


def test_a_phase_is_from_its_first_cta_to_its_last():
    times = mok_phase_times(stamps())
    assert times.begun_ns == NOW + 1000
    assert times.waited_ns == [700, 300]
    assert spans_ns(times) == {
        "stage": (1000, 3000),
        "entry": (2500, 5000),
        "schedule": (4600, 6500),
        "dispatch": (6100, 21000),
        "gemm1": (7000, 30000),
        "gemm2": (14000, 41000),
        "combine": (41000, 50100),
        "sum": (50000, 61500),
    }


def test_a_cta_without_an_item_is_no_early_begin_and_no_late_end():
    idle = {"gemm1_begun": (7000, 0), "gemm1_ended": (30000, 0), "gemm2_begun": (15000, 0)}
    found = spans_ns(mok_phase_times(stamps(**idle, gemm2_ended=(40000, 0), waited=(700, 0))))
    assert (found["gemm1"], found["gemm2"]) == ((7000, 30000), (15000, 40000))
    assert found["combine"] == (40000, 50100)


def test_a_rank_whose_experts_got_no_rows_waits_from_its_schedule_on():
    names = ("pulled", "waited", "gemm1_begun", "gemm1_ended", "gemm2_begun", "gemm2_ended")
    times = mok_phase_times(stamps(**dict.fromkeys(names, (0, 0))))
    found = spans_ns(times)
    assert list(found) == ["stage", "entry", "schedule", "combine", "sum"]
    assert found["combine"] == (6500, 50100)
    assert times.waited_ns == [0, 0]


@pytest.mark.parametrize("name", [name for name in STAMPS if name not in ("begun", "waited")])
def test_a_stamp_that_no_cta_wrote_costs_only_the_phases_that_need_it(name):
    found = mok_phase_times(stamps(**{name: (0, 0)})).spans_ns
    whole = mok_phase_times(stamps()).spans_ns
    kept = [phase for phase in whole if found.get(phase) == whole[phase]]
    assert len(whole) - 2 <= len(kept) < len(whole)
    phases_by_rank([mok_phase_times(stamps(**{name: (0, 0)}))], 1)


def test_a_cta_that_never_began_is_not_counted():
    own = np.concatenate([stamps(), np.zeros((3, len(STAMPS)), np.int64)])
    assert mok_phase_times(own) == mok_phase_times(stamps())


@pytest.mark.parametrize(
    "own, said",
    [
        (np.zeros((4, 12), np.int64), "no CTA has stamped"),
        (np.zeros((0, 12), np.int64), "no CTA has stamped"),
        (np.zeros((4, 11), np.int64), r"\(4, 11\)"),
        (np.zeros(12, np.int64), r"\(12,\)"),
        (stamps(waited=(-5, 3)), "-5 ns"),
    ],
)
def test_what_are_no_stamps_is_named(own, said):
    with pytest.raises(ValueError, match=said):
        mok_phase_times(own)


def by_rank(found):
    return {
        one.rank: (one.clock, {s.name: (s.begin_us, s.end_us) for s in one.spans}) for one in found
    }


def test_ranks_of_one_gpu_count_from_the_first_of_them_all():
    found = phases_by_rank([mok_phase_times(stamps(NOW + at)) for at in (2500, 0)], 2)
    (clock0, late), (clock1, early) = by_rank(found).values()
    assert (clock0, clock1) == (0, 0)
    assert early["stage"] == (0.0, 2.0)
    assert late["stage"] == (2.5, 4.5)
    assert early["gemm2"] == (13.0, 40.0)
    assert late["combine"] == (42.5, 51.6)
    assert [(one.num_ctas, one.waited_us_median, one.waited_us_max) for one in found] == [
        (2, 0.5, 0.7)
    ] * 2


def test_ranks_of_several_gpus_each_count_from_their_own_begin():
    # Clocks of two GPUs may be any time apart.
    times = [mok_phase_times(stamps(at)) for at in (NOW, NOW + 3 * 10**18)]
    found = by_rank(phases_by_rank(times, 1))
    assert [clock for clock, _ in found.values()] == [0, 1]
    assert found[0][1] == found[1][1]
    assert found[1][1]["sum"] == (49.0, 60.5)


def test_two_ranks_a_gpu_share_a_zero_with_each_other_only():
    starts = (0, 500, 10**15, 10**15 - 250)
    found = by_rank(phases_by_rank([mok_phase_times(stamps(NOW + at)) for at in starts], 2))
    assert [clock for clock, _ in found.values()] == [0, 0, 1, 1]
    assert [spans["stage"][0] for _, spans in found.values()] == [0.0, 0.5, 0.25, 0.0]


class OneRank:
    """A group of this rank and of others whose answers are given."""

    ranks_per_gpu = 2

    def __init__(self, *others):
        self.others = others

    def gather(self, value):
        return [value, *self.others]


class Fake:
    def __init__(self, told):
        self.told = told

    def phase_times(self):
        if isinstance(self.told, Exception):
            raise self.told
        return self.told


GOOD = PhaseTimes(NOW, {"stage": (NOW, NOW + 1000)}, [3, 5])


@pytest.mark.parametrize(
    "own, other, said",
    [
        (MokbenchError("fault\nat length"), (GOOD, None), "rank 0: MokbenchError: fault"),
        (GOOD, (None, "RuntimeError: CUDA"), "rank 1: RuntimeError: CUDA"),
        (PhaseTimes(NOW, {"stage": (NOW + 9, NOW)}, [1]), (GOOD, None), "before 0.009"),
        (PhaseTimes(NOW, {"stage": (NOW - 9, NOW)}, [1]), (GOOD, None), "greater than or equal"),
        (PhaseTimes(NOW, {"nap": (NOW, NOW)}, [1]), (GOOD, None), "name: Input should be"),
        (PhaseTimes(NOW, {}, []), (GOOD, None), "unavailable: "),
        (PhaseTimes(NOW, None, [1]), (GOOD, None), "unavailable: "),
    ],
)
def test_what_cannot_be_read_is_a_note_and_loses_nothing_else(own, other, said):
    found = read_phases(Fake(own), OneRank(other))
    assert list(found) == ["kernel_phases_notes"]
    (note,) = found["kernel_phases_notes"]
    assert note.startswith("kernel_phases: unavailable: ")
    assert said in note
    assert "\n" not in note


def test_nothing_is_said_where_nothing_is_stamped():
    assert read_phases(object(), None) == {}
    assert read_phases(Fake(None), OneRank((None, None))) == {}
    with pytest.raises(PeerLostError):
        read_phases(Fake(PeerLostError("gone")), OneRank())


def test_mok_offers_stamps_only_where_its_option_is_on():
    class Workspace:
        class Config:
            stamps = False

        config = Config()

    system = Mok()
    assert isinstance(system, Stamped)
    system._workspace = Workspace()
    assert system.phase_times() is None
    Workspace.Config.stamps = True
    import torch

    Workspace.stamps = torch.from_numpy(stamps())
    assert system.phase_times() == mok_phase_times(stamps())


STAMPING = """
import sys
if "mokbench.worker" in sys.orig_argv:
    from mokbench.kernel_phases import PhaseTimes
    from mokbench.systems.alltoall import Alltoall
    from mokbench.systems.push import Push

    def phase_times(self):
        rank = self._fabric.rank
        zero = 10**18 * (rank + 1)
        return PhaseTimes(zero, {"stage": (zero, zero + 1000 * (rank + 1))}, [2000, 4000, 9000])

    def fails(self):
        raise OSError("no stamps today")

    Alltoall.phase_times, Push.phase_times = phase_times, fails
"""


def test_a_run_keeps_what_a_system_stamped_and_report_gives_it_back(tmp_path):
    out = tmp_path / "run"
    keep = ("--only", "routing=balanced", "--only", "tokens_per_rank=4")
    environment = inject(tmp_path, STAMPING)
    config = write_config(tmp_path)
    done = mokbench("run", config, "--out", out, "--no-charts", *keep, env=environment)
    assert done.returncode == 0, done.stderr
    rows = {record.system: record for record in RunFolder.open(out).records()}
    assert {record.status for record in rows.values()} == {"ok"}
    assert rows["mok"].kernel_phases == rows["push"].kernel_phases == []
    failed = "kernel_phases: unavailable: rank 0: OSError: no stamps today"
    assert failed in rows["push"].notes
    assert not [note for note in rows["mok"].notes if "kernel_phases" in note]
    # Nobody reads a failed file again: resuming leaves the rows as they are.
    again = mokbench("run", "--resume", out, "--no-charts")
    assert again.returncode == 0, again.stderr
    done = mokbench("report", out, "--format", "json")
    cells = {cell["id"]: cell for cell in json.loads(done.stdout)["cells"]}
    assert cells[rows["mok"].id]["kernel_phases"] == []
    assert cells[rows["alltoall"].id]["kernel_phases"] == [
        {
            "rank": rank,
            "clock": rank,
            "num_ctas": 3,
            "spans": [{"name": "stage", "begin_us": 0.0, "end_us": rank + 1.0}],
            "waited_us_median": 4.0,
            "waited_us_max": 9.0,
        }
        for rank in (0, 1)
    ]
