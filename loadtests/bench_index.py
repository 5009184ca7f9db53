"""How fast the router's block index is and what it costs in memory, for 64 replicas.

    store    events of 128 blocks, the first 16 of which are one of 64 shared beginnings
    match    a prompt of 8,192 blocks; the replicas hold different lengths of it (the worst case
             for one walk), or all hold all of it
    remove   blocks one by one, tails first, as engines evict them
    forget   a replica that leaves, with all it holds
    restore  a snapshot of a million blocks, read from a file and entered

Times are processor time of this process, the best of some rounds: what else runs counts little.
Memory is what Python allocates for it (tracemalloc) per block and replica that holds it, in three
mixes: nothing shared in runs of 128, nothing shared in runs of 512, and prompts of 512 of which
384 are shared. Resident memory of the first is shown beside it.

NVIDIA Dynamo's RadixTree is measured on the same events if it is there
(`pip install ai-dynamo-runtime`); its events come as JSON, which is made beforehand.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import random
import shlex
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from kvway_router.index import BlockIndex
from kvway_router.snapshots import read_snapshot, write_snapshot
from loadtests.memory import resident_bytes
from loadtests.report import Report, commit, machine, table

NUM_REPLICAS: Final = 64
EVENT_BLOCKS: Final = 128
SHARED_BLOCKS: Final = 16
PROMPT_BLOCKS: Final = 8192
RUN_CAPACITY: Final = 2**20
MAX_BYTES: Final = 2**30


class Event(NamedTuple):
    """One replica stores one prompt."""

    replica: int
    hashes: list[int]


class Mix(NamedTuple):
    """How long prompts are, and how much of them is one of eight shared beginnings."""

    name: str
    num_blocks: int
    num_shared: int


MIXES: Final = (
    Mix("unshared_128", 128, 0),
    Mix("unshared_512", 512, 0),
    Mix("shared_384_of_512", 512, 384),
)


def events(num_blocks: int, *, mix: Mix, num_heads: int = 8, seed: int = 1) -> Iterator[Event]:
    """Yields events of about so many blocks in all; every replica gets every beginning."""
    rng = random.Random(seed)
    heads = [[rng.getrandbits(64) for _ in range(mix.num_shared)] for _ in range(num_heads)]
    for number in range(num_blocks // mix.num_blocks):
        tail = [rng.getrandbits(64) for _ in range(mix.num_blocks - mix.num_shared)]
        head = heads[number // NUM_REPLICAS % num_heads]
        yield Event(number % NUM_REPLICAS, head + tail)


def name(replica: int) -> str:
    """Returns what a replica is called."""
    return f"10.0.0.{replica}:8000"


def filled(made: Sequence[Event]) -> BlockIndex:
    """Returns an index with these events."""
    index = BlockIndex(max_blocks_per_replica=RUN_CAPACITY, max_bytes=MAX_BYTES)
    for replica, hashes in made:
        index.store(name(replica), None, hashes)
    return index


T = TypeVar("T")


def best_s(rounds: int, prepare: Callable[[], T], run: Callable[[T], object]) -> float:
    """Returns the shortest time of a run, in seconds; preparing it is not counted."""
    times = []
    for _ in range(rounds):
        prepared = prepare()
        gc.collect()
        begin = time.process_time()
        run(prepared)
        times.append(time.process_time() - begin)
    return min(times)


def store_all(prepared: tuple[BlockIndex, Sequence[Event]]) -> None:
    """Stores events, as the feed does."""
    index, made = prepared
    for replica, hashes in made:
        index.store(name(replica), None, hashes)


def speed(num_blocks: int, rounds: int) -> dict[str, float]:
    """Measures storing, matching, removing and forgetting."""
    mix = Mix("", EVENT_BLOCKS, SHARED_BLOCKS)
    made = list(events(num_blocks, mix=mix, num_heads=64))
    total = len(made) * EVENT_BLOCKS

    def empty() -> tuple[BlockIndex, Sequence[Event]]:
        return BlockIndex(max_blocks_per_replica=RUN_CAPACITY), made

    store_s = best_s(rounds, empty, store_all)
    gone = [(name(replica), hashes) for replica, hashes in made[:256]]

    def remove(index: BlockIndex) -> None:
        for replica, hashes in gone:
            for block_hash in reversed(hashes[SHARED_BLOCKS:]):
                index.remove(replica, [block_hash])

    remove_s = best_s(rounds, lambda: filled(made), remove)
    held = filled(made).num_blocks(name(0))
    forget_s = best_s(rounds, lambda: filled(made), lambda index: index.remove_replica(name(0)))
    return {
        "store_blocks_per_s": round(total / store_s),
        "remove_blocks_per_s": round(
            len(gone) * (EVENT_BLOCKS - SHARED_BLOCKS) / remove_s,
        ),
        "forget_blocks_per_s": round(held / forget_s),
    } | match_us(rounds)


def match_us(rounds: int) -> dict[str, float]:
    """Measures one walk for a long prompt that many replicas hold."""
    rng = random.Random(2)
    prompt = [rng.getrandbits(64) for _ in range(PROMPT_BLOCKS)]
    found = {}
    for key, step in (("match_us_8k_blocks_64_replicas", 128), ("match_us_all_equal", 0)):
        made = [Event(i, prompt[: PROMPT_BLOCKS - i * step]) for i in range(NUM_REPLICAS)]
        index = filled(made)
        if index.match(prompt)[name(1)] != PROMPT_BLOCKS - step:
            raise RuntimeError("the index does not hold what it was told")
        found[key] = round(per_call_us(lambda: index.match(prompt), rounds), 1)  # noqa: B023
    return found


def per_call_us(call: Callable[[], object], rounds: int, *, num_calls: int = 200) -> float:
    """Returns what one call takes, in microseconds."""

    def run(times: range) -> None:
        for _ in times:
            call()

    return best_s(rounds, lambda: range(num_calls), run) / num_calls * 1e6


def memory(num_blocks: int) -> dict[str, float]:
    """Measures bytes per block and replica that holds it."""
    found: dict[str, float] = {}
    for mix in MIXES:
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        index = filled_one_by_one(num_blocks, mix)
        gc.collect()
        used = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        held = sum(index.num_blocks(name(replica)) for replica in range(NUM_REPLICAS))
        found[f"bytes_{mix.name}"] = round(used / held, 2)
        del index
    before_bytes = resident_bytes()
    index = filled_one_by_one(num_blocks, MIXES[0])
    found["rss_bytes_unshared_128"] = round((resident_bytes() - before_bytes) / len(index), 2)
    found["bytes_per_block_replica"] = max(found[f"bytes_{mix.name}"] for mix in MIXES)
    return found


def filled_one_by_one(num_blocks: int, mix: Mix) -> BlockIndex:
    """Returns a filled index; no event is kept longer than it takes to store it."""
    index = BlockIndex(max_blocks_per_replica=RUN_CAPACITY)
    for replica, hashes in events(num_blocks, mix=mix):
        index.store(name(replica), None, hashes)
    return index


def restoring(num_blocks: int) -> dict[str, float]:
    """Measures what a restarted router spends on a snapshot."""
    index = filled_one_by_one(num_blocks, MIXES[0])
    boots = dict.fromkeys(map(name, range(NUM_REPLICAS)))
    begin = time.process_time()
    snapshot = index.snapshot(boots)
    taken_s = time.process_time() - begin
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "snapshot"
        write_snapshot(path, snapshot)
        begin = time.process_time()
        read = read_snapshot(path)
    after = BlockIndex(max_blocks_per_replica=RUN_CAPACITY)
    for replica_id in boots:
        if read is not None:
            after.restore(read, replica_id)
    restored_s = time.process_time() - begin
    if len(after) != len(index):
        raise RuntimeError("a snapshot lost blocks")
    scale = 1e6 / len(index)
    return {
        "snapshot_ms_per_million": round(taken_s * scale * 1e3, 1),
        "restore_ms_per_million": round(restored_s * scale * 1e3, 1),
    }


def dynamo(num_blocks: int, rounds: int) -> dict[str, float]:
    """Measures Dynamo's tree on the same events; nothing if it is not installed."""
    try:
        tree_type: Any = importlib.import_module("dynamo._core").RadixTree
    except ImportError:
        return {}
    mix = Mix("", EVENT_BLOCKS, SHARED_BLOCKS)
    made = [(e.replica, _as_json(e.hashes)) for e in events(num_blocks, mix=mix, num_heads=64)]

    def store(tree: Any) -> None:
        for replica, payload in made:
            tree.apply_event(replica, payload)
        tree.find_matches([1])  # answers when the events before it are in

    store_s = best_s(rounds, tree_type, store)
    rng = random.Random(2)
    prompt = [rng.getrandbits(63) for _ in range(PROMPT_BLOCKS)]
    tree = tree_type()
    for replica in range(NUM_REPLICAS):
        tree.apply_event(replica, _as_json(prompt[: PROMPT_BLOCKS - 128 * replica]))
    return {
        "dynamo_store_blocks_per_s": round(len(made) * EVENT_BLOCKS / store_s),
        "dynamo_match_us_8k_blocks_64_replicas": round(
            per_call_us(lambda: tree.find_matches(prompt), rounds, num_calls=20), 1
        ),
        "dynamo_rss_bytes_unshared_128": round(_dynamo_rss(tree_type, num_blocks), 1),
    }


