"""Warm against cold time to first token of one worker, pair by pair in one run.

Each pair sends a prompt whose shared part no cache has seen (cold), then the same shared part with
another ending (warm), streamed, one request at a time. TTFT is measured here, at the client: from
sending the request to the first content.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import aiohttp
from tqdm import tqdm

from loadtests.report import Report, commit, machine, table

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

KVWAY = str(Path(sys.executable).parent / "kvway")
WORDS = ("river", "stone", "bridge", "market", "winter", "engine", "letter", "window", "garden")


class Answer(NamedTuple):
    """One streamed answer: seconds to the first content, and the engine's cached tokens."""

    ttft_s: float
    cached_tokens: int


async def main(argv: Sequence[str]) -> int:
    """Run the benchmark; print a table and, last, the JSON report."""
    args = parse(argv)
    report(args, *await run(args))
    return 0


async def run(args: argparse.Namespace) -> tuple[list[Answer], list[Answer]]:
    """Start a worker if none is given, send the pairs, return the cold and the warm answers."""
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        )
        url = args.url or await stack.enter_async_context(
            started(args.model, args.dtype, args.threads)
        )
        model = await served_model(session, url)
        pool = await text_tokens(session, url, model, args.shared + args.new)
        await ask(session, url, model, pool[: args.new])
        return await measure(session, url, model, pool, args)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(prog="make bench-ttft", description=__doc__)
    parser.add_argument("--url", help="a worker that runs already (default: start one)")
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", default="auto", help="of the worker that is started")
    parser.add_argument("--threads", type=int, help="of the worker that is started (default: all)")
    parser.add_argument("--shared", type=int, default=1500, help="shared tokens")
    parser.add_argument("--new", type=int, default=100, help="new tokens after the shared ones")
    parser.add_argument("--pairs", type=int, default=12, help="cold and warm pairs")
    parser.add_argument("--output", type=Path, help="write the JSON report there, too")
    return parser.parse_args(argv)


@contextlib.asynccontextmanager
async def started(model: str, dtype: str, threads: int | None) -> AsyncIterator[str]:
    """Start one worker; yield its URL once it is ready."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder, "ready.json")
        process = await asyncio.create_subprocess_exec(
            *(KVWAY, "worker", "--model", model, "--dtype", dtype),
            *("--port", "0", "--ready-file", str(ready)),
            *(() if threads is None else ("--num-threads", str(threads))),
        )
        try:
            while (text := read_if_there(ready)) is None:
                if process.returncode is not None:
                    sys.exit(f"the worker ended with {process.returncode} before it was ready")
                await asyncio.sleep(0.1)
            yield str(json.loads(text)["url"])
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


def read_if_there(path: Path) -> str | None:
    """Text of a file, None while it is not there."""
    return path.read_text() if path.exists() else None


async def served_model(session: aiohttp.ClientSession, url: str) -> str:
    """Name under which the worker serves its model."""
    async with session.get(f"{url}/v1/models") as response:
        models = await response.json()
    return str(models["data"][0]["id"])


async def text_tokens(
    session: aiohttp.ClientSession, url: str, model: str, count: int
) -> list[int]:
    """Token ids of plain English words, at least `count` of them."""
    chooser = random.Random(7)
    text = " ".join(chooser.choice(WORDS) for _ in range(2 * count))
    async with session.post(f"{url}/tokenize", json={"model": model, "prompt": text}) as response:
        tokens: list[int] = (await response.json())["tokens"]
    return tokens


async def measure(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    pool: Sequence[int],
    args: argparse.Namespace,
) -> tuple[list[Answer], list[Answer]]:
    """Send the pairs; return the cold and the warm answers."""
    chooser = random.Random(11)
    cold: list[Answer] = []
    warm: list[Answer] = []
    for _ in tqdm(range(args.pairs), unit="pair", file=sys.stderr):
        shared = chooser.choices(pool, k=args.shared)
        for answers in (cold, warm):
            new = chooser.choices(pool, k=args.new)
            answers.append(await ask(session, url, model, [*shared, *new]))
    return cold, warm


async def ask(
    session: aiohttp.ClientSession, url: str, model: str, tokens: Sequence[int]
) -> Answer:
    """Stream a short completion of these tokens."""
    body = {
        "model": model,
        "prompt": list(tokens),
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent = time.perf_counter()
    first: float | None = None
    cached = 0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if first is None and chunk["choices"] and chunk["choices"][0]["text"]:
                first = time.perf_counter() - sent
            if usage := chunk.get("usage"):
                cached = usage["prompt_tokens_details"]["cached_tokens"]
    if first is None:
        sys.exit("an answer had no content; is this a worker with a real model?")
    return Answer(first, cached)


def report(args: argparse.Namespace, cold: Sequence[Answer], warm: Sequence[Answer]) -> None:
    """Print the table and the report, and write it where asked."""
    rows = []
    for name, answers in (("cold", cold), ("warm", warm)):
        times = sorted(a.ttft_s * 1000 for a in answers)
        cached = statistics.median(a.cached_tokens for a in answers)
        rows.append(
            (name, *(f"{t:.0f}" for t in (times[0], statistics.median(times), times[-1])), cached)
        )
    reductions = [100 * (1 - w.ttft_s / c.ttft_s) for c, w in zip(cold, warm, strict=True)]
    print(f"TTFT, {args.shared} shared + {args.new} new tokens, {args.pairs} pairs, {args.model}")
    print(table(("", "min ms", "median ms", "max ms", "cached tokens"), rows))
    result = Report(
        bench="ttft",
        commit=commit(),
        machine=machine(),
        command="python -m loadtests.bench_ttft " + shlex.join(sys.argv[1:]),
        metrics={
            "cold_ttft_ms": round(statistics.median(a.ttft_s * 1000 for a in cold), 1),
            "warm_ttft_ms": round(statistics.median(a.ttft_s * 1000 for a in warm), 1),
            "warm_ttft_reduction_pct": round(statistics.median(reductions), 1),
            "warm_ttft_reduction_pct_min": round(min(reductions), 1),
            "warm_ttft_reduction_pct_max": round(max(reductions), 1),
            "warm_cached_tokens": statistics.median(a.cached_tokens for a in warm),
            "pairs": args.pairs,
        },
    )
    if args.output:
        args.output.write_text(result.json() + "\n")
    print(result.json())


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
