"""What a decision costs before a request is on its way: hash, match and choose, 16 replicas.

    decision   tokens -> block hashes -> longest matches -> load of each -> choice
    next turn  the same for a prompt whose beginning was seen before: its last 512 tokens are new
    floor      the block hashes alone: no decision about unknown tokens is faster

In two mixes. All different: each replica holds another length of each prompt, so that the walk
ends at 16 places; these are the keys without a suffix. Typical: a quarter each holds nothing, a
quarter, half and three quarters. In both some replicas work, and each decision is charged and
given back, so that the next one finds a load changed. Tokens are given as the tokenizer keeps
them, and those of a next turn were put together just before, as there; tokenizing itself is `make
bench-tokenize`. What a decision's record shows is not made.

NVIDIA Dynamo's SelectionService decides on the same prompts, if it is there
(`pip install ai-dynamo-runtime`); it runs without KV events, so it knows what it was asked before
and no more. `vs_dynamo_*` is its time over ours in the mix of all different, in turns, in one
process. Our own times are taken before it is loaded: its threads share the processor's caches.

sglang-router decides inside its proxy and on text: it offers no decision to measure. What can be
compared is a whole relayed request.

Times are processor time: of this thread, and of the whole process for Dynamo, which decides on
threads of its own. They are the best of the rounds; ratios are the medians of those
of each round. So what else runs counts little.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import random
import shlex
import statistics
import sys
import time
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from kvway_core.answers import BlockCounts
from kvway_core.api import LoadReport
from kvway_core.blocks import SCHEME, Namespace, block_hashes, event_hash
from kvway_core.clock import SystemClock
from kvway_router.chains import ChainCache, EventChain
from kvway_router.index import BlockIndex
from kvway_router.ledger import Ledger
from kvway_router.policies.base import Situation, decide
from kvway_router.policies.registry import POLICIES, first_state
from kvway_router.policy import Decision, PolicyParams, Prompt
from kvway_router.telemetry import Telemetry
from loadtests.report import Report, commit, machine, table

NUM_REPLICAS: Final = 16
NAMESPACE: Final = Namespace("bench")
ROOT: Final = NAMESPACE.root()
SIZES: Final = {"2k": 2_048, "8k": 8_192, "131k": 131_072}
TURN_TOKENS: Final = 512


MIXES: Final = {"": NUM_REPLICAS, "_typical": 4}
"""Suffix of the keys, and how many different lengths of a prompt the replicas hold."""


class Bench:
    """A router's deciding parts, with replicas that hold and do different things."""

    def __init__(self, prompts: Sequence[array[int]], *, num_lengths: int) -> None:
        """Has replicas hold so many different lengths of each prompt, and some of them work."""
        self.params = PolicyParams()
        self.index = BlockIndex()
        self.ledger = Ledger(clock=SystemClock(), params=self.params)
        self.names = [f"10.0.0.{number}:8000" for number in range(NUM_REPLICAS)]
        self.policy = POLICIES["cost"]
        self.state = first_state(self.policy)
        self.chains = ChainCache(NAMESPACE)
        for prompt in prompts:
            chain = block_hashes(prompt, parent=NAMESPACE.root())
            hashes = [event_hash(block) for block in chain]
            for number, name in enumerate(self.names):
                num_held = len(hashes) * (number % num_lengths) // num_lengths
                self.index.store(name, None, hashes[:num_held])
        for number, name in enumerate(self.names):
            self.ledger.report(name, Telemetry.of(_report(number)), asked_s=self.ledger.now())
        for number in range(NUM_REPLICAS):
            for _ in range(number % 4):
                self.ledger.charge(self.decide(prompts[0], self.chains).chosen)

    def decide(self, tokens: array[int], chains: ChainCache) -> Decision:
        """Takes a prompt through the steps that are measured."""
        chain = EventChain(chains)
        chain.extend(tokens)
        hashes = chain.hashes[:]
        matches = self.index.match(hashes)
        situation = Situation(
            prompt=Prompt(
                num_tokens=len(tokens),
                block_size=NAMESPACE.block_size,
                prefix_key=hashes[0].to_bytes(8, "big"),
                num_output_tokens=256,
            ),
            matches=matches,
            loads=self.ledger.loads((name, self.index.num_blocks(name)) for name in self.names),
            params=self.params,
            mean_work_s=self.ledger.mean_work_s,
            slower=self.index.match_slower(hashes, matches),
            now_s=self.ledger.now(),
        )
        decision, self.state = decide(self.policy, situation, self.state)
        return decision

    def serve(self, tokens: array[int], chains: ChainCache) -> None:
        """Has a prompt decided, charged and given back."""
        self.ledger.charge(self.decide(tokens, chains).chosen).close()


