"""What must be true of requests, their blocks and the step in flight, checked as a whole. Pure.

The books say what each block holds and what each step writes, so this sees whatever contradicts
them. It does not see the KV: where the books agree with each other and are wrong together, such as
a chunk of a prompt that is counted one token too long, only the answers tell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from typing_extensions import override

from kvway_core.blocks import Namespace
from kvway_core.errors import InvariantViolated
from kvway_worker.cache.block_content import BlockContent, TailContent
from kvway_worker.cache.pool_view import PoolView
from kvway_worker.scheduling.block_tables import BlockTables
from kvway_worker.scheduling.limits import Limits
from kvway_worker.scheduling.requests import Requests
from kvway_worker.scheduling.sequence import Sequence, Status
from kvway_worker.scheduling.step import Row, StepPlan


class _Writing(NamedTuple):
    """Who writes a block in a step.

    Attributes:
        row: Which of the step's rows.
        order: When the block was given to its row: rows in turn, blocks of drafts behind all.
        from_start: The first row of the block is written, or copied, too: nothing that was in it
            before this step is left.
    """

    row: int
    order: int
    from_start: bool


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """The parts of a scheduler.

    Attributes:
        limits: How much a step may compute.
        pool: The blocks.
        tables: Give blocks to requests.
        requests: Who is there.
        plan: The step in flight, None between two steps.

    Invariants:
        Besides those of the pool, the requests, the queue and the scheduler, of the table of each
        running request:

        1. It has each block once, and a block for each token that is computed.
        2. Published blocks hold what they should: this hash, these tokens, behind the block
           before. All of it is computed, or by the step in flight.
        3. The other blocks have no content, but for what a fork has published of the prompt, and
           who shares one has the same tokens in the same place.
        4. Fewer of its prompt tokens were cached than there are.

        And of the step in flight; a row whose request was aborted meanwhile is still computed, but
        what it reads is of no concern:

        5. Each running request has one row, that begins where its computed tokens end and has its
           tokens and its table. It is sampled exactly if all of them are computed, with its forks.
        6. No two rows write a block, nobody writes committed content, and what a row writes is
           held by others only if it is pending.
        7. What is pending is written by a row, or was computed before. The row that writes a
           block comes before those that only read it.
        8. Copies go to blocks that a row writes behind them: one exactly if the first rows of
           its block are others', and all of these rows. They come from where these tokens were
           computed, unless that block was given away since.
    """

    limits: Limits
    pool: PoolView
    tables: BlockTables
    requests: Requests
    plan: StepPlan | None

    def check(self) -> None:
        """Checks all invariants.

        Raises:
            InvariantViolated: If one does not hold; the message shows everything but the tokens.

        Complexity:
            O(n log n) for n blocks, and O(tokens in the tables).
        """
        if problem := self.problem():
            raise InvariantViolated(f"{problem}; {self}")

    def problem(self) -> str | None:
        """Returns which invariant is broken, None if all hold."""
        checks: list[Callable[[], str | None]] = [
            self.pool.state().problem,
            self._problem_of_requests,
            self._problem_of_references,
            self._problem_of_tables,
            self._problem_of_sharing,
            self._problem_of_rest if self.plan is None else _StepState(self, self.plan).problem,
        ]
        return next((problem for check in checks if (problem := check())), None)

    @override
    def __str__(self) -> str:
        """Returns everything there is to see, without tokens."""
        queue, plan = self.requests.waiting, self.plan or StepPlan(0, ())
        running = [_shown(seq) for seq in self.requests.running]
        waiting = [(seq.request_id, queue.rank(seq)) for seq in queue]
        rows = [(row.seq.request_id, row.start, row.end, row.num_drafts) for row in plan.rows]
        return (
            f"running {running}, waiting {waiting}, rows in flight {rows}, "
            f"copies {plan.copies}, pool: {self.pool.state()}"
        )

    def _problem_of_requests(self) -> str | None:
        try:
            self.requests.check_invariants()
        except InvariantViolated as exc:
            return str(exc)
        return None

    def _problem_of_references(self) -> str | None:
        held = [0] * self.pool.num_blocks
        for seq in self.requests.running:
            for block in (*seq.block_table, *seq.shared_blocks.values()):
                held[block] += 1
        if held != [self.pool.num_references(block) for block in range(self.pool.num_blocks)]:
            return f"4: requests hold {held}; {self.pool.free_order()} are free"
        return None

    def _problem_of_rest(self) -> str | None:
        """Says what is wrong between two steps."""
        running = self.requests.running
        behind = [seq.num_tokens - seq.num_computed_tokens for seq in running]
        if sum(num > 1 for num in behind) > 1 or min(behind, default=1) < 1:
            return f"3: requests are {behind} tokens behind"
        if self.pool.num_pending:
            return f"{self.pool.num_pending} blocks pending between steps"
        if any(seq.shared_blocks or self.tables.takes_rows(seq) for seq in running):
            return "requests take blocks of others between steps"
        return None

    def _problem_of_tables(self) -> str | None:
        ends = {row.seq: row.end - row.num_drafts for row in self.plan.rows} if self.plan else {}
        for seq in self.requests.running:
            end = ends.get(seq, seq.num_computed_tokens)
            if problem := self._problem_of_table(seq, end):
                return f"{problem}: {seq.request_id!r}"
        return None

    def _problem_of_table(self, seq: Sequence, end: int) -> str | None:
        """Says what is wrong with one table, when the tokens [0, end) are or will be computed."""
        size, table = self.pool.block_size, seq.block_table
        held = (*table, *seq.shared_blocks.values())
        if len(set(held)) != len(held) or len(table) * size < end:
            return "table 1: each block once, and one for each computed token"
        if seq.num_published_blocks * size > end:
            return "table 2: what is published is computed"
        for index in range(len(table)):
            block = seq.shared_or_own(index)
            found = self.pool.content(block)
            if index >= seq.num_published_blocks and found is None:
                continue
            if (index + 1) * size > end or found != self._content(seq, index):
                number = 2 if index < seq.num_published_blocks else 3
                return f"table {number}: block {block} has the content of the request"
        if seq.cached_tokens is None or not 0 <= seq.cached_tokens < seq.num_prompt_tokens:
            return f"table 4: {seq.cached_tokens} of {seq.num_prompt_tokens} tokens were cached"
        return None

    def _content(self, seq: Sequence, index: int) -> BlockContent:
        """Returns what a full block of a request holds."""
        start = index * self.pool.block_size
        tokens = tuple(seq.token_ids[start : start + self.pool.block_size])
        return BlockContent(seq.chain.hashes[index], parent_of(seq, index), tokens)

    def _problem_of_sharing(self) -> str | None:
        size = self.pool.block_size
        holders: dict[int, tuple[Sequence, int]] = {}
        for seq in self.requests.running:
            for index in range(seq.num_published_blocks, len(seq.block_table)):
                block = seq.block_table[index]
                other, place = holders.setdefault(block, (seq, index))
                start = index * size
                end = min(start + size, seq.num_computed_tokens, other.num_computed_tokens)
                if place != index or seq.token_ids[start:end] != other.token_ids[start:end]:
                    ids = f"{other.request_id!r} and {seq.request_id!r}"
                    return f"table 3: {ids} share block {block}"
        return None


@dataclass(frozen=True, slots=True)
class _StepState:
    """A step in flight, and what it is checked against."""

    state: SchedulerState
    plan: StepPlan

    def problem(self) -> str | None:
        """Returns which invariant of the step is broken."""
        rows, limits = self.plan.rows, self.state.limits
        if len(rows) > limits.max_num_seqs or self.plan.num_tokens > limits.max_num_batched_tokens:
            return f"1: {self.plan.num_tokens} tokens of {len(rows)} requests are too many"
        running = [row.seq for row in rows if row.seq.status is Status.RUNNING]
        if sorted(map(id, running)) != sorted(map(id, self.state.requests.running)):
            return "step 5: each running request has one row"
        for row in rows:
            if row.seq.status is Status.RUNNING and not _is_as_its_request(row):
                return f"step 5: the row of {row.seq.request_id!r} is as the request"
        copied = {target: num_rows for _, target, num_rows in self.plan.copies}
        written = self._written(copied)
        if written is None:
            return "step 6: two rows write one block"
        return (
            self._problem_of_written(written)
            or self._problem_of_pending(written)
            or self._problem_of_copies(written, copied)
        )

    def _written(self, copied: dict[int, int]) -> dict[int, _Writing] | None:
        """Returns who writes each block, None if two rows write one."""
        size = self.state.pool.block_size
        written: dict[int, _Writing] = {}
        for number, row in enumerate(self.plan.rows):
            first = row.start // size
            num_certain = -(-(row.end - row.num_drafts) // size)
            if row.start == first * size > 0:
                before = row.block_table[first - 1]
                # A block that is copied whole belongs to the first of those that read it.
                first -= before not in written and copied.get(before) == size
            for index in range(first, -(-row.end // size)):
                block = row.block_table[index]
                if block in written:
                    return None
                written[block] = _Writing(
                    number,
                    number if index < num_certain else len(self.plan.rows),
                    row.start <= index * size or block in copied,
                )
        return written

    def _problem_of_written(self, written: dict[int, _Writing]) -> str | None:
        pool = self.state.pool
        for block in written:
            if pool.is_pending(block):
                continue
            if pool.content(block) is not None:
                return f"step 6: block {block} is written and can be found"
            if pool.num_references(block) > 1:
                return f"step 6: block {block} is written and others hold it"
        return None

    def _problem_of_pending(self, written: dict[int, _Writing]) -> str | None:
        pool = self.state.pool
        # What was computed before may be published only now: its hash was taken until now.
        known = {
            block
            for row in self.plan.rows
            if not self.state.tables.takes_rows(row.seq)
            for block in row.block_table[: row.start // pool.block_size]
        }
        if sum(map(pool.is_pending, written.keys() | known)) != pool.num_pending:
            return "step 7: what is pending is written"
        for number, row in enumerate(self.plan.rows):
            if row.seq.status is Status.RUNNING:
                for block in row.block_table[: row.start // pool.block_size]:
                    if block in written and written[block].row > number:
                        return f"step 7: block {block} is written before it is read"
        return None

    def _problem_of_copies(
        self, written: dict[int, _Writing], copied: dict[int, int]
    ) -> str | None:
        if len(copied) != len(self.plan.copies) or not copied.keys() <= written.keys():
            return "step 8: each copy goes to a block of its own that is written"
        size, takes_rows = self.state.pool.block_size, self.state.tables.takes_rows
        for row in self.plan.rows:
            first, num_rows = divmod(row.start, size)
            if num_rows and takes_rows(row.seq) and row.block_table[first] not in copied:
                return f"step 8: {num_rows} rows are copied for {row.seq.request_id!r}"
        for source, target, num_rows in self.plan.copies:
            writing = written[target]
            row = self.plan.rows[writing.row]
            if row.seq.status is not Status.RUNNING:
                continue
            index = row.block_table.index(target)
            if not takes_rows(row.seq) or index * size + num_rows != row.start:
                return f"step 8: {num_rows} rows are copied for {row.seq.request_id!r}"
            later = written.get(source)
            if later is not None and later.order >= writing.order and later.from_start:
                continue  # given away behind this row: what it held is not known any more
            if later is not None and later.order < writing.order:
                return f"step 8: block {source} is copied before it is written"
            if not self._is_source(row.seq, source, index, row.start):
                return f"step 8: block {source} has what {row.seq.request_id!r} copies"
        return None

    def _is_source(self, seq: Sequence, source: int, index: int, end: int) -> bool:
        """Says whether a block holds a request's tokens from its block `index` up to `end`."""
        pool = self.state.pool
        start = index * pool.block_size
        tokens = tuple(seq.token_ids[start:end])
        known: BlockContent | TailContent | None = pool.content(source) or pool.tail(source)
        if known is not None:
            is_behind = known.parent == parent_of(seq, index)
            return is_behind and known.token_ids[: len(tokens)] == tokens
        return all(
            other.block_table[index : index + 1] == [source]
            and other.num_computed_tokens >= end
            and tuple(other.token_ids[start:end]) == tokens
            for other in self.state.requests.running
            if source in other.block_table
        )


def parent_of(seq: Sequence, index: int) -> int | Namespace:
    """Returns the block behind which block `index` of a request is, as it is after the step."""
    return seq.shared_or_own(index - 1) if index else seq.namespace


def _is_as_its_request(row: Row) -> bool:
    seq, end = row.seq, row.end - row.num_drafts
    certain = seq.token_ids[row.start : end]
    sampled = [seq, *seq.forks] if end == seq.num_tokens else []
    return (
        row.start == seq.num_computed_tokens
        and row.start < end <= seq.num_tokens
        and len(row.token_ids) == row.num_tokens
        and list(row.token_ids[: len(certain)]) == certain
        and list(row.block_table) == seq.block_table
        and [one for one in row.sampling if one is seq or one in seq.forks] == sampled
    )


def _shown(seq: Sequence) -> dict[str, object]:
    """Returns the state of a request, without its tokens."""
    return {
        "id": seq.request_id,
        "prompt": seq.num_prompt_tokens,
        "tokens": seq.num_tokens,
        "computed": seq.num_computed_tokens,
        "cached": seq.cached_tokens,
        "published": seq.num_published_blocks,
        "blocks": seq.block_table,
        "shared": seq.shared_blocks,
        "forks": [fork.request_id for fork in seq.forks],
    }
