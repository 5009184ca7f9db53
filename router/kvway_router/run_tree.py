"""The radix tree of runs: where every block is, and which holdings have it.

Structure only: runs are added, split, joined and trimmed here; what is used, expected or too much
is the index's business.

    start --> [h0 h1 h2 h3] --> [h4 h5 h6]          a node has children only behind its end
                           `--> [h7]
    h9 (unknown) --> [h10 h11]                      an orphan waits under the hash of its parent
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from kvway_core.errors import InvariantViolated
from kvway_router.holding import Entry, Holding
from kvway_router.locator import Locator
from kvway_router.runs import HASH_BYTES, Node, pack, unpack

BLOCK_BYTES: Final = 13
"""What one block is counted as: its hash, its entry in the locator, and waste there."""
NODE_BYTES: Final = 448
"""What a node is counted as, without its blocks and the bits of its holders."""
ENTRY_BYTES: Final = 176
"""What one holding of one node is counted as."""
WAITED_FOR_BYTES: Final = 160
"""What a block that runs wait for is counted as."""

MAX_RUN: Final = 4096
"""Most blocks of one node: what splitting or extending one copies."""


class RunTree:
    """Every block that somebody holds, once, and who holds how many leading blocks of each run.

    Invariants:
        1. A run's last block is held by someone.
        2. `held` and `full` of every node say what the entries of the holdings say.
        3. A node is where its parent says, under its first hash; all can be located.
        4. The counts of blocks, nodes and entries are true.
        5. After `settle`, something keeps every two nodes apart that follow each other.

    Args:
        max_blocks: How many blocks it is laid out for.
    """

    def __init__(self, *, max_blocks: int) -> None:
        self.num_blocks = 0
        self.num_nodes = 0
        self.num_entries = 0
        self.slots: list[Holding | None] = []
        """The holding of each bit."""
        self.tops: dict[int | None, dict[int, Node]] = {None: {}}
        """Nodes without a node before them, by the hash they wait for; None: by nothing."""
        self._locator = Locator(max_blocks=max_blocks)
        self._loose: list[Node] = []

    @property
    def size_bytes(self) -> int:
        """What everything here is counted as, bytes."""
        # A node has two numbers with a bit for each holding.
        return (
            BLOCK_BYTES * self.num_blocks
            + (NODE_BYTES + len(self.slots) // 4) * self.num_nodes
            + ENTRY_BYTES * self.num_entries
            + WAITED_FOR_BYTES * (len(self.tops) - 1)
        )

    # -- looking --------------------------------------------------------------------------------

    def child(self, before: Node | int | None, block_hash: int) -> Node | None:
        """Returns the node that starts with a block behind a node or a place at the top."""
        siblings = before.children if isinstance(before, Node) else self.tops.get(before)
        return siblings.get(block_hash) if siblings else None

    def find(self, holding: Holding, block_hash: int) -> tuple[Node, int] | None:
        """Returns the node that has a block and its place there.

        Complexity: a comparison if it is the last one of the holding in the node it last looked
        into, which is what storing and removing in order ask for; else some microseconds.
        """
        hint = holding.hint
        if hint is not None and (entry := holding.entries.get(hint)) is not None:
            last = entry.count - 1
            if hint.hash_at(last) == block_hash:
                return hint, last
        found = self._locator.find(block_hash)
        if found is not None:
            holding.hint = found[0]
        return found

    def holdings(self, bits: int) -> Iterator[Holding]:
        """Yields the holdings of some bits."""
        while bits:
            lowest = bits & -bits
            holding = self.slots[lowest.bit_length() - 1]
            if holding is not None:
                yield holding
            bits ^= lowest

    def at(self, block_hash: int) -> Node:
        """Returns the node that has a block.

        Raises:
            LookupError: Nobody holds it.
        """
        found = self._locator.find(block_hash)
        if found is None:
            raise LookupError("no node has this block")
        return found[0]

    def nodes(self) -> Iterator[Node]:
        """Yields every node, each before those behind it."""
        waiting = [node for group in self.tops.values() for node in group.values()]
        while waiting:
            node = waiting.pop()
            yield node
            if node.children:
                waiting += node.children.values()

    # -- adding ---------------------------------------------------------------------------------

    def hold(self, holding: Holding, node: Node, count: int) -> Entry:
        """Notes that a holding has at least so many leading blocks of a node."""
        entry = holding.entries.get(node)
        if entry is None:
            entry = holding.add(node)
            self.num_entries += 1
            node.held = node.held | holding.bit if node.held else holding.bit
        if count > entry.count:
            holding.num_blocks += count - entry.count
            entry.count = count
            if count == node.size:
                node.full = node.full | holding.bit if node.full else holding.bit
        return entry

    def grow(
        self, holding: Holding, before: Node | int | None, hashes: Sequence[int]
    ) -> tuple[Node, int]:
        """Adds blocks that are not there yet behind a node or at the top, for one holding.

        Returns:
            The node that ends with the new blocks, and how many these are: at most `MAX_RUN`, and
            fewer than asked for when some run waits for one of them: that one is the last then,
            and what waited is behind it now.
        """
        hashes = hashes[:MAX_RUN]
        if len(self.tops) > 1 and not self.tops.keys().isdisjoint(hashes):
            end = next(end for end, h in enumerate(hashes, 1) if h in self.tops)
            hashes = hashes[:end]
        run = pack(hashes)
        if (
            isinstance(before, Node)
            and not before.children
            and before.held == before.full == holding.bit
            and before.size + len(hashes) <= MAX_RUN
        ):
            node = before
            node.run += run
            node.full = 0
            self._locator.extend(node, run)
        else:
            node = Node(before, run)
            self._siblings(before)[hashes[0]] = node
            self.num_nodes += 1
            self._locator.add(node)
        self.num_blocks += len(hashes)
        self.hold(holding, node, node.size)
        if len(self.tops) > 1 and hashes[-1] in self.tops:
            self._adopt(node)
        return node, len(hashes)

    def split(self, node: Node, size: int) -> Node:
        """Cuts a node behind its first `size` blocks.

        Returns:
            The new node with these. The rest, with all that is behind it, stays the old node.
        """
        upper = Node(node.before, node.run[: size * HASH_BYTES])
        self._siblings(node.before)[upper.hash_at(0)] = upper
        node.run = node.run[size * HASH_BYTES :]
        node.before = upper
        upper.children = {node.hash_at(0): node}
        upper.held = upper.full = node.held
        for holding in self.holdings(node.held):
            entry = holding.entries[node]
            if entry.count > size:
                holding.split(entry, upper)
                self.num_entries += 1
                continue
            holding.rename(entry, upper)
            node.held &= ~holding.bit
            if entry.count < size:
                upper.full &= ~holding.bit
        self.num_nodes += 1
        # Who held only the beginning may have been what kept the rest and what is behind it apart.
        self._loose.append(node)
        if upper.size > node.size:
            self._locator.take_name(upper, node)
            self._locator.add(node)
            self._locator.note_stale(upper, node.size)
        else:
            self._locator.add(upper)
            self._locator.note_stale(node, size)
        return upper

    # -- taking away ----------------------------------------------------------------------------

    def shrink(self, holding: Holding, node: Node, count: int) -> None:
        """Notes that a holding has only the first `count` blocks of a node, fewer than before."""
        entry = holding.entries[node]
        holding.num_blocks -= entry.count - count
        was_full = node.full & holding.bit
        node.full &= ~holding.bit
        if count:
            entry.count = count
            entry.sure = min(entry.sure, count)
        else:
            holding.drop(entry)
            self.num_entries -= 1
            node.held &= ~holding.bit
        self._loose.append(node)
        if was_full and not node.full:
            self._trim(node)

    def loosen(self, nodes: Sequence[Node]) -> None:
        """Says that these nodes may have become one with their neighbours."""
        self._loose += nodes

    def settle(self) -> None:
        """Joins runs that nothing keeps apart any more. Ends every change."""
        loose, self._loose = self._loose, []
        for node in loose:
            if not node.held:
                continue
            lowest = node
            if node.children and len(node.children) == 1:
                (lowest,) = node.children.values()
            for start in (lowest, node):
                while start.held and self._join(start):
                    pass

    def check(self) -> None:
        """Checks its invariants. Costs all there is, times some microseconds.

        Raises:
            InvariantViolated: One does not hold.
        """
        nodes = list(self.nodes())
        for node in nodes:
            self._check_node(node)
        counts = (
            sum(node.size for node in nodes),
            len(nodes),
            sum(len(holding.entries) for holding in self.slots if holding is not None),
        )
        if counts != (self.num_blocks, self.num_nodes, self.num_entries):
            raise InvariantViolated(f"4: {counts} blocks, nodes, entries are not what is counted")
        known = set(map(id, nodes))
        for holding in self.slots:
            if holding is not None and any(id(node) not in known for node in holding.entries):
                raise InvariantViolated("2: an entry of a node that is gone")

    # -- inside ---------------------------------------------------------------------------------

    def _siblings(self, before: Node | int | None) -> dict[int, Node]:
        if not isinstance(before, Node):
            return self.tops.setdefault(before, {})
        if before.children is None:
            before.children = {}
        return before.children

    def _detach(self, node: Node) -> None:
        """Takes a node from what it is behind; lists that are empty then go."""
        before = node.before
        siblings = self._siblings(before)
        del siblings[node.hash_at(0)]
        if isinstance(before, Node):
            if not siblings:
                before.children = None
            self._loose.append(before)
        elif not siblings and before is not None:
            del self.tops[before]

    def _adopt(self, node: Node) -> None:
        """Puts the orphans that waited for the last block of a node behind it."""
        top = node
        while isinstance(top.before, Node):
            top = top.before
        # A run that waits for a block behind itself keeps waiting: only a broken replica says so.
        waited = self.tops[node.hash_at(-1)]
        orphans = {first: orphan for first, orphan in waited.items() if orphan is not top}
        for orphan in orphans.values():
            self._detach(orphan)
            orphan.before = node
        if orphans:
            node.children = orphans
        self._loose += orphans.values()

    def _trim(self, node: Node) -> None:
        """Cuts off the blocks that nobody holds any more; what is behind them waits for them."""
        if node.children:
            missing = node.hash_at(-1)
            children, node.children = node.children, None
            for first, child in children.items():
                child.before = missing
                if first in self._siblings(missing):
                    self._forget(child)
                else:
                    self.tops[missing][first] = child
        entries = {holding.bit: holding.entries[node] for holding in self.holdings(node.held)}
        size = max((entry.count for entry in entries.values()), default=0)
        num_lost = node.size - size
        self.num_blocks -= num_lost
        if not size:
            self._locator.drop(node)
            self.num_nodes -= 1
            self._detach(node)
            return
        node.run = node.run[: size * HASH_BYTES]
        for bit, entry in entries.items():
            if entry.count == size:
                node.full |= bit
        self._locator.note_stale(node, num_lost)

    def _forget(self, node: Node) -> None:
        """Drops a node and all that is behind it: only a broken replica has a block twice."""
        waiting = [node]
        while waiting:
            node = waiting.pop()
            waiting += (node.children or {}).values()
            for holding in self.holdings(node.held):
                entry = holding.entries[node]
                holding.num_blocks -= entry.count
                holding.drop(entry)
                self.num_entries -= 1
            node.held = node.full = 0
            self._locator.drop(node)
            self.num_nodes -= 1
            self.num_blocks -= node.size

    def _apart(self, node: Node) -> bool:
        """Tells whether something keeps a node and what is before it two."""
        before = node.before
        if (
            not isinstance(before, Node)
            or before.held != node.held
            or before.full != before.held
            or len(before.children or ()) != 1
            or before.size + node.size > MAX_RUN
        ):
            return True
        for holding in self.holdings(node.held):
            front, entry = holding.entries[before], holding.entries[node]
            if front.tick != entry.tick or (entry.sure and front.sure < front.count):
                return True
        return False

    def _join(self, node: Node) -> bool:
        """Makes a node one with the one before it, if nothing keeps them apart."""
        before = node.before
        if not isinstance(before, Node) or self._apart(node):
            return False
        for holding in self.holdings(node.held):
            front, entry = holding.entries[before], holding.entries[node]
            holding.drop(front)
            self.num_entries -= 1
            entry.count += front.count
            entry.sure += front.sure
        self._siblings(before.before)[before.hash_at(0)] = node
        node.before = before.before
        added = before.run
        if before.size > node.size:
            added = node.run
            self._locator.swap(before, node)
        self._locator.drop(before)
        node.run = before.run + node.run
        self._locator.extend(node, added)
        before.held = before.full = 0
        before.children = None
        self.num_nodes -= 1
        return True

    def _check_node(self, node: Node) -> None:
        if not node.full or not node.size or self.child(node.before, node.hash_at(0)) is not node:
            raise InvariantViolated("1, 3: a node that nobody has, or that is not in its place")
        if not self._apart(node):
            raise InvariantViolated("5: two nodes that could be one")
        held = full = 0
        for holding in self.slots:
            entry = holding.entries.get(node) if holding is not None else None
            if holding is not None and entry is not None:
                held |= holding.bit
                full |= holding.bit if entry.count == node.size else 0
                if not 0 < entry.count <= node.size or entry.node is not node:
                    raise InvariantViolated("2: an entry does not fit its node")
        if (held, full) != (node.held, node.full):
            raise InvariantViolated("2: a node and the entries differ")
        if len(set(unpack(node.run))) == node.size:
            self._locator.check(node)