def _report(number: int) -> LoadReport:
    """Returns what an idle worker says, each a little faster than the one before."""
    return LoadReport(
        boot_id=f"boot-{number}",
        model="bench",
        block_size=NAMESPACE.block_size,
        hash_scheme=SCHEME,
        state="ready",
        num_running=0,
        num_waiting=0,
        waiting_uncached_tokens=0,
        blocks=BlockCounts(free=16_384, cached=0, total=16_384),
        prefill_tokens_per_s=8_000.0 + number,
        decode_step_s=0.02,
        max_model_len=2 * SIZES["131k"],
        max_num_seqs=64,
    )


class Peer:
    """Dynamo's selection in this process, which decides on its own threads."""

    def __init__(self, module: Any) -> None:
        """Starts a service with as many workers."""
        self.service: Any = module.SelectionService()

    async def start(self, prompts: Sequence[array[int]]) -> None:
        """Has the workers registered, and each prompt sent to some of them."""
        for number in range(NUM_REPLICAS):
            await self.service.upsert_worker(
                {
                    "worker_id": number + 1,
                    "model_name": "bench",
                    "routing_group": "default",
                    "endpoint": f"http://10.0.0.{number}:8000",
                    "block_size": NAMESPACE.block_size,
                    "data_parallel_start_rank": 0,
                    "data_parallel_size": 1,
                    "max_num_batched_tokens": 8192,
                    "total_kv_blocks": 16_384,
                }
            )
        for number, prompt in enumerate(prompts):
            ids = prompt.tolist()
            await self.service.select_and_reserve(self._asked(ids, f"warm-{number}"))

    async def select(self, ids: list[int]) -> None:
        """Has one prompt decided."""
        await self.service.select(self._asked(ids, None))

    @staticmethod
    def _asked(ids: list[int], request_id: str | None) -> dict[str, Any]:
        asked: dict[str, Any] = {
            "model_name": "bench",
            "routing_group": "default",
            "token_ids": ids,
        }
        if request_id is not None:
            asked["selection_id"] = request_id
        return asked


def prompt_of(num_tokens: int, *, seed: int) -> array[int]:
    """Returns random tokens as the tokenizer keeps them."""
    rng = random.Random(seed)
    return array("I", [rng.randrange(50_000) for _ in range(num_tokens)])


def time_ms(call: Callable[[], object], num_calls: int) -> float:
    """Returns this thread's processor time per call, milliseconds."""
    begin = time.thread_time()
    for _ in range(num_calls):
        call()
    return (time.thread_time() - begin) / num_calls * 1e3


async def time_async_ms(call: Callable[[], Awaitable[None]], num_calls: int) -> float:
    """Returns processor time of the whole process per call, milliseconds."""
    begin = time.process_time()
    for _ in range(num_calls):
        await call()
    return (time.process_time() - begin) / num_calls * 1e3


