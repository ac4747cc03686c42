"""A model of one rank's CTAs in a MoK pass: who waits for which counter and which slot, with random
interleavings. Items, slots and laps come from kernels/mok/plan.h itself.

It finds deadlocks, slots that are overwritten while they are read, and counters that do not add up.
It knows nothing of memory order: docs/mok.md argues that.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from mokbench import twin

# A process waits until the condition that it yields holds; None is a place to be interrupted at.
Process = Iterator[Callable[[], bool] | None]
CONSUMERS = 2


class ViolationError(AssertionError):
    """A slot was used by two at once, or all wait for each other."""


@dataclass(frozen=True)
class Rules:
    """What the kernel does; a mutant leaves one out."""

    flushes_before_waits: bool = True
    waits_for_free_x: bool = True
    waits_for_free_hidden: bool = True
    waits_for_ready_hidden: bool = True
    raises_padding: bool = True


@dataclass
class Ring:
    """Slots of one ring: the tile each holds, and who is at it; counters persist over passes."""

    slots: int
    ready: Counter = field(default_factory=Counter)
    free: Counter = field(default_factory=Counter)
    holds: dict[int, Any] = field(default_factory=dict)
    readers: Counter = field(default_factory=Counter)
    written: Counter = field(default_factory=Counter)

    def write(self, slot: int, tile: Any) -> None:
        if self.readers[slot]:
            raise ViolationError(
                f"slot {slot} is read as tile {self.holds[slot]}, written as {tile}"
            )
        if self.holds.get(slot) != tile:
            self.holds[slot], self.written[slot] = tile, 0
        self.written[slot] += 1

    def begin_read(self, slot: int, tile: Any, parts: int) -> None:
        if self.holds.get(slot) != tile or self.written[slot] != parts:
            raise ViolationError(f"slot {slot} holds {self.holds.get(slot)}, wanted whole: {tile}")
        self.readers[slot] += 1

    def end_read(self, slot: int, tile: Any) -> None:
        if self.holds.get(slot) != tile:
            raise ViolationError(f"slot {slot} changed from {tile} to {self.holds.get(slot)}")
        self.readers[slot] -= 1


@dataclass
class Rank:
    """What outlives a pass."""

    layer: Any
    group_tiles: int
    num_ctas: int
    pull_warps: int
    rules: Rules
    x: Ring = field(init=False)
    hidden: Ring = field(init=False)
    at: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))
    passes: int = 0

    def __post_init__(self) -> None:
        self.x, self.hidden = Ring(self.layer.ring_tiles), Ring(self.layer.hidden_ring_tiles)

    def run(self, expert_rows: list[int], random: Random) -> None:
        """One pass, to its end or to a ViolationError."""
        plan = twin.mok_pass(
            expert_rows,
            self.layer,
            group_tiles=self.group_tiles,
            num_ctas=self.num_ctas,
            x_at=self.at[0],
            hidden_at=self.at[1],
        )
        model = _Pass(self, plan)
        interleave(model.processes(), random)
        assert model.finished == CONSUMERS * self.num_ctas
        assert model.done == Counter(dict.fromkeys(range(len(plan["works"])), CONSUMERS))
        self.at = plan["rings"]


class _Cta:
    """Words in shared memory of one CTA."""

    def __init__(self) -> None:
        self.posted: list[int | None] = []  # items, by turn; None ends
        self.taken: Counter = Counter()  # turns read by each of loader and consumers
        self.resolved = 0


class _Pass:
    def __init__(self, rank: Rank, plan: dict[str, Any]) -> None:
        self.rank, self.rules = rank, rank.rules
        rank.passes += 1
        self.nth = rank.passes
        self.works, self.tiles = plan["works"], plan["tiles"]
        self.pull_parts = rank.layer.block_m // twin.MOK_PULL_ROWS
        self.parts = [
            CONSUMERS * len({w["column"] for w in self.works if w["gemm"] == gemm})
            for gemm in range(2)
        ]
        self.next_item = 0
        self.finished = 0
        self.done: Counter = Counter()
        # An item's row tile is the one that has its slot and lap.
        tile_at = {at: nth for nth, (_, _, at) in enumerate(self.tiles)}
        self.tile_of = [tile_at[work["x"]] for work in self.works]

    def processes(self) -> list[Process]:
        found: list[Process] = []
        for cta in range(self.rank.num_ctas):
            words = _Cta()
            found += [self.scheduler(words), self.loader(words)]
            found += [self.consumer(words, group) for group in range(CONSUMERS)]
            found += [self.puller(cta, warp) for warp in range(self.rank.pull_warps)]
        return found

    def scheduler(self, words: _Cta) -> Process:
        while True:
            item = self.next_item
            self.next_item += 1
            yield None
            turn = len(words.posted) + 1
            words.posted.append(item if item < len(self.works) else None)
            if item >= len(self.works):
                return
            yield lambda turn=turn: all(words.taken[who] >= turn for who in ("loader", 0, 1))

    def loader(self, words: _Cta) -> Process:
        rank = self.rank
        turn = 0
        while True:
            turn += 1
            yield lambda turn=turn: len(words.posted) >= turn
            item = words.posted[turn - 1]
            words.taken["loader"] = turn
            if item is None:
                return
            work, tile = self.works[item], self.tile_of[item]
            (x_slot, x_lap), (hidden_slot, hidden_lap) = work["x"], work["hidden"]
            if work["gemm"] == 0:
                rows = (x_lap + 1) * rank.layer.block_m
                yield lambda s=x_slot, rows=rows: rank.x.ready[s] >= rows
                if self.rules.waits_for_free_hidden:
                    least = hidden_lap * self.parts[1]
                    yield lambda s=hidden_slot, least=least: rank.hidden.free[s] >= least
                rank.x.begin_read(x_slot, (self.nth, tile), self.pull_parts)
            else:
                if self.rules.waits_for_ready_hidden:
                    least = (hidden_lap + 1) * self.parts[0]
                    yield lambda s=hidden_slot, least=least: rank.hidden.ready[s] >= least
                rank.hidden.begin_read(hidden_slot, (self.nth, tile), self.parts[0])
            words.resolved = turn
            yield None

    def consumer(self, words: _Cta, group: int) -> Process:
        turn, pending, sure = 1, None, False
        yield lambda: len(words.posted) >= 1
        item = words.posted[0]
        words.taken[group] = 1
        while True:
            flushes = not sure and self.rules.flushes_before_waits
            if pending is not None and (item is None or flushes):
                yield from self.store(pending)
                pending = None
            if item is None:
                break
            yield lambda turn=turn: words.resolved >= turn
            if pending is not None:
                yield from self.store(pending)
            yield None
            turn += 1
            yield lambda turn=turn: len(words.posted) >= turn
            pending, item = item, words.posted[turn - 1]
            words.taken[group] = turn
            sure = words.resolved >= turn
            yield None
            self.read(pending)
        self.finished += 1

    def read(self, item: int) -> None:
        """A warpgroup has multiplied an item; the second one ends the loads."""
        self.done[item] += 1
        work, tile = self.works[item], self.tile_of[item]
        if self.done[item] == CONSUMERS:
            ring, at = (self.rank.x, "x") if work["gemm"] == 0 else (self.rank.hidden, "hidden")
            ring.end_read(work[at][0], (self.nth, tile))

    def store(self, item: int) -> Process:
        """What GemmConsumer's store steps and MokOutput's finish do."""
        rank, work, tile = self.rank, self.works[item], self.tile_of[item]
        x_slot, hidden_slot = work["x"][0], work["hidden"][0]
        yield None
        if work["gemm"] == 1:
            rank.hidden.free[hidden_slot] += 1
            return
        rank.hidden.write(hidden_slot, (self.nth, tile))
        yield None
        rank.hidden.ready[hidden_slot] += 1
        rank.x.free[x_slot] += 1

    def puller(self, cta: int, warp: int) -> Process:
        rank = self.rank
        first = warp * rank.num_ctas + cta
        for part in range(
            first, len(self.tiles) * self.pull_parts, rank.pull_warps * rank.num_ctas
        ):
            tile = part // self.pull_parts
            _, count, (slot, lap) = self.tiles[tile]
            has_rows = count > part % self.pull_parts * twin.MOK_PULL_ROWS
            if self.rules.waits_for_free_x and (has_rows or self.rules.raises_padding):
                least = lap * self.parts[0]
                yield lambda slot=slot, least=least: rank.x.free[slot] >= least
            if not has_rows and not self.rules.raises_padding:
                # A mutant that does not wait where it has nothing to write.
                rank.x.ready[slot] += twin.MOK_PULL_ROWS
                rank.x.written[slot] += 1
                continue
            rank.x.write(slot, (self.nth, tile))
            yield None
            rank.x.ready[slot] += twin.MOK_PULL_ROWS


def interleave(processes: list[Process], random: Random) -> None:
    """Steps of all processes in random order, some of them seldom, until all have ended."""
    waiting: dict[int, Callable[[], bool] | None] = dict.fromkeys(range(len(processes)))
    weight = [random.choice((1.0, 1.0, 0.1, 0.01)) for _ in processes]
    while waiting:
        ready = [p for p, condition in waiting.items() if condition is None or condition()]
        if not ready:
            raise ViolationError(
                f"{len(waiting)} of {len(processes)} processes wait for each other"
            )
        (chosen,) = random.choices(ready, [weight[p] for p in ready])
        for _ in range(random.choice((1, 1, 4, 40))):
            try:
                waiting[chosen] = next(processes[chosen])
            except StopIteration:
                del waiting[chosen]
                break
            condition = waiting[chosen]
            if condition is not None and not condition():
                break
