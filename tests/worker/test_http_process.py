"""`kvway worker` as a process: the OpenAI client, SIGTERM, exit codes, KV events, start-up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import zmq
import zmq.asyncio
from aiohttp import web
from openai.types.chat import ChatCompletionMessageParam
from structlog.testing import capture_logs

from kvway_core.clock import Clock
from kvway_core.events import END_SEQ, BlockStored, decode_batch
from kvway_core.lifecycle import Supervisor
from kvway_worker import serving
from kvway_worker.loading import Loaded, load_model
from kvway_worker.serving import serve
from kvway_worker.settings import WorkerSettings
from tests.worker.http_worker import (
    ScriptedEngine,
    chat,
    completion,
    decode_events,
    make_settings,
)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
COMMAND = (sys.executable, "-c", "from kvway_core.cli import main; raise SystemExit(main())")
START_LIMIT_S = 40


@dataclass(frozen=True, slots=True)
class Process:
    """A worker process that is ready."""

    popen: asyncio.subprocess.Process
    url: str
    http: aiohttp.ClientSession

    async def get(self, path: str) -> Any:
        """GET JSON, whatever the status."""
        async with self.http.get(self.url + path) as response:
            return await response.json()

    async def status(self, path: str) -> int:
        """GET, for the status."""
        async with self.http.get(self.url + path) as response:
            return response.status


def command(*args: str) -> tuple[str, ...]:
    """The command line of a worker."""
    return (*COMMAND, "worker", *args)


@asynccontextmanager
async def worker_process(model: Path, folder: Path, *args: str) -> AsyncIterator[Process]:
    """Start a sim worker and wait for its ready file; kill it if it still runs at the end."""
    ready_file = folder / "ready.json"
    popen = await asyncio.create_subprocess_exec(
        *command("--model", str(model), "--served-model-name", "tiny", "--engine", "sim"),
        *("--port", "0", "--ready-file", str(ready_file), *args),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(START_LIMIT_S):
            while not ready_file.exists():
                assert popen.returncode is None
                await asyncio.sleep(0.02)
        ready = json.loads(ready_file.read_text())
        assert ready["pid"] == popen.pid
        async with aiohttp.ClientSession() as http:
            yield Process(popen, ready["url"], http)
    finally:
        with contextlib.suppress(ProcessLookupError):
            popen.kill()
        await popen.wait()


async def test_the_openai_client_works_streamed_and_not(byte_model: Path, tmp_path: Path) -> None:
    """Text, usage, cached tokens, errors: as the client library reads them."""
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": "You are terse. " * 20},
        {"role": "user", "content": "Name a river."},
    ]
    async with (
        worker_process(byte_model, tmp_path) as process,
        openai.AsyncOpenAI(base_url=process.url + "/v1", api_key="none") as client,
    ):
        create = client.chat.completions.create
        whole = await create(model="tiny", messages=messages, max_tokens=24)
        stream = await create(
            model="tiny",
            messages=messages,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        legacy = await client.completions.create(model="tiny", prompt=[1, 2, 3], max_tokens=4)
        names = [model.id async for model in client.models.list()]
        with pytest.raises(openai.NotFoundError):
            await create(model="other", messages=messages)
        with pytest.raises(openai.BadRequestError, match="best_of is not supported"):
            await create(model="tiny", messages=messages, extra_body={"best_of": 2})
        two = await create(
            model="tiny", messages=messages, max_tokens=3, n=2, logprobs=True, top_logprobs=1
        )
        echoed = await client.completions.create(
            model="tiny", prompt="abc", max_tokens=2, echo=True, logprobs=1
        )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens_details is not None
    warm = chunks[-1].usage.prompt_tokens_details.cached_tokens
    assert warm == whole.usage.prompt_tokens - 1
    assert [choice.index for choice in two.choices] == [0, 1]
    for choice in two.choices:
        assert choice.logprobs is not None
        tokens = choice.logprobs.content
        assert tokens is not None
        assert "".join(token.token for token in tokens) == choice.message.content
        assert [token.top_logprobs[0].bytes for token in tokens] == [t.bytes for t in tokens]
    [echo] = echoed.choices
    assert echo.text.startswith("abc")
    assert echo.logprobs is not None
    assert echo.logprobs.text_offset == [0, 1, 2, 3, 4]
    assert echo.logprobs.tokens == list(echo.text)
    assert legacy.usage is not None
    assert legacy.usage.completion_tokens == 4
    assert names == ["tiny"]


async def test_sigterm_finishes_what_runs_refuses_what_is_new_and_exits_0(
    byte_model: Path, tmp_path: Path
) -> None:
    """The stream that runs gets its end; /ready and new requests say 503 meanwhile."""
    async with worker_process(byte_model, tmp_path, "--sim-decode-step-s", "0.05") as process:
        body = completion(max_tokens=30, stream=True)
        async with process.http.post(process.url + COMPLETIONS, json=body) as response:
            first = await response.content.readany()
            process.popen.send_signal(signal.SIGTERM)
            while await process.status("/ready") == 200:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)
            assert (await process.get("/load"))["state"] == "draining"
            assert await process.status("/health") == 200
            async with process.http.post(process.url + CHAT, json=chat()) as refused:
                assert refused.status == 503
                assert (await refused.json())["error"]["code"] == "shutting_down"
            events = decode_events(first + await response.read())
        assert await process.popen.wait() == 0
    assert events[-1] == "[DONE]"
    assert len("".join(event["choices"][0]["text"] for event in events[:-1])) == 30


async def test_what_outlives_the_drain_timeout_ends_with_an_error_event(
    byte_model: Path, tmp_path: Path
) -> None:
    """Not with silence; the exit code is still 0."""
    async with worker_process(
        byte_model, tmp_path, "--drain-timeout-s", "0.1", "--sim-decode-step-s", "0.05"
    ) as process:
        body = completion(max_tokens=2000, stream=True, ignore_eos=True)
        async with process.http.post(process.url + COMPLETIONS, json=body) as response:
            first = await response.content.readany()
            process.popen.send_signal(signal.SIGTERM)
            events = decode_events(first + await response.read())
        assert await process.popen.wait() == 0
    assert events[-1]["error"]["code"] == "shutting_down"


async def test_a_subscriber_can_rebuild_what_the_cache_holds(
    byte_model: Path, tmp_path: Path
) -> None:
    """/load says where; replay from 0 gives every block of a prompt, in chain order, no tokens."""
    async with worker_process(byte_model, tmp_path) as process:
        body = completion("x" * 100, max_tokens=2)
        async with process.http.post(process.url + COMPLETIONS, json=body) as response:
            assert response.status == 200
        load = await process.get("/load")
        context = zmq.asyncio.Context()
        batches = []
        with context.socket(zmq.DEALER) as dealer:
            dealer.connect(f"tcp://127.0.0.1:{load['kv_events']['replay_port']}")
            await dealer.send_multipart([b"", bytes(8)])
            while (frames := await dealer.recv_multipart())[2] != END_SEQ:
                batches.append(decode_batch(frames[3]))
        context.destroy(linger=0)
    assert {batch.boot_id for batch in batches} == {load["boot_id"]}
    events = [event for batch in batches for event in batch.events]
    assert all(isinstance(event, BlockStored) and event.token_ids == [] for event in events)
    stored = [h for event in events if isinstance(event, BlockStored) for h in event.block_hashes]
    assert len(stored) == len(set(stored)) == 100 // 16
    assert load["blocks"]["cached"] == 100 // 16 + 1  # the last one is partly filled


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ((), "no model"),
        (("--model", "/no/such/folder"), "/no/such/folder"),
        (("--model", "{model}", "--engine", "sim", "--bogus", "1"), "--bogus"),
        (("--model", "{model}", "--engine", "sim", "--port", "{taken}"), "the port is taken"),
        (
            (
                "--model",
                "{model}",
                "--engine",
                "sim",
                "--port",
                "0",
                "--kv-events-port",
                "{taken}",
            ),
            "--kv-events-port",
        ),
        (
            ("--model", "{model}", "--engine", "sim", "--port", "0", "--max-model-len", "9999"),
            "the model's context is 8192",
        ),
    ],
)
def test_what_cannot_start_says_why_in_one_line_and_exits_2(
    byte_model: Path, args: tuple[str, ...], problem: str
) -> None:
    """No traceback, whatever is wrong."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        values = {"model": str(byte_model), "taken": str(taken.getsockname()[1])}
        done = subprocess.run(
            [*command(*(arg.format(**values) for arg in args)), "--log-level", "error"],
            capture_output=True,
            text=True,
            timeout=START_LIMIT_S,
            env={**os.environ, "KVWAY_HOME": str(byte_model)},
            check=False,
        )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert problem in line
    assert done.stdout == ""


