"""The example of docs/prefix-cache.md, run on the real pool and scheduler, and drawn.

A token is a letter, a block has four, the pool ten. What requests say is written here, so that it
can be read; an engine that audits each step stands where the model would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from kvway_core.blocks import Namespace, block_hashes
from kvway_worker.cache.block_pool import BlockPool
from kvway_worker.cache.eviction import TIERS
from kvway_worker.scheduling.sampling_params import SamplingParams
from kvway_worker.scheduling.scheduler import Scheduler
from kvway_worker.scheduling.sequence import Sequence as Request
from kvway_worker.scheduling.sequence import Status
from kvway_worker.scheduling.step import Sampled, StepPlan, StepResult
from tests.worker.batching import AuditedSim

NUM_BLOCKS: Final = 10
BLOCK_SIZE: Final = 4
SPACE: Final = "_"
EMPTY: Final = "·"


class Example:
    """Ten blocks, and requests by name.

    Attributes:
        pool: The blocks.
        requests: Every request so far, in order.
    """

    def __init__(self) -> None:
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.scheduler = Scheduler(
            self.pool, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64
        )
        self.requests: dict[str, Request] = {}
        self._answers: dict[str, str] = {}
        self._engine = AuditedSim(self.pool)
        self._plan = StepPlan(0, ())

    def request(
        self,
        name: str,
        prompt: str,
        says: str,
        *,
        forks: Sequence[Request] = (),
        ephemeral: bool = False,
        priority: int = 0,
    ) -> Request:
        """Makes a request that will say something."""
        request = Request(
            name,
            tokens(prompt),
            params=SamplingParams(max_tokens=len(says)),
            namespace=Namespace("example", block_size=BLOCK_SIZE),
            forks=forks,
            ephemeral=ephemeral,
            priority=priority,
        )
        self.requests[name] = request
        self._answers[name] = says
        return request

    def add(self, *requests: Request) -> None:
        """Queues requests, in order."""
        for request in requests:
            self.scheduler.add(request)

    def plan(self) -> str:
        """Plans a step; draws the blocks and what is computed."""
        self._plan = self.scheduler.plan()
        self.scheduler.check_invariants()
        return "\n".join([self.draw(), *self._work()])

    def commit(self) -> str:
        """Computes the planned step and draws the blocks."""
        self._engine.execute(self._plan)
        sampled = {
            seq.request_id: Sampled((self._next(seq),))
            for row in self._plan.rows
            for seq in row.sampling
        }
        self.scheduler.commit(self._plan, StepResult(sampled))
        self.scheduler.check_invariants()
        return self.draw()

    def step(self) -> str:
        """Plans and computes a step; draws what was computed and the blocks behind it."""
        self.plan()
        return "\n".join([*self._work(), self.commit()])

    def draw(self) -> str:
        """Draws every block: tokens, who holds it, whether it is found."""
        blocks = range(NUM_BLOCKS)
        line = "────"
        return "\n".join(
            [
                _row("block", map(str, blocks)),
                "         ┌" + "┬".join(line for _ in blocks) + "┐",
                "         │" + "│".join(self._text(block) for block in blocks) + "│",
                "         └" + "┴".join(line for _ in blocks) + "┘",
                _row("held by", map(self._holders, blocks)),
                _row("found", map(self._found, blocks)),
                f"given away in this order: {self._order()}",
            ]
        )

    def pin(self, name: str, text: str) -> None:
        """Pins the full blocks of a text."""
        root = Namespace("example", block_size=BLOCK_SIZE).root()
        hashes = block_hashes(tokens(text), parent=root, block_size=BLOCK_SIZE)
        self.pool.pin(name, hashes, expires_s=3600.0)

    def cached(self, name: str) -> int | None:
        """Returns how many prompt tokens of a request were not computed."""
        return self.requests[name].cached_tokens

    def _work(self) -> Iterator[str]:
        for source, target, num_tokens in self._plan.copies:
            yield f"copied: {num_tokens} rows of block {source} into block {target}"
        for row in self._plan.rows:
            text = "".join(map(chr, row.token_ids))
            table = " ".join(map(str, row.block_table))
            yield f"{row.seq.request_id} computes {text!r} from token {row.start}, blocks {table}"

    def _next(self, seq: Request) -> int:
        return ord(self._answers[seq.request_id][seq.num_output_tokens])

    def _text(self, block: int) -> str:
        published = self.pool.content(block) or self.pool.tail(block)
        known: Sequence[int] = published.token_ids if published else ()
        if published is None:
            for seq, index in self._uses(block):
                known = seq.token_ids[index * BLOCK_SIZE : seq.num_computed_tokens][:BLOCK_SIZE]
        if not known and not self.pool.num_references(block):
            return " " * BLOCK_SIZE
        return "".join(map(chr, known)).ljust(BLOCK_SIZE, EMPTY)

    def _holders(self, block: int) -> str:
        return "".join(sorted(seq.request_id for seq, _ in self._uses(block)))

    def _uses(self, block: int) -> Iterator[tuple[Request, int]]:
        for seq in self.requests.values():
            if seq.status is Status.RUNNING:
                table = [*enumerate(seq.block_table), *seq.shared_blocks.items()]
                yield from ((seq, index) for index, held in table if held == block)

    def _found(self, block: int) -> str:
        if self.pool.is_pending(block):
            return "soon"
        if self.pool.content(block):
            return "yes"
        return "tail" if self.pool.tail(block) else ""

    def _order(self) -> str:
        tiers = [(tier, self.pool.tier(tier)) for tier in TIERS]
        cached = {block for _, blocks in tiers for block in blocks}
        blank = [block for block in self.pool.free_order() if block not in cached]
        parts = [
            f"{name} {_listed(blocks)}" for name, blocks in [("blank", blank), *tiers] if blocks
        ]
        return ", ".join(parts) or "none is free"


def tokens(text: str) -> list[int]:
    """Returns the tokens of a text: its letters."""
    return [ord(letter) for letter in text]


def _row(name: str, cells: Iterator[str]) -> str:
    return (f"{name:<10}" + " ".join(f"{cell:^4}" for cell in cells)).rstrip()


def _listed(blocks: Sequence[int]) -> str:
    return " ".join(map(str, blocks))


def pictures() -> Iterator[tuple[str, str]]:
    """Yields the name of each picture of the page, and the picture."""
    example = Example()
    add, request = example.add, example.request

    add(request("A", "You_are_kind.Hi", "!Q"))
    yield "1 planned", example.plan()
    yield "1 done", example.commit()

    add(request("B", "You_are_kind.Bye", "!Q"))
    yield "2", example.step()

    add(request("C", "Tell_me_so", "."), request("D", "Tell_me_so", "."))
    yield "3 planned", example.plan()
    yield "3 done", example.commit()

    add(request("E", "Tell_me_some", "."))
    yield "4", example.step()

    fork = request("G", "You_are_kind.Hi!Go", "abc")
    add(request("F", "You_are_kind.Hi!Go", "xyz", forks=[fork]))
    yield "5", example.step()
    yield "6", example.step()
    yield "7", example.step()

    example.pin("guide", "Tell_me_")
    yield "8", example.draw()

    add(request("H", "one-off_text", ".", ephemeral=True))
    yield "9 planned", example.plan()
    yield "9 done", example.commit()

    add(request("I", "a_text_of_5_blocks._", "."))
    yield "10", example.step()

    add(request("J", "You_are_kind.Go_on", ",go_on_!"))
    add(request("K", "You_are_kind.Hurry", "_up,_now"))
    picture = example.plan()
    while not example.scheduler.counters.preemptions:
        example.commit()
        picture = example.plan()
    yield "11 planned", picture
    yield "11 done", example.commit()
    yield "12", example.step()
