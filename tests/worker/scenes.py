"""A batch with everything that blocks are shared by, for tests that break the books by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvway_core.errors import InvariantViolated
from kvway_worker.scheduling.sequence import Sequence
from kvway_worker.scheduling.step import Row, StepPlan
from tests.worker.batching import Bench, request

SEED = list(range(8))
"""Two blocks that are there, with nothing behind."""
TAILED = list(range(100, 110))
"""Two blocks and a tail that are there."""


@dataclass
class Scene:
    """A batch with everything that blocks are shared by, and its next step."""

    bench: Bench
    seqs: dict[str, Sequence]
    plan: StepPlan

    @property
    def pool(self) -> Any:
        return self.bench.pool

    def row(self, name: str) -> Row:
        return next(row for row in self.plan.rows if row.seq is self.seqs[name])

    def become(self, plan: StepPlan) -> None:
        """Puts another plan in flight."""
        self.plan = plan
        self.bench.scheduler._in_flight = plan

    def rewrite(self, name: str, **changes: Any) -> None:
        """Puts a plan in flight whose row of one request is another."""
        old = self.row(name)
        rows = [replace(row, **changes) if row is old else row for row in self.plan.rows]
        self.become(replace(self.plan, rows=tuple(rows)))

    def exchange(self, name: str, index: int, block: int) -> None:
        """Gives a request another block, with a reference, and its row too."""
        seq = self.seqs[name]
        self.pool.touch(block)
        self.pool.free([seq.block_table[index]])
        seq.block_table[index] = block
        self.rewrite(name, block_table=tuple(seq.block_table))

    def go_back(self, name: str, num_computed: int) -> None:
        """Lets a request compute tokens again that are computed."""
        seq, row = self.seqs[name], self.row(name)
        seq.num_computed_tokens = num_computed
        tokens = tuple(seq.token_ids[num_computed : row.end])
        self.rewrite(name, start=num_computed, num_tokens=len(tokens), token_ids=tokens)

    def make_pending(self, block: int) -> None:
        """Takes back that a block is committed; consistent, but for what says who writes it."""
        contents = self.pool._contents
        content = contents.of(block)
        contents._children.remove(content.parent, content.token_ids, block)
        contents._pending[block] = None


def scene(*, prefix_caching: bool = True) -> Scene:
    """Forks that write behind a shared block, twins of a new prompt, a hit, and a copied tail."""
    bench = Bench(40, block_size=4, prefix_caching=prefix_caching)
    bench.finish(request("seed", SEED, block_size=4), request("tailed", TAILED, block_size=4))
    fork = request("fork", range(50, 56), block_size=4, max_tokens=9)
    seqs = [
        request("leader", range(50, 56), block_size=4, max_tokens=9, forks=[fork]),
        fork,
        request("first", range(60, 71), block_size=4, max_tokens=9),
        request("second", range(60, 71), block_size=4, max_tokens=9),
        request("hit", [*SEED, 9, 9], block_size=4, max_tokens=9),
        request("copy", [*TAILED, 9, 9], block_size=4, max_tokens=9),
    ]
    bench.add(seqs[0])
    bench.step()
    bench.add(*seqs[2:])
    plan = bench.scheduler.plan()
    bench.scheduler.check_invariants()
    return Scene(bench, {seq.request_id: seq for seq in seqs}, plan)


def after_the_step() -> Scene:
    """The same when the result is in."""
    found = scene()
    found.bench.scheduler.commit(found.plan, found.bench.engine.execute(found.plan))
    found.bench.scheduler.check_invariants()
    return found


def seen(at: Scene, problem: str) -> None:
    """Checks that a problem is named, with all there is to see and no token."""
    with pytest.raises(InvariantViolated, match=problem) as raised:
        at.bench.scheduler.check_invariants()
    words = (
        "running [{",
        "'published'",
        "waiting [",
        "rows in flight [",
        "copies (",
        "pool: refs",
    )
    assert all(word in str(raised.value) for word in words)
