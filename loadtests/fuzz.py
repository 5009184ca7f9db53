"""Junk at the doors of router and worker: `make fuzz ARGS="--minutes 60"`.

Two kinds. From the servers' OpenAPI documents: requests that fit them and requests that do not, by
schemathesis. And bytes: the table of bad requests of the tests, damaged at random. No answer may
be a server's error, miss OpenAI's form or the document, or be long in coming, and both programs
must live on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.core.result import Ok

from kvway_core.testing.byte_model import write_byte_model
from tests.core.bad_requests import VECTORS
from tests.e2e.harness import Cluster

LIMITS: Final = (
    "--headers-timeout-s",
    "0.5",
    "--body-timeout-s",
    "0.5",
    "--max-body-bytes",
    "1000000",
)
ANSWER_LIMIT_S: Final = 20.0
_CLIENTS_FAULT: Final = frozenset({501, 505})
"""CONNECT, and another version of HTTP."""
_MAX_SENT_BYTES: Final = 20_000
_CONNECTIONS: Final = 16
_CHECKS: Final = frozenset(
    {
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
        "negative_data_rejection",
    }
)


def fuzz_document(url: str, *, num_cases: int, seed_: int) -> Counter[int]:
    """Sends requests made of a server's document, and checks the answers against it.

    Args:
        url: Of the server.
        num_cases: For each operation with a body, of each kind: such as fit, such as do not.
        seed_: Of the random choices.

    Returns:
        How often each status came.

    Raises:
        AssertionError: An answer is not as the document says.
    """
    load_all_checks()
    checks: Any = [check for check in CHECKS.get_all() if check.__name__ in _CHECKS]
    assert len(checks) == len(_CHECKS)  # noqa: S101  one was renamed
    statuses: Counter[int] = Counter()
    with requests.Session() as session:
        document = session.get(f"{url}/openapi.json", timeout=ANSWER_LIMIT_S).json()
        for found in schemathesis.openapi.from_dict(document).get_all_operations():
            assert isinstance(found, Ok), found  # noqa: S101  a schema that is not sound
            operation = found.ok()
            modes = [GenerationMode.POSITIVE]
            if "requestBody" in operation.definition.raw:
                modes.append(GenerationMode.NEGATIVE)
            for mode in modes:

                @seed(seed_)
                @settings(
                    max_examples=num_cases,
                    database=None,
                    phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                )
                @given(operation.as_strategy(generation_mode=mode))
                def send(case: Case[Any]) -> None:
                    answer = case.call(base_url=url, session=session, timeout=ANSWER_LIMIT_S)
                    statuses[answer.status_code] += 1
                    case.validate_response(answer, checks=checks)

                send()
    return statuses


async def fuzz_bytes(port: int, *, num_cases: int, seed_: int) -> Counter[str]:
    """Sends damaged requests, each on a connection of its own.

    Returns:
        How often each status came, and "closed" for none.

    Raises:
        AssertionError: An answer is a 5xx, has no good form, or does not come.
    """
    rng = random.Random(seed_)
    short = [vector.sent for vector in VECTORS if len(vector.sent) < _MAX_SENT_BYTES]
    outcomes: Counter[str] = Counter()
    gate = asyncio.Semaphore(_CONNECTIONS)

    async def send(sent: bytes) -> None:
        async with gate:
            try:
                outcomes[await _outcome(port, sent)] += 1
            except (AssertionError, TimeoutError) as exc:
                raise AssertionError(f"{exc!r} for {sent!r}") from exc

    async with asyncio.TaskGroup() as group:
        for _ in range(num_cases):
            group.create_task(send(_damaged(rng, short)))
    return outcomes


def _damaged(rng: random.Random, originals: list[bytes]) -> bytes:
    """Returns a request with a few bytes changed, taken out, doubled, or taken from another."""
    data = bytearray(rng.choice(originals))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((1, 1, 1, 4, 32)))
        other = rng.choice(originals)
        begin = rng.randrange(len(other))
        data[at:end] = rng.choice(
            (
                bytes([rng.randrange(256)]),
                rng.choice(
                    (b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b",", b'"', b"\\", b"{")
                ),
                b"",
                bytes(data[at:end]) * 2,
                other[begin : begin + rng.choice((1, 8, 64))],
            )
        )
    return bytes(data)


async def _outcome(port: int, sent: bytes) -> str:
    """Sends bytes, and returns the status of the first answer, or "closed"."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        async with asyncio.timeout(ANSWER_LIMIT_S):
            line, _, rest = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")
            headers = dict(item.lower().split(b": ", 1) for item in rest.split(b"\r\n") if item)
            status = int(line.split(b" ")[1])
            assert line.startswith(b"HTTP/1."), line  # noqa: S101
            assert status < 500 or status in _CLIENTS_FAULT, line  # noqa: S101
            if status >= 400 and not sent.lstrip().startswith(b"HEAD"):
                body = await reader.readexactly(int(headers[b"content-length"]))
                assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}  # noqa: S101
            return str(status)
    except (asyncio.IncompleteReadError, ConnectionError):
        return "closed"
    finally:
        writer.transport.abort()


async def fuzz(
    cluster: Cluster, *, is_over: Callable[[], bool], num_cases: int, seed_: int
) -> None:
    """Starts a worker and a router before it, and sends both junk until it is over.

    Raises:
        AssertionError: An answer is bad, or a program did not survive it.
    """
    worker = await cluster.worker("worker", *LIMITS, "--sim-decode-step-s", "0")
    router = await cluster.router(worker, args=LIMITS)
    round_seed = seed_
    while True:
        for url in (router.ready["api"], worker.ready["url"]):
            port = urlsplit(url).port
            assert port is not None  # noqa: S101  for the type
            statuses = await asyncio.to_thread(
                fuzz_document, url, num_cases=num_cases, seed_=round_seed
            )
            outcomes = await fuzz_bytes(port, num_cases=20 * num_cases, seed_=round_seed)
            print(json.dumps({"seed": round_seed, "document": statuses, "bytes": outcomes}))
            async with cluster.http.get(f"{url}/health") as answer:
                assert answer.status == 200  # noqa: S101
        if is_over():
            break
        round_seed += 1
    for process in (worker, router):
        log = process.log.read_text(errors="replace")
        assert "crashed" not in log and "Traceback" not in log, process.tail  # noqa: S101, PT018


async def _run(minutes: float, seed_: int) -> None:
    end_s = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as folder:
        async with aiohttp.ClientSession() as http:
            cluster = Cluster(Path(folder), write_byte_model(Path(folder) / "model"), http)
            try:
                await fuzz(
                    cluster, is_over=lambda: time.monotonic() >= end_s, num_cases=50, seed_=seed_
                )
            finally:
                await cluster.close()


def main() -> int:
    """Parses the command line and sends junk; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0, help="how long, default 1")
    parser.add_argument("--seed", type=int, default=0, help="of the first round, default 0")
    args = parser.parse_args()
    try:
        asyncio.run(_run(args.minutes, args.seed))
    except (AssertionError, ExceptionGroup) as exc:
        print(f"found: {exc!r}", file=sys.stderr)
        return 1
    print(f"nothing found in {args.minutes:g} minutes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
