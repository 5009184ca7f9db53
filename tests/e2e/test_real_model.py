"""`kvway up` with the default model, used with the openai client: what a new user does first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import openai
import pytest

from kvway_worker.fetch import DEFAULT_MODEL, resolve_model
from tests.e2e.harness import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(900)]

BLOCK = 16
LIBRARY = (
    "You are the help desk of a small library in a harbour town. Answer in one short sentence. "
    "A card costs 12 euros a year. Books may be kept for 28 days and renewed twice. "
) + "Be polite, be brief, and never promise a book that you have not seen on its shelf. " * 31
GARDEN = (
    "You advise people who grow vegetables on balconies. Answer in one short sentence. "
) + "Think of light, water and wind first, and name plants by the names that shops use. " * 31


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer and what came with it."""

    text: str
    headers: dict[str, str]
    prompt_tokens: int
    cached_tokens: int


async def ask(client: openai.AsyncOpenAI, system: str, question: str, *, stream: bool) -> Answer:
    """Ask with the official client, streamed or not."""
    fields: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    raw = await client.chat.completions.with_raw_response.create(
        model=DEFAULT_MODEL,
        messages=[
            {"role": "system", "content": system},
            {"role": "user", "content": question},
        ],
        max_tokens=16,
        temperature=0,
        stream=stream,
        **fields,
    )
    answer: Any = raw.parse()
    if stream:
        chunks = [chunk async for chunk in answer]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        usage = chunks[-1].usage
    else:
        text, usage = answer.choices[0].message.content, answer.usage
    return Answer(
        text, dict(raw.headers), usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens
    )


def shared_tokens(system: str, *questions: str) -> int:
    """Leading tokens that chats with one system prompt have in common, by transformers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(DEFAULT_MODEL))
    first, second = (
        tokenizer.apply_chat_template(
            [{"role": "system", "content": system}, {"role": "user", "content": question}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for question in questions
    )
    same = 0
    while first[same] == second[same]:
        same += 1
    return same


async def test_the_second_request_is_fast_and_says_why(cluster: Cluster) -> None:
    """Real text, cached tokens to the block, and another replica for another prompt."""
    resolve_model(DEFAULT_MODEL)
    up = await cluster.start(
        "up", "up", "--port", "0", "--admin-port", "0", "--log-dir", str(cluster.folder / "logs")
    )
    assert [sorted(replica) for replica in up.ready["replicas"]] == [["id", "url"]] * 2
    async with openai.AsyncOpenAI(base_url=up.ready["api"] + "/v1", api_key="none") as client:
        capital = await ask(client, "Be brief.", "What is the capital of France?", stream=False)
        cold = await ask(client, LIBRARY, "What does a card cost?", stream=False)
        warm = await ask(client, LIBRARY, "How long may I keep a book?", stream=True)
        again = await ask(client, LIBRARY, "How long may I keep a book?", stream=False)
        other = await ask(client, GARDEN, "What grows in the shade?", stream=True)

    assert "Paris" in capital.text
    shared = shared_tokens(LIBRARY, "What does a card cost?", "How long may I keep a book?")
    assert shared > 600
    assert cold.cached_tokens == 0
    assert warm.cached_tokens == shared
    assert warm.headers["x-kvway-replica"] == cold.headers["x-kvway-replica"]
    assert warm.headers["x-kvway-reason"].startswith("prefix; ")
    assert again.text == warm.text
    assert other.headers["x-kvway-replica"] != cold.headers["x-kvway-replica"]
    assert other.cached_tokens < BLOCK, "the template's own beginning at most"

    record = await cluster.get(
        f"{up.ready['admin']}/admin/decisions/{warm.headers['x-kvway-request-id']}"
    )
    assert record["reason"] == "prefix"
    assert record["prompt_tokens"] == warm.prompt_tokens
    assert record["cached_tokens"] == warm.cached_tokens
    matched = {c["replica_id"]: c["matched_blocks"] for c in record["candidates"]}
    assert matched[record["replica_id"]] == warm.cached_tokens // BLOCK
    assert all(candidate["predicted_ttft_s"] > 0 for candidate in record["candidates"])


async def test_fields_work_with_a_real_model_through_the_client(cluster: Cluster) -> None:
    """Several answers with seeds, log probabilities, an echo, penalties: as the client reads."""
    resolve_model(DEFAULT_MODEL)
    up = await cluster.start(
        *("up", "up", "--replicas", "1", "--port", "0", "--admin-port", "0"),
        *("--log-dir", str(cluster.folder / "logs")),
    )
    messages: list[Any] = [{"role": "user", "content": "Write one line about the sea."}]
    async with openai.AsyncOpenAI(base_url=up.ready["api"] + "/v1", api_key="none") as client:

        async def two(seed: int) -> list[str | None]:
            answer = await client.chat.completions.create(
                model=DEFAULT_MODEL, messages=messages, max_tokens=12, n=2, seed=seed
            )
            assert answer.usage is not None
            assert answer.usage.completion_tokens <= 24
            return [choice.message.content for choice in answer.choices]

        await two(1)  # in bfloat16 a cold prompt rounds otherwise than a cached one
        first, again, other = await two(1), await two(1), await two(2)
        told = await client.chat.completions.create(
            model=DEFAULT_MODEL,
            messages=messages,
            max_tokens=8,
            temperature=0,
            logprobs=True,
            top_logprobs=3,
        )
        echo = await client.completions.create(
            model=DEFAULT_MODEL,
            prompt="The capital of France is",
            max_tokens=4,
            temperature=0,
            echo=True,
            logprobs=2,
        )
        barred = await client.completions.create(
            model=DEFAULT_MODEL,
            prompt="The capital of France is",
            max_tokens=4,
            temperature=0,
            extra_body={"bad_words": ["Paris"]},
        )
    assert first == again
    assert len({*first, *other}) == 4
    assert told.choices[0].logprobs is not None
    tokens = told.choices[0].logprobs.content
    assert tokens is not None
    assert b"".join(bytes(token.bytes or ()) for token in tokens).decode() == (
        told.choices[0].message.content
    )
    for token in tokens:
        assert token.top_logprobs[0].token == token.token
        assert token.logprob == token.top_logprobs[0].logprob <= 0
    [choice] = echo.choices
    assert choice.text.startswith("The capital of France is Paris")
    assert choice.logprobs is not None
    logprobs: list[float | None] = [*(choice.logprobs.token_logprobs or ())]
    assert logprobs[0] is None
    assert all(logprob is not None and logprob <= 0 for logprob in logprobs[1:])
    assert "".join(choice.logprobs.tokens or ()) == choice.text
    assert "Paris" not in barred.choices[0].text
