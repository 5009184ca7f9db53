"""The tree of runs as a picture needs it: the runs that traffic uses first, down to a bound.

    start --> [a 256 tokens] --> [b 1024 tokens] --> ...         512 prompts of late are followed;
                            `--> [c   64 tokens]                 the runs that most of them pass
                            `--> 12 more, 3,072 tokens           come first, then the longest

How long a branch that nobody uses will stay is guessed from what its replica evicts now: if that
was used X seconds ago, a run that was used Y seconds ago has X - Y left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain, count, islice
from typing import Final

import msgspec

from kvway_router.holding import Holding, Tier
from kvway_router.recent import RecentPrompts
from kvway_router.roster import Roster
from kvway_router.run_tree import RunTree
from kvway_router.runs import Node
from kvway_router.walking import pieces

MAX_VISITED: Final = 2048
"""Runs that are looked at for one picture."""
MAX_BRANCHES: Final = 400
"""Runs that it shows."""
MAX_SHARERS: Final = 16
"""Requests that are named as sharing a run."""
_FULL: Final = 0.95
"""Share of its blocks from which on a replica is taken to evict."""


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that holds a run.

    Attributes:
        replica: Its place in `Outline.replicas`.
        tokens: How many leading tokens of the run.
        idle_s: Since when it was not used there, at least; None if for longer than is known.
        left_s: For how long it will stay if nobody uses it, about; None while nothing is evicted.
    """

    replica: int
    tokens: int
    idle_s: float | None
    left_s: float | None


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    Attributes:
        id: Names it as long as it is there: the hash of its first block, in hexadecimal digits.
        parent: Place of the run before it in `Outline.branches`, -1 for none that is shown.
        start: Tokens of a prompt in front of it.
        tokens: Its own tokens.
        held_tokens: Its own and those of what was looked at behind it.
        requests: Prompts of late that pass it.
        sent_tokens: Their tokens here and behind it.
        holders: Replicas that hold at least its first block on their device.
        sharers: The last requests that pass it, the newest first.
        hidden: Runs right behind it that are not shown.
    """

    id: str
    parent: int
    start: int
    tokens: int
    held_tokens: int
    requests: int
    sent_tokens: int
    holders: list[Holder]
    sharers: list[str]
    hidden: int


class Outline(msgspec.Struct, frozen=True, kw_only=True):
    """What ``GET /admin/tree`` answers.

    Attributes:
        root: Name of the run that it begins with; empty for the whole tree.
        replicas: Those of the index.
        prompts: Prompts of late that were followed.
        prompt_tokens: Tokens of their full blocks.
        blocks: Different blocks in the index.
        block_size: Tokens per block.
        branches: Runs, each behind the one before it.
        hidden: Runs at the beginning that are not shown.
    """

    root: str
    replicas: list[str]
    prompts: int
    prompt_tokens: int
    blocks: int
    block_size: int
    branches: list[Branch]
    hidden: int


@dataclass(slots=True)
class _Use:
    """What the prompts of late did with a run."""

    requests: int = 0
    blocks: int = 0
    sharers: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Seen:
    """A run that was looked at."""

    node: Node
    parent: int
    start: int
    held: int
    sent: int
    num_children: int


class Outliner:
    """Makes one picture of the tree as it is now. Nothing may change meanwhile.

    Args:
        tree: The tree.
        roster: The replicas in it.
        recent: The traffic.
        capacities: Blocks that replicas have; those of others are what the index allows them.
        block_size: Tokens per block.
        now_s: The time, by the clock of `recent`.
    """

    def __init__(
        self,
        tree: RunTree,
        roster: Roster,
        recent: RecentPrompts,
        *,
        capacities: Mapping[str, int],
        block_size: int,
        now_s: float,
    ) -> None:
        """Follows the prompts of late.

        Complexity: a step for each prompt and run on its way.
        """
        self._tree = tree
        self._recent = recent
        self._block_size = block_size
        self._now_s = now_s
        devices = [(name, holdings[Tier.DEVICE]) for name, holdings in roster.items()]
        self._names = [name for name, _ in devices]
        self._devices = [device for _, device in devices]
        self._stays_s = [
            self._evicted_age_s(device, capacities.get(name, device.limit))
            for name, device in devices
        ]
        self._uses: dict[Node, _Use] = {}
        self._used_behind: dict[Node | None, list[Node]] = {}
        self._num_blocks = 0
        for prompt in reversed(list(recent)):
            self._num_blocks += len(prompt.hashes)
            for node, _, num in pieces(tree, prompt.hashes):
                self._use(node, num, prompt.request_id)

    def outline(self, root: int | None) -> Outline:
        """Returns the picture.

        Args:
            root: Hash of the first block of the run that it begins with; None for the whole tree.

        Raises:
            LookupError: There is no such run.
        """
        tops: Iterable[Node] = self._children(None)
        start = 0
        if root is not None:
            node = self._tree.at(root)
            tops, start = [node], _start_of(node)
        seen = self._visit(tops, start)
        shown = seen[:MAX_BRANCHES]
        num_shown: dict[int, int] = {}
        for each in shown:
            num_shown[each.parent] = num_shown.get(each.parent, 0) + 1
        num_tops = 1 if root is not None else len(self._tree.tops[None])
        return Outline(
            root="" if root is None else f"{root:016x}",
            replicas=self._names,
            prompts=len(self._recent),
            prompt_tokens=self._num_blocks * self._block_size,
            blocks=self._tree.num_blocks,
            block_size=self._block_size,
            branches=[
                self._branch(each, each.num_children - num_shown.get(place, 0))
                for place, each in enumerate(shown)
            ],
            hidden=num_tops - num_shown.get(-1, 0),
        )

    def _use(self, node: Node, num_blocks: int, request_id: str) -> None:
        use = self._uses.get(node)
        if use is None:
            use = self._uses[node] = _Use()
            if not isinstance(node.before, int):  # else it waits for what nobody holds
                self._used_behind.setdefault(node.before, []).append(node)
        use.requests += 1
        use.blocks += num_blocks
        if len(use.sharers) < MAX_SHARERS:
            use.sharers.append(request_id)

    def _children(self, node: Node | None) -> Iterator[Node]:
        """Yields the runs behind one, those that are used first, no more than may be visited."""
        used = self._used_behind.get(node, ())
        behind = self._tree.tops[None] if node is None else node.children or {}
        idle = (child for child in behind.values() if child not in self._uses)
        return islice(chain(used, idle), MAX_VISITED)

    def _visit(self, tops: Iterable[Node], start: int) -> list[_Seen]:
        """Visits the most used runs first, then the longest, each behind the one before it."""
        order = count()
        waiting: list[tuple[int, int, int, Node, int, int]] = []

        def push(node: Node, parent: int, start: int) -> None:
            use = self._uses.get(node)
            rank = (-use.requests if use else 0, -node.size, next(order))
            heappush(waiting, (*rank, node, parent, start))

        for node in tops:
            push(node, -1, start)
        seen: list[_Seen] = []
        while waiting and len(seen) < MAX_VISITED:
            *_, node, parent, start = heappop(waiting)
            use = self._uses.get(node)
            place = len(seen)
            num_children = len(node.children or ())
            seen.append(
                _Seen(node, parent, start, node.size, use.blocks if use else 0, num_children)
            )
            for child in self._children(node):
                push(child, place, start + node.size)
        for each in reversed(seen):
            if each.parent >= 0:
                seen[each.parent].held += each.held
                seen[each.parent].sent += each.sent
        return seen

    def _branch(self, seen: _Seen, hidden: int) -> Branch:
        use = self._uses.get(seen.node)
        size = self._block_size
        return Branch(
            id=f"{seen.node.hash_at(0):016x}",
            parent=seen.parent,
            start=seen.start * size,
            tokens=seen.node.size * size,
            held_tokens=seen.held * size,
            requests=use.requests if use else 0,
            sent_tokens=seen.sent * size,
            holders=list(self._holders(seen.node)),
            sharers=use.sharers if use else [],
            hidden=hidden,
        )

    def _holders(self, node: Node) -> Iterator[Holder]:
        for place, device in enumerate(self._devices):
            if not node.held & device.bit:
                continue
            entry = device.entries[node]
            idle_s = self._recent.age_s(entry.tick, self._now_s)
            stays_s = self._stays_s[place]
            left_s = None
            if stays_s is not None:
                left_s = 0.0 if idle_s is None else max(0.0, stays_s - idle_s)
            tokens = entry.count * self._block_size
            yield Holder(replica=place, tokens=tokens, idle_s=idle_s, left_s=left_s)

    def _evicted_age_s(self, device: Holding, capacity: int) -> float | None:
        """Returns how long ago what a replica evicts next was used; None if it has room."""
        oldest = device.oldest()
        if oldest is None or device.num_blocks < _FULL * min(capacity, device.limit):
            return None
        return self._recent.age_s(oldest.tick, self._now_s)


def _start_of(node: Node) -> int:
    """Counts the blocks in front of a run, as far as they are known."""
    start = 0
    while isinstance(node.before, Node):
        node = node.before
        start += node.size
    return start
