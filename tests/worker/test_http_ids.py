"""A request's id: it counts from the moment the body was read, before anything is tokenized."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvway_core.api import peek_request_id
from tests.worker.http_worker import GatedEngine, Running, chat, completion, serving

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@asynccontextmanager
async def reading_stands_still(running: Running) -> AsyncIterator[threading.Event]:
    """Keep the only thread that reads prompts busy until the event is set."""
    go_on, begun = threading.Event(), threading.Event()

    def stand() -> None:
        begun.set()
        go_on.wait()

    standing = asyncio.create_task(running.worker.executor.run(stand))
    try:
        await asyncio.to_thread(begun.wait)
        yield go_on
    finally:
        go_on.set()
        await standing


@pytest.mark.parametrize("where", ["header", "field"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_aborted_before_its_prompt_is_read(
    byte_model: Path, where: str, *, stream: bool
) -> None:
    """It ends with "abort", without text, and nothing is computed for it."""
    fields = {"request_id": "r"} if where == "field" else {}
    headers = {"x-request-id": "r"} if where == "header" else {}
    body = completion(["ab", "cde"], n=2, stream=stream, **fields)
    async with serving(byte_model, tokenizer_threads=1) as running:
        async with reading_stands_still(running) as go_on:

            async def ask() -> tuple[int, str]:
                url = running.url + COMPLETIONS
                async with running.http.post(url, json=body, headers=headers) as response:
                    return response.status, await response.text()

            task = asyncio.create_task(ask())
            told: dict[str, list[str]] = {"aborted": []}
            while not told["aborted"]:
                _, told, _ = await running.post("/abort_requests", {"request_ids": ["r"]})
            go_on.set()
            status, text = await task
        assert running.engine.load().num_steps == 0
        _, late, _ = await running.post("/abort_requests", {"request_ids": ["r"]})
    assert (status, late["not_running"]) == (200, ["r"])
    if stream:
        *events, done = [event.removeprefix("data: ") for event in text.split("\n\n")[:-1]]
        assert done == "[DONE]"
        choices = [json.loads(event)["choices"][0] for event in events]
        choices.sort(key=lambda choice: choice["index"])
    else:
        answer = json.loads(text)
        choices = answer["choices"]
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5, 0)
    assert [(c["index"], c["text"], c["finish_reason"]) for c in choices] == [
        (index, "", "abort") for index in range(4)
    ]


async def test_an_id_is_taken_before_its_prompt_is_read(byte_model: Path) -> None:
    """The second of two requests is refused at once; the first is answered."""
    async with serving(byte_model, tokenizer_threads=1) as running:
        async with reading_stands_still(running) as go_on:
            tasks = {
                asyncio.create_task(running.post(CHAT, chat(request_id="same"))) for _ in range(2)
            }
            refused, left = await asyncio.wait(
                tasks, return_when=asyncio.FIRST_COMPLETED, timeout=30
            )
            go_on.set()
            answered = [(await task)[0] for task in left]
        ((status, body, _),) = [task.result() for task in refused]
    assert (status, body["error"]["param"], answered) == (400, "request_id", [200])


async def test_a_request_that_is_refused_gives_its_id_back(byte_model: Path) -> None:
    async with serving(byte_model) as running:
        for temperature, status in ((9, 400), (1, 200)):
            body = chat(request_id="same", temperature=temperature)
            got, _, _ = await running.post(CHAT, body)
            assert got == status


async def test_a_request_is_known_by_the_id_of_its_answer_as_well(byte_model: Path) -> None:
    """Also when the client gave it an id of its own."""
    engine = GatedEngine(b"abc")
    async with serving(byte_model, engine) as running:
        engine.let(2)
        body = completion(request_id="mine", stream=True, max_tokens=100)
        async with running.http.post(running.url + COMPLETIONS, json=body) as response:
            first = await response.content.readuntil(b"\n\n")
            answer_id = json.loads(first.removeprefix(b"data: "))["id"]
            _, told, _ = await running.post("/abort_requests", {"request_ids": [answer_id]})
            assert told == {"aborted": [answer_id], "not_running": []}
            engine.let(10)
            rest = await response.text()
        _, late, _ = await running.post("/abort_requests", {"request_ids": [answer_id, "mine"]})
    assert '"finish_reason":"abort"' in rest
    assert late == {"aborted": [], "not_running": [answer_id, "mine"]}


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"request_id":"a","x":[1,{"request_id":"b"}]}', "a"),
        (b'{"x":{"request_id":"b"}}', None),
        (b'{"request\\u005fid":"a"}', "a"),
        (b'{"request_id":null}', None),
        (b'{"request_id":5}', None),
        (b'{"request_id":"a"', None),
        (b"[" * 100_000 + b"request_id", None),
        (b"", None),
    ],
)
def test_an_id_is_found_in_a_body_that_nobody_checked(body: bytes, name: str | None) -> None:
    """What is no sound body has none: its reader refuses it."""
    assert peek_request_id(body) == name
