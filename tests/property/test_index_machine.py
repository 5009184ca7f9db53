"""The block index against a naive one that keeps sets and looks at everything each time."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
)

from kvway_router.holding import Speculation, Tier
from kvway_router.index import MIN_BYTES, BlockIndex

REPLICAS = ("a:1", "b:1", "c:1")
LIMIT = 9
MOSTLY_DEVICE = (Tier.DEVICE, Tier.DEVICE, Tier.DEVICE, Tier.HOST, Tier.DISK)
PROMPTS = [(a, b, a, b, a, b, a) for a in (0, 1) for b in (0, 1)]

Path = tuple[int, ...]
Key = tuple[str, Tier]

# Mostly along one line, so that replicas meet in its runs.
paths = st.one_of(
    st.integers(1, 7).map(lambda size: (0,) * size),
    st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple),
)
replicas = st.sampled_from(REPLICAS)
tiers = st.sampled_from(MOSTLY_DEVICE)


def block(path: Path) -> int:
    """The chained hash of the block at the end of a path of up to 63: its bits behind a one."""
    return int("1" + "".join(map(str, path)), 2)


def chain(path: Path) -> list[int]:
    return [block(path[: end + 1]) for end in range(len(path))]


@dataclass
class NaiveBlock:
    used: int
    confirmed: bool = False


class NaiveIndex:
    """The same promises, without a shortcut. Blocks are named by their paths."""

    def __init__(self) -> None:
        self.held: dict[Key, dict[Path, NaiveBlock]] = {}
        self.limits: dict[Key, int] = {}
        self.expected: dict[object, tuple[str, Path]] = {}
        self.now = 0

    def known(self, key: Key) -> dict[Path, NaiveBlock]:
        return self.held.setdefault(key, {})

    def limit(self, key: Key) -> int:
        return self.limits.get(key, LIMIT)

    def put(self, key: Key, path: Path, start: int, *, sure: bool) -> None:
        """Enters the blocks of a path from `start` on; what is before them is used as well."""
        self.now += 1
        blocks = self.known(key)
        end = min(len(path), start + self.limit(key))
        for size in range(start + 1, end + 1):
            blocks.setdefault(path[:size], NaiveBlock(self.now))
        for size in range(end, 0, -1):
            if path[:size] not in blocks:
                break
            blocks[path[:size]].used = self.now
            blocks[path[:size]].confirmed |= sure
        self.evict(key)

    def settle(self, promise: object, *, arrived: bool) -> None:
        if promise not in self.expected:
            return
        replica, path = self.expected.pop(promise)
        blocks = self.known((replica, Tier.DEVICE))
        others = [other for name, other in self.expected.values() if name == replica]
        for size in range(1, len(path) + 1):
            held = blocks.get(path[:size])
            if held is not None:
                held.confirmed |= arrived
                vouched = any(other[:size] == path[:size] for other in others)
                if not held.confirmed and not vouched:
                    del blocks[path[:size]]

    def forget(self, replica: str) -> None:
        for key in [key for key in self.held if key[0] == replica]:
            del self.held[key]
        self.expected = {p: what for p, what in self.expected.items() if what[0] != replica}

    def oldest(self, blocks: dict[Path, NaiveBlock]) -> Path | None:
        """The least recently used; of those used together the last of them."""
        return min(blocks, key=lambda path: (blocks[path].used, -len(path)), default=None)

    def evict(self, key: Key) -> None:
        blocks = self.known(key)
        while len(blocks) > self.limit(key):
            oldest = self.oldest(blocks)
            assert oldest is not None
            assert not [path for path in blocks if path[:-1] == oldest], "not a tail"
            del blocks[oldest]

    def expire(self, replica: str, before: int) -> None:
        for key, blocks in self.held.items():
            if key[0] == replica:
                for path in [path for path, held in blocks.items() if held.used < before]:
                    del blocks[path]

    def match(self, prompt: Path, slowest: Tier) -> dict[str, int]:
        counts = {}
        for replica in REPLICAS:
            held = {
                path for tier in Tier if tier <= slowest for path in self.known((replica, tier))
            }
            sizes = [size for size in range(1, len(prompt) + 1) if prompt[:size] not in held]
            counts[replica] = sizes[0] - 1 if sizes else len(prompt)
        return {replica: count for replica, count in counts.items() if count}


class IndexMachine(RuleBasedStateMachine):
    speculations = Bundle("speculations")
    marks = Bundle("marks")

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex(max_blocks_per_replica=LIMIT, max_bytes=2**16)
        self.index._tree._locator._max_waiting = 5
        self.index._leavers.at_once = self.index._leavers.per_change = 1
        self.naive = NaiveIndex()

    @rule(replica=replicas, tier=tiers, path=paths, start=st.integers(0, 6))
    def store(self, replica: str, tier: Tier, path: Path, start: int) -> None:
        """A run whose parent may be unknown to the replica or to all: then it is an orphan."""
        run = chain(path)[start:]
        if run:
            parent = block(path[:start]) if start else None
            self.index.store(replica, parent, run, tier=tier)
            self.naive.put((replica, tier), path, start, sure=True)

    @rule(replica=replicas, start=st.integers(0, 6), length=st.integers(1, 3))
    def store_on_the_line(self, replica: str, start: int, length: int) -> None:
        self.store(replica, Tier.DEVICE, (0,) * min(7, start + length), start)

    @rule(replica=replicas, tier=tiers, path=paths, start=st.integers(0, 6), back=st.booleans())
    def remove(self, replica: str, tier: Tier, path: Path, start: int, *, back: bool) -> None:
        run = chain(path)[start:]
        self.index.remove(replica, run[::-1] if back else run, tier=tier)
        for size in range(start + 1, len(path) + 1):
            self.naive.known((replica, tier)).pop(path[:size], None)

    @rule(replica=replicas, tier=tiers, path=paths)
    def remove_one(self, replica: str, tier: Tier, path: Path) -> None:
        self.index.remove(replica, [block(path)], tier=tier)
        self.naive.known((replica, tier)).pop(path, None)

    @rule(replica=replicas)
    def clear(self, replica: str) -> None:
        self.index.clear(replica)
        self.naive.forget(replica)

    @rule(replica=replicas)
    def remove_replica(self, replica: str) -> None:
        self.index.remove_replica(replica)
        self.naive.forget(replica)
        self.naive.limits.pop((replica, Tier.DEVICE), None)

    @rule(target=speculations, replica=replicas, path=paths)
    def speculate(self, replica: str, path: Path) -> Speculation:
        speculation = self.index.speculate(replica, chain(path))
        key = replica, Tier.DEVICE
        self.naive.expected[speculation] = replica, path[: self.naive.limit(key)]
        self.naive.put(key, path, 0, sure=False)
        return speculation

    @rule(speculation=speculations)
    def confirm(self, speculation: Speculation) -> None:
        """Also a second time, and after a roll-back: then it has no effect."""
        self.index.confirm(speculation)
        self.naive.settle(speculation, arrived=True)

    @rule(speculation=speculations)
    def rollback(self, speculation: Speculation) -> None:
        self.index.rollback(speculation)
        self.naive.settle(speculation, arrived=False)

    @rule(replica=replicas, limit=st.integers(1, 12))
    def set_limit(self, replica: str, limit: int) -> None:
        self.index.set_limit(replica, limit)
        self.naive.limits[replica, Tier.DEVICE] = limit
        self.naive.evict((replica, Tier.DEVICE))

    @rule(target=marks)
    def mark(self) -> tuple[int, int]:
        return self.index.tick, self.naive.now + 1

    @rule(replica=replicas, mark=consumes(marks))
    def expire(self, replica: str, mark: tuple[int, int]) -> None:
        self.index.expire(replica, before=mark[0])
        self.naive.expire(replica, before=mark[1])

    @rule(path=paths, slowest=st.sampled_from(Tier))
    def match(self, path: Path, slowest: Tier) -> None:
        found = self.index.match(chain(path), slowest=slowest)
        assert found == self.naive.match(path, slowest)

    @invariant()
    def agrees(self) -> None:
        self.index.check_invariants()
        different = set()
        for replica in REPLICAS:
            for tier in Tier:
                held = sorted(map(block, self.naive.known((replica, tier))))
                assert sorted(self.index.blocks(replica, tier)) == held
                assert self.index.num_blocks(replica, tier) == len(held)
                different.update(held)
        assert len(self.index) >= len(different)
        assert self.index._leavers or len(self.index) == len(different)
        for path in PROMPTS:
            assert self.index.match(chain(path)) == self.naive.match(path, Tier.DEVICE)


class BrokenReplicasMachine(RuleBasedStateMachine):
    """Events with hashes that no chain has: rings, a block twice, two parents.

    The bounds and the books hold. Prompts are hashed here, so what is expected is a chain always.
    """

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex(max_blocks_per_replica=30, max_bytes=MIN_BYTES)
        self.index._tree._locator._max_waiting = 5
        self.index._leavers.at_once = self.index._leavers.per_change = 1

    @rule(
        replica=replicas,
        parent=st.none() | st.integers(0, 12),
        run=st.lists(st.integers(0, 12), min_size=1, max_size=6),
        tier=tiers,
    )
    def store(self, replica: str, parent: int | None, run: list[int], tier: Tier) -> None:
        self.index.store(replica, parent, run, tier=tier)

    @rule(replica=replicas, run=st.lists(st.integers(0, 12), max_size=6), tier=tiers)
    def remove(self, replica: str, run: list[int], tier: Tier) -> None:
        self.index.remove(replica, run, tier=tier)

    @rule(replica=replicas, start=st.integers(0, 9), size=st.integers(1, 4), kept=st.booleans())
    def speculate(self, replica: str, start: int, size: int, *, kept: bool) -> None:
        speculation = self.index.speculate(replica, list(range(start, start + size)))
        (self.index.confirm if kept else self.index.rollback)(speculation)

    @rule(replica=replicas)
    def clear(self, replica: str) -> None:
        self.index.clear(replica)
        assert self.index.num_blocks(replica) == 0

    @invariant()
    def is_sound(self) -> None:
        self.index._tree.check()
        assert self.index.size_bytes <= MIN_BYTES
        for replica in REPLICAS:
            for tier in Tier:
                assert self.index.num_blocks(replica, tier) <= 30


_MORE = settings(max_examples=100, stateful_step_count=50, deadline=None)

TestIndex = IndexMachine.TestCase
TestBrokenReplicas = BrokenReplicasMachine.TestCase
TestIndex.settings = _MORE
TestBrokenReplicas.settings = _MORE


def act(machine: IndexMachine, promises: list[Speculation], rng: random.Random) -> None:
    """Does one thing, mostly along one line of blocks."""
    name, tier = rng.choice(REPLICAS), rng.choice(MOSTLY_DEVICE)
    branches = rng.random() < 0.3
    path = tuple(rng.getrandbits(1) if branches else 0 for _ in range(rng.randint(1, 40)))
    match rng.randrange(60):
        case 0:
            rng.choice([machine.clear, machine.remove_replica])(name)
            machine.set_limit(name, 60)
        case number if number < 5:
            machine.set_limit(name, rng.randint(20, 80))
        case number if number < 15:
            machine.remove_one(name, tier, path)
        case number if number < 30:
            promise: Any = machine.speculate(name, path)
            promises.append(promise)
        case number if number < 40 and promises:
            settle = rng.choice([machine.confirm, machine.rollback])
            settle(promises.pop(rng.randrange(len(promises))))
        case _:
            machine.store(name, tier, path, rng.randrange(len(path)))


@pytest.mark.parametrize("seed", range(4))
def test_a_long_life_agrees_with_the_naive_index(seed: int) -> None:
    """The same without shrinking: many steps in one life, with runs long enough to be cut."""
    rng = random.Random(seed)
    machine = IndexMachine()
    for name in REPLICAS:
        machine.set_limit(name, 60)
    promises: list[Speculation] = []
    for _ in range(500):
        act(machine, promises, rng)
        machine.agrees()
