"""The block index against a naive one that keeps sets and looks at everything each time."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
)

from kvway_router.index import BlockIndex, Speculation

REPLICAS = ("a:1", "b:1", "c:1")
LIMIT = 6
TOTAL = 13
PROMPTS = [(a, b, a, b, a, b, a) for a in (0, 1) for b in (0, 1)]

paths = st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple)
replicas = st.sampled_from(REPLICAS)


def block(path: tuple[int, ...]) -> int:
    """The chained hash of the block at the end of a path, as a readable number."""
    return int("1" + "".join(map(str, path)))


def chain(path: tuple[int, ...]) -> list[int]:
    return [block(path[: end + 1]) for end in range(len(path))]


@dataclass
class NaiveBlock:
    parent: int | None
    used: int
    confirmed: bool = False
    vouchers: list[object] = field(default_factory=list)


class NaiveIndex:
    """The same promises, without a shortcut."""

    def __init__(self) -> None:
        self.held: dict[str, dict[int, NaiveBlock]] = {}
        self.limits: dict[str, int] = {}
        self.now = 0

    def known(self, replica: str) -> dict[int, NaiveBlock]:
        self.limits.setdefault(replica, LIMIT)
        return self.held.setdefault(replica, {})

    def put(self, replica: str, parent: int | None, run: list[int]) -> list[NaiveBlock]:
        self.now += 1
        blocks = self.known(replica)
        entered = []
        for block_hash in run[: self.limits[replica]]:
            held = blocks.setdefault(block_hash, NaiveBlock(parent, self.now))
            held.used = self.now
            entered.append(held)
            parent = block_hash
        return entered

    def store(self, replica: str, parent: int | None, run: list[int]) -> None:
        for held in self.put(replica, parent, run):
            held.confirmed = True
        self.evict(replica)

    def speculate(self, replica: str, run: list[int], voucher: object) -> None:
        for held in self.put(replica, None, run):
            if not held.confirmed:
                held.vouchers.append(voucher)
        self.evict(replica)

    def settle(self, voucher: object, *, arrived: bool) -> None:
        for blocks in self.held.values():
            for block_hash, held in list(blocks.items()):
                if any(other is voucher for other in held.vouchers):
                    held.vouchers = [other for other in held.vouchers if other is not voucher]
                    held.confirmed |= arrived
                    if not held.confirmed and not held.vouchers:
                        self.drop(blocks, block_hash)

    def drop(self, blocks: dict[int, NaiveBlock], block_hash: int) -> None:
        gone = blocks.pop(block_hash)
        siblings = [other for other in blocks.values() if other.parent == gone.parent]
        if gone.parent in blocks and not siblings:
            parent = blocks[gone.parent]
            parent.used = max(parent.used, gone.used)

    def leaves(self, blocks: dict[int, NaiveBlock]) -> list[tuple[int, int]]:
        parents = {held.parent for held in blocks.values()}
        return sorted((held.used, h) for h, held in blocks.items() if h not in parents)

    def evict(self, replica: str) -> None:
        blocks = self.held[replica]
        while len(blocks) > self.limits[replica]:
            self.drop(blocks, self.leaves(blocks)[0][1])
        while sum(map(len, self.held.values())) > TOTAL:
            if len(blocks) <= TOTAL // len(self.held):
                blocks = max(self.held.values(), key=len)
            self.drop(blocks, self.leaves(blocks)[0][1])

    def expire(self, replica: str, before: int) -> None:
        blocks = self.held.get(replica, {})
        while (leaves := self.leaves(blocks)) and leaves[0][0] < before:
            self.drop(blocks, leaves[0][1])

    def match(self, prompt: list[int]) -> dict[str, int]:
        counts = {}
        for replica, blocks in self.held.items():
            missing = [depth for depth, h in enumerate(prompt) if h not in blocks]
            counts[replica] = missing[0] if missing else len(prompt)
        return {replica: count for replica, count in counts.items() if count}


class IndexMachine(RuleBasedStateMachine):
    speculations = Bundle("speculations")
    marks = Bundle("marks")

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex(max_blocks_per_replica=LIMIT, max_blocks_total=TOTAL)
        self.naive = NaiveIndex()

    @rule(replica=replicas, path=paths, start=st.integers(0, 6))
    def store(self, replica: str, path: tuple[int, ...], start: int) -> None:
        """A run whose parent may be unknown to the replica: then it is an orphan."""
        run = chain(path)[start:]
        if run:
            parent = block(path[:start]) if start else None
            self.index.store(replica, parent, run)
            self.naive.store(replica, parent, run)

    @rule(replica=replicas, path=paths, start=st.integers(0, 6))
    def remove(self, replica: str, path: tuple[int, ...], start: int) -> None:
        run = chain(path)[start:]
        self.index.remove(replica, run)
        for block_hash in run:
            if block_hash in self.naive.held.get(replica, {}):
                self.naive.drop(self.naive.held[replica], block_hash)

    @rule(replica=replicas)
    def clear(self, replica: str) -> None:
        self.index.clear(replica)
        self.naive.held.get(replica, {}).clear()

    @rule(replica=replicas)
    def remove_replica(self, replica: str) -> None:
        self.index.remove_replica(replica)
        self.naive.held.pop(replica, None)
        self.naive.limits.pop(replica, None)

    @rule(target=speculations, replica=replicas, path=paths)
    def speculate(self, replica: str, path: tuple[int, ...]) -> Speculation:
        speculation = self.index.speculate(replica, chain(path))
        self.naive.speculate(replica, chain(path), speculation)
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

    @rule(replica=replicas, limit=st.integers(1, 8))
    def set_limit(self, replica: str, limit: int) -> None:
        self.index.set_limit(replica, limit)
        self.naive.known(replica)
        self.naive.limits[replica] = limit
        self.naive.evict(replica)

    @rule(target=marks)
    def mark(self) -> tuple[int, int]:
        return self.index.tick, self.naive.now + 1

    @rule(replica=replicas, mark=consumes(marks))
    def expire(self, replica: str, mark: tuple[int, int]) -> None:
        self.index.expire(replica, before=mark[0])
        self.naive.expire(replica, before=mark[1])

    @rule(path=paths)
    def match(self, path: tuple[int, ...]) -> None:
        assert self.index.match(chain(path)) == self.naive.match(chain(path))

    @invariant()
    def agrees(self) -> None:
        self.index.check_invariants()
        for replica in REPLICAS:
            held = set(self.naive.held.get(replica, {}))
            assert self.index.num_blocks(replica) == len(held)
            for block_hash in held:
                # One block alone is a chain of one: it shows what is held, orphan or not.
                assert self.index.match([block_hash])[replica] == 1
        for path in PROMPTS:
            assert self.index.match(chain(path)) == self.naive.match(chain(path))


TestIndexMachine = IndexMachine.TestCase
