"""Which lines of a long history are read: as many as each series needs, whoever else writes."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from launches import cell, h200, write_launch

from mokbench.errors import ResultsError
from mokbench.regression.check import Checked, check
from mokbench.regression.history import History, folder_of
from mokbench.regression.history_lines import MOST_READ, WINDOW, read_launches
from mokbench.regression.launch import Launch
from mokbench.regression.levels import new_level
from mokbench.regression.verdict import Verdict
from mokbench.results import RunFolder

STEP = "step_time_us"


class Long:
    """A history that is written launch by launch, at 1 % noise."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.history = History.read(folder_of(folder / "history", h200()))
        self.count = 0
        self.rng = np.random.default_rng(1)

    def run(self, system: str, value: float) -> RunFolder:
        self.count += 1
        noisy = value * float(np.exp(self.rng.normal(0, 0.01)))
        record = cell(system, noisy, sm_clock_mhz=1500.0)
        path = self.folder / f"run-{self.count}"
        return write_launch(path, [record], self.count, name=f"config-{system}")

    def add(self, system: str, value: float, count: int, flag: str | None = None) -> list[Launch]:
        made = []
        for _ in range(count):
            launch = Launch.of(self.run(system, value))
            flags = {STEP: {launch.ids[0]: flag}} if flag else {}
            made.append(launch.model_copy(update={"flags": flags}))
        self.history.record(made, h200())
        return made

    def make(self, system: str, count: int) -> list[Launch]:
        return [Launch.of(self.run(system, 1000.0)) for _ in range(count)]

    def check(self, system: str, value: float) -> Checked:
        return check([self.run(system, value) for _ in range(3)], self.folder / "history")


@pytest.fixture
def long(tmp_path: Path) -> Long:
    return Long(tmp_path)


def only(checked: Checked) -> tuple[str, int]:
    (one,) = [judged for judged in checked.judged if judged.series[1] == STEP]
    return one.call.verdict, one.call.base_n


def systems(launches: Sequence[Launch]) -> list[str]:
    return [launch.ids[0].split(".")[1] for launch in launches]


def test_another_configs_launches_do_not_push_a_base_out(long: Long) -> None:
    long.add("push", 1000.0, 10)
    long.add("mok", 900.0, MOST_READ + 20)
    assert only(long.check("push", 1050.0)) == (Verdict.SLOWER, 10)
    read = History.read(long.history.folder).launches
    assert systems(read) == ["push"] * 10 + ["mok"] * MOST_READ


def test_a_slowdown_that_nobody_mends_stays_a_slowdown(long: Long) -> None:
    long.add("push", 1000.0, WINDOW + 10)
    long.add("push", 1060.0, MOST_READ + 20, flag="SLOWER")
    assert only(long.check("push", 1060.0)) == (Verdict.SLOWER, WINDOW)
    read = History.read(long.history.folder).launches
    assert len(read) == MOST_READ + WINDOW  # and not the whole file


def test_an_accepted_level_holds_however_old_it_is(long: Long) -> None:
    long.add("push", 1000.0, 10)
    made = long.add("push", 1060.0, 5, flag="SLOWER")
    long.history.accept(new_level("agreed", made, [(made[0].ids[0], STEP)]))
    long.add("mok", 900.0, MOST_READ)
    long.add("push", 1200.0, MOST_READ, flag="SLOWER")
    assert only(long.check("push", 1060.0)) == (Verdict.SAME, 5)


def test_all_accepted_levels_are_read(long: Long) -> None:
    made = long.add("push", 1000.0, 5)
    series = (made[0].ids[0], STEP)
    long.history.accept(new_level("of push", made, [series]))
    other = long.add("mok", 900.0, 5)
    for _ in range(MOST_READ):
        long.history.accept(new_level("of mok", other, [(other[0].ids[0], STEP)]))
    assert History.read(long.history.folder).levels[0].reason == "of push"


def test_what_does_not_look_like_a_launch_is_refused_however_old(long: Long) -> None:
    long.add("push", 1000.0, MOST_READ + 5)
    path = long.history.folder / "launches.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    assert len(read_launches(path)) == MOST_READ
    for damage in ("\n", "null\n", lines[0].replace('"ids":["', '"ids":["x" "')):
        path.write_text("".join([damage, *lines[1:]]), encoding="utf-8")
        with pytest.raises(ResultsError, match=r"launches\.jsonl:1: not a line of a history"):
            read_launches(path)


def test_other_options_under_the_ids_do_not_push_a_base_out(long: Long) -> None:
    long.add("push", 1000.0, 10)
    other = [
        launch.model_copy(update={"digests": ["other"]}) for launch in long.make("push", MOST_READ)
    ]
    long.history.record(other, h200())
    assert only(long.check("push", 1050.0)) == (Verdict.SLOWER, 10)


def test_launches_that_failed_do_not_push_a_base_out(long: Long) -> None:
    long.add("push", 1000.0, 10)
    failed = [
        launch.model_copy(update={"status": ["failed"], "values": {}})
        for launch in long.make("push", MOST_READ + 20)
    ]
    long.history.record(failed, h200())
    assert only(long.check("push", 1050.0)) == (Verdict.SLOWER, 10)


def test_flags_count_wherever_they_stand_in_a_line(long: Long) -> None:
    long.add("push", 1000.0, WINDOW)
    long.add("push", 1060.0, MOST_READ, flag="SLOWER")
    path = long.history.folder / "launches.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    moved = [{"flags": one.pop("flags"), **one} for one in lines]
    path.write_text("".join(json.dumps(one) + "\n" for one in moved), encoding="utf-8")
    assert only(long.check("push", 1060.0)) == (Verdict.SLOWER, WINDOW)
