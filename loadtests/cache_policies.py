"""Which order of eviction hits most, on traces of real requests.

    lru            the oldest goes first
    pool           the block pool as it is: segmented LRU with its own two numbers
    HITS:SHARE     segmented LRU that protects a block after so many hits, at most this share

Each request looks its blocks up, takes what it hits, computes the rest and frees all of it before
the next one comes; the end of a chain goes before its head in all of them. A pool is as large as a
share of the distinct blocks of the trace. The hit rate is in blocks; the ceiling is that of a pool
that never evicts. Answers are left out: the traces do not say what is in them.

Traces are files `*.jsonl.gz`, either with `hash_ids` (chained ids of a prompt's blocks, as
https://github.com/kvcache-ai/Mooncake publishes them), or with sessions of agents (`r`: a list of
[.., .., .., .., parent, shared blocks, blocks] per session), of which ALIVE run in turn at a time.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import shlex
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from kvway_core.blocks import BlockHash, Namespace
from kvway_worker.cache.block_content import BlockContent
from kvway_worker.cache.block_pool import BlockPool
from kvway_worker.cache.eviction import PROTECTED_SHARE
from loadtests.report import Report, commit, machine, table

SHARES_PCT = (1, 2, 5, 10, 20, 50)
ALIVE = 16
ROOT = Path(__file__).parent.parent

Blocks = Sequence[int]
"""A prompt's blocks: equal ids mean equal tokens behind equal blocks."""


class Policy(Protocol):
    """A cache of a fixed number of blocks."""

    def request(self, blocks: Blocks) -> int:
        """Run one request alone and return how many of its blocks were hit."""
        ...


class SegmentedLru:
    """A model of a pool that protects a block after so many hits; plain LRU if it never does.

    Args:
        num_blocks: Blocks it holds.
        hits_to_protect: Requests that hit a block before it is protected; None for LRU.
        share: Of all blocks, how many may be protected.

    Complexity:
        O(blocks) a request.
    """

    def __init__(
        self, num_blocks: int, hits_to_protect: int | None, share: float = PROTECTED_SHARE
    ) -> None:
        self._num_blocks = num_blocks
        self._hits_to_protect = hits_to_protect
        self._max_protected = int(share * num_blocks)
        self._hits: dict[int, int] = {}
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()

    def request(self, blocks: Blocks) -> int:
        """Run one request alone and return how many of its blocks were hit."""
        hit = list(takewhile(self._hits.__contains__, blocks))
        for block in hit:
            (self._protected if block in self._protected else self._probation).pop(block)
            self._hits[block] += 1
        new = blocks[len(hit) :]
        for _ in range(len(self._hits) + len(new) - self._num_blocks):
            oldest, _ = (self._probation or self._protected).popitem(last=False)
            del self._hits[oldest]
        self._hits |= dict.fromkeys(new, 0)
        for block in reversed(blocks):
            self._free(block)
        return len(hit)

    def _free(self, block: int) -> None:
        needed = self._hits_to_protect
        if needed is None or self._hits[block] < needed:
            self._probation[block] = None
            return
        self._protected[block] = None
        if len(self._protected) > self._max_protected:
            oldest, _ = self._protected.popitem(last=False)
            self._probation[oldest] = None


class Pool:
    """The block pool itself, with blocks of one token.

    Args:
        num_blocks: Blocks it holds.
    """

    def __init__(self, num_blocks: int) -> None:
        self._pool = BlockPool(num_blocks, 1)
        self._namespace = Namespace("trace", block_size=1)

    def request(self, blocks: Blocks) -> int:
        """Run one request alone and return how many of its blocks were hit."""
        pool = self._pool
        hashes = [BlockHash(block.to_bytes(16, "big")) for block in blocks]
        hits = pool.match(hashes, blocks, namespace=self._namespace).blocks
        new = pool.allocate(len(blocks) - len(hits), hits=hits)
        table = [*hits, *new]
        for index in range(len(hits), len(blocks)):
            parent = table[index - 1] if index else self._namespace
            pool.publish(table[index], BlockContent(hashes[index], parent, (blocks[index],)))
        pool.commit()
        pool.free(table)
        pool.take_events()
        return len(hits)


Policies = Mapping[str, Callable[[int], Policy]]
"""Name -> makes a cache of so many blocks."""


def policies(variants: Sequence[str]) -> Policies:
    """Return the orders to compare.

    Raises:
        ValueError: A variant is not HITS:SHARE.
    """
    found: dict[str, Callable[[int], Policy]] = {
        "lru": lambda num_blocks: SegmentedLru(num_blocks, None),
        "pool": Pool,
    }
    for variant in variants:
        hits, _, share = variant.partition(":")
        found[variant] = functools.partial(
            SegmentedLru, hits_to_protect=int(hits), share=float(share)
        )
    return found


