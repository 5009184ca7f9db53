"""A worker's endpoints on a real socket in the test's own process, over an engine of choice."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import AsyncIterator, Mapping, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from structlog.testing import capture_logs
from typing_extensions import override

from kvway_core.clock import Clock, SystemClock
from kvway_core.lifecycle import start_site
from kvway_core.metrics import new_registry
from kvway_core.web import make_runner
from kvway_worker.api.app import build_app
from kvway_worker.api.state import Worker
from kvway_worker.engine import Engine, EngineLoop
from kvway_worker.load import AttentionReading
from kvway_worker.loading import load_model
from kvway_worker.scheduling.sampling_params import TokenLogprobs
from kvway_worker.scheduling.sequence import Sequence
from kvway_worker.scheduling.step import Sampled, StepPlan, StepResult
from kvway_worker.settings import WorkerSettings

MODEL = "tiny"
IM_END = 257
"""The byte model's end token."""


class ScriptedEngine:
    """Answers every request with the same tokens, over and over.

    Args:
        script: Token ids of the answer.
        num_blocks: Blocks of 16 tokens it claims to have.
        fails_at: Steps, counted from 1, that raise.
    """

    block_size = 16

    def __init__(
        self,
        script: bytes | list[int],
        *,
        num_blocks: int = 64,
        fails_at: frozenset[int] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.max_model_len = num_blocks * self.block_size
        self.kv_dtype: str | None = None
        self._script = list(script)
        self.attends: AttentionReading | None = None
        self._fails_at = fails_at or frozenset()
        self._num_steps = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """Give each row that samples the next token of the script."""
        self._num_steps += 1
        if self._num_steps in self._fails_at:
            raise RuntimeError("as scripted")
        return StepResult(
            {seq.request_id: self._sampled(seq) for row in plan.rows for seq in row.sampling},
            {
                row.seq.request_id: tuple(
                    scripted_logprobs(token, row.seq.params.prompt_logprobs or 0)
                    for token in row.seq.prompt_token_ids[row.start + 1 : row.end + 1]
                )
                for row in plan.rows
                if row.wants_prompt_logprobs
            },
        )

    def attention(self) -> AttentionReading | None:
        """Tell what was scripted."""
        return self.attends

    def token(self, seq: Sequence) -> int:
        """Return the next token of an answer."""
        return self._script[seq.num_output_tokens % len(self._script)]

    def _sampled(self, seq: Sequence) -> Sampled:
        token, asked = self.token(seq), seq.params.logprobs
        return Sampled((token,), () if asked is None else (scripted_logprobs(token, asked),))

    def close(self) -> None:
        """Do nothing."""


def scripted_logprobs(token: int, num_top: int) -> TokenLogprobs:
    """What ScriptedEngine says of any token: -id/1000, rank 3, the ids 65, 66, ... likeliest."""
    top = tuple((65 + index, -index / 8) for index in range(num_top))
    return TokenLogprobs(token, -token / 1000, 3, top)


class GatedEngine(ScriptedEngine):
    """Computes one step for each `let`; tells when a step waits."""

    def __init__(self, script: bytes | list[int] = b"answer ", *, num_blocks: int = 64) -> None:
        super().__init__(script, num_blocks=num_blocks)
        self._permits = threading.Semaphore(0)
        self._waiting = threading.Semaphore(0)

    @override
    def execute(self, plan: StepPlan) -> StepResult:
        """Wait for a permit, then compute."""
        self._waiting.release()
        self._permits.acquire()
        return super().execute(plan)

    def let(self, num_steps: int = 1) -> None:
        """Let steps go on."""
        self._permits.release(num_steps)

    async def step_waits(self) -> None:
        """Return when another step waits for its permit."""
        await asyncio.to_thread(self._waiting.acquire)

    @override
    def close(self) -> None:
        """Let everything go."""
        self._permits.release(10_000)


@dataclass(frozen=True, slots=True)
class Running:
    """A worker that takes requests."""

    url: str
    worker: Worker
    engine: EngineLoop
    http: aiohttp.ClientSession
    logs: list[MutableMapping[str, Any]]

    async def post(
        self, path: str, body: Any, *, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any, Mapping[str, str]]:
        """POST JSON (or bytes as they are); return status, decoded body and headers."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(self.url + path, data=data, headers=headers) as response:
            return response.status, await response.json(), response.headers

    async def get(self, path: str) -> tuple[int, Any]:
        """GET JSON."""
        async with self.http.get(self.url + path) as response:
            return response.status, await response.json()

    async def events(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """POST with `stream`; return each event decoded, "[DONE]" as it is."""
        data = json.dumps({**body, "stream": True}).encode()
        async with self.http.post(self.url + path, data=data) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"].startswith("text/event-stream")
            return decode_events(await response.read())

    async def nothing_is_held(self) -> bool:
        """Say whether, once no request is in flight, no block is held after the current step.

        The reset goes through the same queue as an abort, behind it, and succeeds only if nobody
        holds a block.
        """
        await self.worker.wait_idle()
        return await self.engine.reset_prefix_cache()


def decode_events(raw: bytes) -> list[Any]:
    """Return the events of a stream, which must be whole and hold nothing else."""
    *events, rest = raw.split(b"\n\n")
    assert rest == b""
    assert all(event.startswith(b"data: ") and b"\n" not in event for event in events)
    texts = [event.removeprefix(b"data: ").decode() for event in events]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


def chat(text: str = "Hello there, worker.", **fields: Any) -> dict[str, Any]:
    """A chat request."""
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "messages": messages, "max_tokens": 8} | fields


def completion(prompt: Any = "Once upon a time", **fields: Any) -> dict[str, Any]:
    """A completion request."""
    return {"model": MODEL, "prompt": prompt, "max_tokens": 8} | fields


def make_settings(model_dir: Path, **fields: Any) -> WorkerSettings:
    """Settings of a sim worker that takes no time."""
    defaults = WorkerSettings(
        model=str(model_dir),
        served_model_name=MODEL,
        engine="sim",
        port=0,
        num_blocks=256,
        sim_prefill_tokens_per_s=1e9,
        sim_decode_step_s=0.0,
        debug_invariants=True,
    )
    return dataclasses.replace(defaults, **fields)


@asynccontextmanager
async def serving(
    model_dir: Path,
    engine: Engine | None = None,
    *,
    clock: Clock | None = None,
    **fields: Any,
) -> AsyncIterator[Running]:
    """Serve the byte model with this engine (else the sim engine) until the block is left."""
    clock = clock or SystemClock()
    if engine is not None:
        fields = {"num_blocks": engine.num_blocks, **fields}
    settings = make_settings(model_dir, **fields)
    assert settings.validate() == []
    loaded = load_model(settings, model_dir, clock)
    registry = new_registry("worker", version="0")
    worker = Worker(settings, boot_id="boot", clock=clock, registry=registry)
    runner = make_runner(build_app(worker), settings.http_limits)
    try:
        port = await start_site(runner, "127.0.0.1", 0)
        with capture_logs() as logs:
            async with (
                EngineLoop(
                    engine or loaded.engine,
                    loaded.scheduler,
                    clock=clock,
                    max_waiting=settings.max_waiting,
                    debug_invariants=True,
                ) as loop,
                aiohttp.ClientSession() as http,
            ):
                worker.serve(loaded.model, loop)
                yield Running(f"http://127.0.0.1:{port}", worker, loop, http, logs)
    finally:
        await runner.cleanup()
        worker.executor.close()