@asynccontextmanager
async def served_in_process(
    model: Path, folder: Path, load: Callable[[WorkerSettings, Path, Clock], Loaded]
) -> AsyncIterator[tuple[str, Supervisor, asyncio.Task[None]]]:
    """Run the whole life of a worker in this process, with a loader of the test's own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = make_settings(model, port=port, ready_file=folder / "ready.json")
    async with Supervisor() as supervisor:
        life = asyncio.create_task(serve(settings, model, supervisor, load=load))
        yield f"http://127.0.0.1:{port}", supervisor, life
        supervisor.stop("the test is over")
        await life


async def wait_for(http: aiohttp.ClientSession, url: str, status: int) -> Any:
    """GET until the status is this one; return the body."""
    while True:
        with contextlib.suppress(aiohttp.ClientConnectorError):
            async with http.get(url) as response:
                if response.status == status:
                    return await response.json()
        await asyncio.sleep(0.01)


async def test_it_listens_at_once_and_is_ready_when_loaded(
    byte_model: Path, tmp_path: Path
) -> None:
    """While the model loads, probes and requests are answered: 503 starting."""
    may_load = threading.Event()

    def load(settings: WorkerSettings, model_dir: Path, clock: Clock) -> Loaded:
        may_load.wait()
        return load_model(settings, model_dir, clock)

    async with (
        served_in_process(byte_model, tmp_path, load) as (url, _, _),
        aiohttp.ClientSession() as http,
    ):
        assert await wait_for(http, url + "/ready", 503) == {"status": "starting"}
        async with http.post(url + CHAT, json=chat()) as response:
            assert (await response.json())["error"]["code"] == "starting"
        assert not (tmp_path / "ready.json").exists()
        may_load.set()
        assert await wait_for(http, url + "/ready", 200) == {"status": "ready"}
        while not (tmp_path / "ready.json").exists():  # noqa: ASYNC110 - a file
            await asyncio.sleep(0.01)
        async with http.post(url + CHAT, json=chat()) as response:
            assert response.status == 200


async def test_a_stop_while_the_model_loads_does_not_wait_for_it(
    byte_model: Path, tmp_path: Path
) -> None:
    """The loading thread is left alone; no ready file appears."""
    may_load = threading.Event()

    def load(settings: WorkerSettings, model_dir: Path, clock: Clock) -> Loaded:
        may_load.wait()
        return load_model(settings, model_dir, clock)

    async with (
        served_in_process(byte_model, tmp_path, load) as (url, supervisor, life),
        aiohttp.ClientSession() as http,
    ):
        await wait_for(http, url + "/ready", 503)
        supervisor.stop("as SIGTERM does")
        await life
        may_load.set()
    assert not supervisor.failed
    assert not (tmp_path / "ready.json").exists()


async def test_an_engine_that_is_given_up_ends_the_process_with_a_failure(
    byte_model: Path, tmp_path: Path
) -> None:
    """Nobody asked it to stop: it stops by itself, and `lifecycle.run` makes that exit code 1."""

    def load(settings: WorkerSettings, model_dir: Path, clock: Clock) -> Loaded:
        loaded = load_model(settings, model_dir, clock)
        engine = ScriptedEngine(b"x", num_blocks=256, fails_at=frozenset(range(99)))
        return Loaded(loaded.model, engine, loaded.scheduler)

    async with (
        served_in_process(byte_model, tmp_path, load) as (url, supervisor, life),
        aiohttp.ClientSession() as http,
    ):
        await wait_for(http, url + "/ready", 200)
        while not life.done():
            with contextlib.suppress(aiohttp.ClientError):
                async with http.post(url + CHAT, json=chat()) as response:
                    assert response.status in {500, 503}
        await life
        assert supervisor.failed


async def test_connections_that_do_not_end_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving is bounded: a reader that takes nothing cannot keep the process."""
    monkeypatch.setattr(serving, "FAREWELL_S", 0.01)

    async def never(_: web.Application) -> None:
        await asyncio.Event().wait()

    app = web.Application()
    app.on_cleanup.append(never)
    runner = web.AppRunner(app)
    await runner.setup()
    with capture_logs() as logs:
        await serving._say_farewell(runner)
    assert "connections_cut" in [line["event"] for line in logs], "others may log meanwhile"