def hit_rate(policy: Policy, trace: Sequence[Blocks], num_blocks: int) -> float:
    """Return the share of a trace's blocks that are hit; prompts beyond the pool are left out."""
    fitting = [blocks for blocks in trace if len(blocks) <= num_blocks]
    hits = sum(policy.request(blocks) for blocks in fitting)
    return hits / max(1, sum(map(len, fitting)))


def read(file: Path) -> list[Blocks]:
    """Return the prompts of a trace in the order in which they come, none of a file without."""
    with gzip.open(file, "rt") as lines:
        records = [json.loads(line) for line in lines]
    if "hash_ids" in records[0]:
        return [record["hash_ids"] for record in records]
    if "r" in records[0]:
        return list(interleaved([record["r"] for record in records]))
    return []


def interleaved(sessions: Sequence[Sequence[Sequence[Any]]]) -> Iterator[Blocks]:
    """Yield the prompts of sessions, of which ALIVE take turns; one that ends lets in the next."""
    ids = count()
    waiting = deque(session_prompts(session, ids) for session in sessions)
    alive = deque(waiting.popleft() for _ in range(min(ALIVE, len(waiting))))
    while alive:
        session = alive.popleft()
        prompt = next(session, None)
        if prompt is not None:
            yield prompt
            alive.append(session)
        elif waiting:
            alive.append(waiting.popleft())


def session_prompts(session: Sequence[Sequence[Any]], ids: Iterator[int]) -> Iterator[Blocks]:
    """Yield the prompts of one session: blocks of the parent request, and new ones."""
    prompts: list[list[int]] = []
    for *_, parent, num_shared, num_blocks in session:
        shared = prompts[parent][:num_shared] if parent >= 0 else []
        prompts.append([*shared, *(next(ids) for _ in range(num_blocks - len(shared)))])
        yield prompts[-1]


def main(argv: Sequence[str]) -> int:
    """Compare the orders on every trace; print a table and, last, the JSON report."""
    args = parse(argv)
    files = sorted(args.traces.glob("*.jsonl.gz")) if args.traces else []
    if not files:
        sys.exit(
            f"no traces (*.jsonl.gz) in {args.traces or 'any folder named traces'}: get some, for "
            "example https://github.com/kvcache-ai/Mooncake, FAST25-release/traces, pack them "
            "with gzip, and name their folder with --traces"
        )
    orders = policies(args.variants)
    rows: list[Sequence[object]] = []
    metrics: dict[str, float] = {}
    for file in tqdm(files, unit="trace", file=sys.stderr):
        name = file.name.removesuffix(".jsonl.gz")
        trace = read(file)
        for row in compare(trace, orders) if trace else ():
            rows.append((name, *row.values()))
            metrics |= {f"{name}_{row['pool %']}pct_{key}": row[key] for key in orders}
    print("Hit rate in % of the blocks looked up, by size of the pool in % of distinct blocks")
    print(table(("trace", "pool %", "blocks", *orders, "ceiling"), rows))
    result = Report(
        bench="cache_policies",
        commit=commit(),
        machine=machine(),
        command="python -m loadtests.cache_policies " + shlex.join(argv),
        metrics=metrics,
    )
    if args.output:
        args.output.write_text(result.json() + "\n")
    print(result.json())
    return 0


def compare(trace: Sequence[Blocks], orders: Policies) -> Iterator[dict[str, float]]:
    """Yield one row per size of the pool: its size, each policy's hit rate, and the ceiling."""
    num_distinct = len({block for blocks in trace for block in blocks})
    for share in SHARES_PCT:
        num_blocks = max(1, num_distinct * share // 100)
        yield {
            "pool %": share,
            "blocks": num_blocks,
            **{
                name: round(100 * hit_rate(make(num_blocks), trace, num_blocks), 2)
                for name, make in orders.items()
            },
            "ceiling": round(
                100 * hit_rate(SegmentedLru(num_distinct, None), trace, num_distinct), 2
            ),
        }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Command line of the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    beside = next(iter(sorted(ROOT.parent.glob("*/traces"))), None)
    parser.add_argument(
        "--traces",
        type=Path,
        default=beside,
        help="folder of traces (default: one named traces in a folder next to the checkout)",
    )
    parser.add_argument(
        "--variants",
        nargs="*",
        default=["1:0.8", "1:0.1", "2:0.1"],
        help="further orders, each HITS:SHARE",
    )
    parser.add_argument("--output", type=Path, help="write the JSON report there, too")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