async def measure(rounds: int) -> tuple[dict[str, float | str], str]:
    """Measures ours, then the peer in turns with it; returns the figures and what became of it."""
    prompts = {name: prompt_of(size, seed=size) for name, size in SIZES.items()}
    benches = {mix: Bench(list(prompts.values()), num_lengths=num) for mix, num in MIXES.items()}
    turn = prompts["131k"][: SIZES["131k"] - TURN_TOKENS]
    for bench in benches.values():
        EventChain(bench.chains).extend(turn)
    times: dict[str, list[float]] = {}
    for number in range(rounds):
        for name, prompt in prompts.items():
            floor = time_ms(lambda p=prompt: block_hashes(p, parent=ROOT), calls_of(prompt))  # type: ignore[misc]
            times.setdefault(f"floor_ms_{name}", []).append(floor)
            for mix, bench in benches.items():
                times.setdefault(f"decision_ms_{name}{mix}", []).append(decision_ms(bench, prompt))
        new = [prompt_of(TURN_TOKENS, seed=8 * number + n) for n in range(8)]
        for mix, bench in benches.items():
            turns = [time_ms(partial(bench.serve, turn + more, bench.chains), 1) for more in new]
            times.setdefault(f"next_turn_ms_131k{mix}", []).append(statistics.fmean(turns))
    figures = {name: min(values) for name, values in times.items()}
    peer, said = await peer_of(list(prompts.values()))
    if peer is not None:
        figures |= await compare(peer, benches[""], prompts, rounds)
        figures["vs_dynamo_next_turn_131k"] = (
            figures["dynamo_ms_131k"] / figures["next_turn_ms_131k"]
        )
    metrics: dict[str, float | str] = {
        name: round(value, 4) for name, value in sorted(figures.items())
    }
    return metrics | {"dynamo": said}, said


async def compare(
    peer: Peer, bench: Bench, prompts: Mapping[str, array[int]], rounds: int
) -> dict[str, float]:
    """Has both decide on each prompt in turns; returns the peer's best times and the ratios."""
    figures: dict[str, float] = {}
    for name, prompt in prompts.items():
        ids, theirs, ratios = prompt.tolist(), [], []
        for _ in range(rounds):
            ours = decision_ms(bench, prompt)
            theirs.append(await time_async_ms(partial(peer.select, ids), calls_of(prompt)))
            ratios.append(theirs[-1] / ours)
        figures[f"dynamo_ms_{name}"] = min(theirs)
        figures[f"vs_dynamo_{name}"] = statistics.median(ratios)
    return figures


def calls_of(prompt: array[int]) -> int:
    """Returns how many decisions are timed together."""
    return max(1, 65_536 // len(prompt))


def decision_ms(bench: Bench, prompt: array[int]) -> float:
    """Returns the time of a decision about a prompt that nobody has asked for before."""
    unknown = iter([ChainCache(NAMESPACE) for _ in range(calls_of(prompt))])
    return time_ms(lambda: bench.serve(prompt, next(unknown)), calls_of(prompt))


async def peer_of(prompts: Sequence[array[int]]) -> tuple[Peer | None, str]:
    """Returns Dynamo's selection, or why there is none."""
    os.environ.setdefault("DYN_ROUTER_USE_KV_EVENTS", "false")
    os.environ.setdefault("DYN_LOG", "off")
    try:
        module = importlib.import_module("dynamo._core")
    except ImportError:
        return None, "dynamo: not here (pip install ai-dynamo-runtime), so nothing to compare with"
    peer = Peer(module)
    await peer.start(prompts)
    number = version("ai-dynamo-runtime")
    return peer, f"dynamo: ai-dynamo-runtime {number}, SelectionService.select, without KV events"


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write the report if asked to."""
    args = parse(argv)
    metrics, said = asyncio.run(measure(args.rounds))
    print(
        table(
            ("what", "measured"),
            [(key, str(value)) for key, value in metrics.items() if key != "dynamo"],
        )
    )
    print(said)
    print("sglang-router: offers no decision apart from its proxy, so it is not in this table")
    command = f"make bench-decision ARGS={shlex.quote(shlex.join(argv))}"
    result = Report("decision", commit(), machine(), command, metrics)
    if args.output is not None:
        args.output.write_text(result.json() + "\n")
    print(result.json())
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(
        prog="make bench-decision",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=15, help="rounds, taken in turns")
    parser.add_argument("--output", type=Path, help="write the JSON report there, too")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