def _dynamo_rss(tree_type: Any, num_blocks: int) -> float:
    before_bytes = resident_bytes()
    tree = tree_type()
    for replica, hashes in events(num_blocks, mix=MIXES[0], seed=3):
        tree.apply_event(replica, _as_json(hashes))
    tree.find_matches([1])
    return (resident_bytes() - before_bytes) / num_blocks


def _as_json(hashes: Sequence[int]) -> bytes:
    blocks = [{"block_hash": h, "tokens_hash": h, "mm_extra_info": None} for h in hashes]
    stored = {"parent_hash": None, "blocks": blocks}
    return json.dumps({"event_id": 1, "data": {"stored": stored}, "dp_rank": 0}).encode()


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write the report if asked to."""
    args = parse(argv)
    metrics = memory(args.blocks) | speed(args.blocks, args.rounds) | restoring(args.blocks)
    peer = dynamo(args.blocks, args.rounds)
    metrics |= peer
    print(table(("what", "measured"), [(key, f"{value:,}") for key, value in metrics.items()]))
    if not peer:
        print("no dynamo._core here: nothing to compare with (pip install ai-dynamo-runtime)")
    command = f"make bench-index ARGS={shlex.quote(shlex.join(argv))}"
    result = Report("index", commit(), machine(), command, metrics)
    if args.output is not None:
        args.output.write_text(result.json() + "\n")
    print(result.json())
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(
        prog="make bench-index",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks stored in a round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, of which the best counts")
    parser.add_argument("--output", type=Path, help="write the JSON report there, too")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
