"""What a decision costs before a request is on its way: hash, match and choose, 16 replicas.

    decision   tokens -> block hashes -> longest matches -> load of each -> choice
    next turn  the same for a prompt whose beginning was seen before: only its last 512 tokens and
               what no whole span covers are hashed

Of the replicas a quarter each holds nothing, a quarter, half and three quarters of each prompt,
and their queues differ. Tokens are given as
the tokenizer keeps them; tokenizing itself is `make bench-tokenize`.

NVIDIA Dynamo's SelectionService and RadixTree decide on the same prompts, in turns with ours, if
they are there (`pip install ai-dynamo-runtime`). `vs_dynamo_*` is their time over ours.

sglang-router decides inside its proxy and on text: it offers no decision to measure. What can be
compared is a whole relayed request.

Times are processor time of this process, the best of the rounds; ratios are the medians of those
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
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

from kvway_core.blocks import Namespace, block_hashes, event_hash
from kvway_core.clock import SystemClock
from kvway_router.chains import ChainCache, EventChain
from kvway_router.index import BlockIndex
from kvway_router.ledger import Ledger
from kvway_router.policies.base import Situation, decide
from kvway_router.policies.registry import POLICIES, first_state
from kvway_router.policy import Decision, PolicyParams, Prompt
from loadtests.report import Report, commit, machine, table

NUM_REPLICAS: Final = 16
NAMESPACE: Final = Namespace("bench")
SIZES: Final = {"2k": 2_048, "8k": 8_192, "131k": 131_072}
TURN_TOKENS: Final = 512


class Bench:
    """A router's deciding parts, with replicas that hold and do different things."""

    def __init__(self, prompts: Sequence[array[int]]) -> None:
        """Has every replica hold another length of each prompt, and some of them work."""
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
                self.index.store(name, None, hashes[: len(hashes) * (number % 4) // 4])
        for number in range(NUM_REPLICAS):
            for _ in range(number % 4):
                self.ledger.charge(self.decide(prompts[0], self.chains).chosen)

    def decide(self, tokens: array[int], chains: ChainCache) -> Decision:
        """Takes a prompt through the steps that are measured."""
        chain = EventChain(chains)
        chain.extend(tokens)
        matches = self.index.match(chain.hashes)
        situation = Situation(
            prompt=Prompt(
                num_tokens=len(tokens),
                block_size=NAMESPACE.block_size,
                prefix_key=chain.hashes[0].to_bytes(8, "big"),
                num_output_tokens=256,
            ),
            matches=matches,
            loads=self.ledger.loads((name, self.index.num_blocks(name)) for name in self.names),
            params=self.params,
            mean_work_s=self.ledger.mean_work_s,
            slower=self.index.match_slower(chain.hashes, matches),
        )
        decision, self.state = decide(self.policy, situation, self.state)
        return decision


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
    """Returns processor time per call, milliseconds."""
    begin = time.process_time()
    for _ in range(num_calls):
        call()
    return (time.process_time() - begin) / num_calls * 1e3


async def time_async_ms(call: Callable[[], Awaitable[None]], num_calls: int) -> float:
    """Returns processor time of the whole process per call, milliseconds."""
    begin = time.process_time()
    for _ in range(num_calls):
        await call()
    return (time.process_time() - begin) / num_calls * 1e3


async def measure(rounds: int) -> tuple[dict[str, float], str]:
    """Measures in turns; returns the figures and what became of the peer."""
    prompts = {name: prompt_of(size, seed=size) for name, size in SIZES.items()}
    bench = Bench(list(prompts.values()))
    peer, said = await peer_of(list(prompts.values()))
    times: dict[str, list[float]] = {}
    turn = prompts["131k"][: SIZES["131k"] - TURN_TOKENS]
    EventChain(bench.chains).extend(turn)
    for number in range(rounds):
        for name, prompt in prompts.items():
            calls = max(1, 65_536 // len(prompt))
            times.setdefault(f"decision_ms_{name}", []).append(
                time_ms(lambda p=prompt: bench.decide(p, ChainCache(NAMESPACE)), calls)  # type: ignore[misc]
            )
            if peer is not None:
                ids = prompt.tolist()
                times.setdefault(f"dynamo_ms_{name}", []).append(
                    await time_async_ms(lambda ids=ids: peer.select(ids), calls)  # type: ignore[misc]
                )
        turns = iter([turn + prompt_of(TURN_TOKENS, seed=100 * number + n) for n in range(8)])
        times.setdefault("next_turn_ms_131k", []).append(
            time_ms(lambda turns=turns: bench.decide(next(turns), bench.chains), 8)  # type: ignore[misc]
        )
    figures = {name: min(values) for name, values in times.items()}
    for name in SIZES:
        if f"dynamo_ms_{name}" in figures:
            ratios = zip(times[f"dynamo_ms_{name}"], times[f"decision_ms_{name}"], strict=True)
            figures[f"vs_dynamo_{name}"] = statistics.median(a / b for a, b in ratios)
    if "dynamo_ms_131k" in figures:
        figures["vs_dynamo_next_turn_131k"] = (
            figures["dynamo_ms_131k"] / figures["next_turn_ms_131k"]
        )
    return {name: round(value, 4) for name, value in figures.items()}, said


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
    return peer, "dynamo: SelectionService.select in this process, without KV events"


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write the report if asked to."""
    args = parse(argv)
    metrics, said = asyncio.run(measure(args.rounds))
    print(table(("what", "measured"), [(key, f"{value:,}") for key, value in metrics.items()]))
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
