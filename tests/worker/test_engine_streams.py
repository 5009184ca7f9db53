"""Streams of requests and forks: each ends once, whatever ends it, and its blocks are free."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing, suppress

import pytest

from kvway_core.errors import EngineFailed, InvalidRequest, KvwayError, Overloaded, ShuttingDown
from kvway_core.testing.fake_clock import FakeClock
from kvway_worker.engine import TokenOut, TokenStream
from kvway_worker.scheduling.sampling_params import SamplingParams
from kvway_worker.scheduling.sequence import Sequence
from tests.worker.batching import answer, request
from tests.worker.looping import LoopWorker, rest, tokens, worker

PROMPT = range(40)


def forked(name: str, num_answers: int, *, max_tokens: int = 3, start: int = 0) -> Sequence:
    """A request with forks; "a" with 3 answers is "a", "a.1" and "a.2"."""
    prompt = range(start, start + 40)
    seq = request(name, prompt, max_tokens=max_tokens)
    seq.forks = [
        request(f"{name}.{index}", prompt, max_tokens=max_tokens)
        for index in range(1, num_answers)
    ]
    return seq


async def ends(streams: tuple[TokenStream, ...]) -> list[list[TokenOut] | BaseException]:
    return await asyncio.gather(*map(rest, streams), return_exceptions=True)


async def nobody_holds_blocks(w: LoopWorker) -> bool:
    return await w.loop.reset_prefix_cache()


async def test_a_request_and_its_forks_have_streams_in_order() -> None:
    async with worker() as w:
        streams = w.loop.submit(forked("a", 3))
        assert [stream.seq.request_id for stream in streams] == ["a", "a.1", "a.2"]
        for parts in await asyncio.gather(*map(rest, streams)):
            assert tokens(parts) == answer(PROMPT, 3)
            assert [part.finish_reason for part in parts] == [None, None, "length"]
        assert await nobody_holds_blocks(w)


async def test_a_stream_that_is_closed_unread_aborts_its_request_and_no_other() -> None:
    async with worker() as w:
        w.engine.gate.clear()
        streams = w.loop.submit(forked("a", 3, max_tokens=50))
        await w.engine.step_begins()
        await streams[1].aclose()
        w.engine.gate.set()
        assert tokens(await rest(streams[0])) == answer(PROMPT, 50)
        assert tokens(await rest(streams[2])) == answer(PROMPT, 50)
        assert await rest(streams[1]) == []
        assert await nobody_holds_blocks(w)


@pytest.mark.parametrize("closes", ["waiting", "first step", "decoding"])
async def test_forks_outlive_their_request(closes: str) -> None:
    async with worker(max_num_seqs=3) as w:
        w.engine.gate.clear()
        other = w.start(request("other", range(300, 340), max_tokens=2))
        await w.engine.step_begins()
        first, *forks = w.loop.submit(forked("a", 3, max_tokens=5))
        if closes != "waiting":
            w.engine.gate.set()
            await other
            w.engine.gate.clear()
            if closes == "decoding":
                w.engine.gate.set()
                await anext(first)
        await first.aclose()
        w.engine.gate.set()
        for fork in forks:
            assert tokens(await rest(fork)) == answer(PROMPT, 5)
        await other
        assert await nobody_holds_blocks(w)


async def test_forks_are_taken_all_or_none() -> None:
    async with worker(max_num_seqs=3, max_waiting=2) as w:
        w.engine.gate.clear()
        first = w.loop.submit(forked("a", 3))
        with pytest.raises(Overloaded, match=r"3 requests .* at most 5"):
            w.loop.submit(forked("b", 3))
        second = w.loop.submit(forked("b", 2))
        assert w.loop.load().num_running + w.loop.load().num_waiting == 5
        w.engine.gate.set()
        for parts in await asyncio.gather(*map(rest, (*first, *second))):
            assert tokens(parts) == answer(PROMPT, 3)


async def test_forks_have_ids_of_their_own() -> None:
    async with worker() as w:
        seq = forked("a", 3)
        seq.forks[1].request_id = "a"
        with pytest.raises(InvalidRequest, match="'a' is running"):
            w.loop.submit(seq)
        assert len(await rest(*w.loop.submit(request("a", PROMPT)))) == 1


async def test_a_request_with_forks_is_not_generated_in_short() -> None:
    async with worker() as w:
        with pytest.raises(ValueError, match="'a' has forks"):
            await anext(w.loop.generate(forked("a", 2)))


async def test_a_step_that_raises_fails_forks_that_have_not_begun() -> None:
    async with worker() as w:
        w.engine.poison = {"a"}
        ended = await ends(w.loop.submit(forked("a", 3)))
        assert [type(end) for end in ended] == [EngineFailed] * 3
        assert tokens(await w.ask(request("a.1", PROMPT))) == answer(PROMPT, 1)
        assert await nobody_holds_blocks(w)


async def test_closing_the_loop_ends_forks_too() -> None:
    async with worker() as w:
        w.engine.gate.clear()
        streams = w.loop.submit(forked("a", 3))
        await w.engine.step_begins()
        more = w.loop.submit(forked("b", 2))
        await w.loop.close()
        assert [type(end) for end in await ends((*streams, *more))] == [ShuttingDown] * 5
        assert not w.loop.abort("a"), "it has ended"
        with pytest.raises(ShuttingDown):
            w.loop.submit(request("a", PROMPT))
        with pytest.raises(ShuttingDown):  # and not that the id is in use
            w.loop.submit(request("a", PROMPT))


async def test_an_engine_that_is_given_up_ends_those_that_were_aborted_in_its_last_turn() -> None:
    async with worker() as w:
        w.engine.gate.clear()
        streams = w.loop.submit(forked("a", 2, max_tokens=50))
        await w.engine.step_begins()
        w.loop.abort("a")
        w.engine.broken = SystemExit(1)
        w.engine.gate.set()
        assert [type(end) for end in await ends(streams)] == [EngineFailed] * 2


@pytest.mark.parametrize("when", ["waiting", "computing", "pending fork", "decoding"])
async def test_an_aborted_request_says_so_in_its_last_part(when: str) -> None:
    """Section 6 no 20: in every state, and all blocks come back."""
    async with worker(max_num_seqs=2) as w:
        w.engine.gate.clear()
        streams = w.loop.submit(forked("a", 2, max_tokens=50))
        await w.engine.step_begins()
        (queued,) = w.loop.submit(request("queued", range(300, 340), max_tokens=2))
        name = {"waiting": "queued", "pending fork": "a.1"}.get(when, "a")
        if when == "decoding":
            w.engine.one_at_a_time = True
            w.engine.gate.set()
            await anext(streams[0])
            await w.engine.step_begins()
            w.engine.one_at_a_time = False
        assert w.loop.abort(name)
        w.engine.gate.set()
        ended = await asyncio.gather(*map(rest, (*streams, queued)))
        for stream, parts in zip((*streams, queued), ended, strict=True):
            if stream.seq.request_id == name:
                assert parts[-1] == TokenOut(None, "abort", 0)
            else:
                assert parts[-1].finish_reason == "length"
        assert not w.loop.abort(name)
        assert await nobody_holds_blocks(w)


async def test_a_request_that_ends_before_its_abort_ends_as_it_would_have() -> None:
    async with worker() as w:
        w.engine.gate.clear()
        (stream,) = w.loop.submit(request("a", PROMPT))
        await w.engine.step_begins()
        assert w.loop.abort("a")
        w.engine.gate.set()
        assert [part.finish_reason for part in await rest(stream)] == ["length"]


async def test_an_unknown_id_is_not_aborted() -> None:
    async with worker() as w:
        assert not w.loop.abort("a")


async def test_a_reader_that_waits_goes_on_when_somebody_closes_its_stream() -> None:
    async with worker() as w:
        w.engine.gate.clear()
        (stream,) = w.loop.submit(request("a", PROMPT))
        reading = asyncio.create_task(rest(stream))
        await w.engine.step_begins()
        await stream.aclose()
        assert await reading == []
        w.engine.gate.set()
        assert await nobody_holds_blocks(w)


async def test_what_was_not_read_when_a_stream_is_closed_is_never_read() -> None:
    async with worker() as w:
        (stream,) = w.loop.submit(request("a", PROMPT, max_tokens=3))
        await anext(stream)
        await w.loop.reset_prefix_cache()  # behind it there is more to read
        await stream.aclose()
        assert await rest(stream) == []
        assert await rest(stream) == []


async def test_closing_twice_or_after_the_end_is_nothing_special() -> None:
    async with worker() as w:
        (stream,) = w.loop.submit(request("a", PROMPT))
        assert len(await rest(stream)) == 1
        await stream.aclose()
        await stream.aclose()
        assert await rest(stream) == []
        assert tokens(await w.ask(request("a", PROMPT))) == answer(PROMPT, 1)


async def test_log_probabilities_come_with_tokens_those_of_the_prompt_with_the_first() -> None:
    """A fork has those of the prompt too."""
    async with worker() as w:
        w.engine.tells_logprobs = True
        seq = forked("a", 2)
        for one in (seq, *seq.forks):
            one.params = SamplingParams(max_tokens=3, logprobs=0, prompt_logprobs=0)
        for parts in await asyncio.gather(*map(rest, w.loop.submit(seq))):
            assert [part.logprobs and part.logprobs.token_id for part in parts] == tokens(parts)
            told = [[one.token_id for one in part.prompt_logprobs] for part in parts]
            assert told == [list(range(1, 40)), [], []]


@pytest.mark.parametrize("seed", range(5))
async def test_whatever_ends_requests_each_ends_once_and_all_blocks_come_back(seed: int) -> None:
    """Section 6 no 20: closed, aborted, failed and finished in random order, with forks."""
    rng = random.Random(seed)
    async with worker(num_blocks=24, max_num_seqs=4, max_waiting=40, budget=32) as w:
        w.engine.poison = {"7", "13.1", "20"}
        submitted: set[str] = set()
        ended: dict[str, str] = {}

        async def read(stream: TokenStream, num_parts: int) -> None:
            name = stream.seq.request_id
            reason = "left"
            async with aclosing(stream):
                with suppress(EngineFailed):
                    async for part in stream:
                        assert name not in ended
                        num_parts -= 1
                        if part.finish_reason is not None:
                            ended[name] = part.finish_reason
                        elif not num_parts:
                            break
                    ended.setdefault(name, reason)
                    return
            ended[name] = "failed"

        async with asyncio.TaskGroup() as readers:
            for index in range(30):
                seq = forked(
                    str(index),
                    rng.randrange(1, 4),
                    max_tokens=rng.randrange(1, 60),
                    start=rng.choice((0, 0, 7, 300)),
                )
                with suppress(Overloaded):
                    for stream in w.loop.submit(seq):
                        submitted.add(stream.seq.request_id)
                        readers.create_task(read(stream, rng.choice((0, 1, 30, 100))))
                for _ in range(rng.randrange(40)):
                    await asyncio.sleep(0)
                if rng.random() < 0.5:
                    w.loop.abort(f"{rng.randrange(30)}{rng.choice(('', '.1'))}")
        assert w.loop.failed is None
        assert ended.keys() == submitted
        assert {"left", "length"} <= set(ended.values())
        assert await nobody_holds_blocks(w)
        assert not list(w.loop._steps._stepper.live)
        assert (w.loop.load().num_running, w.loop.load().num_waiting) == (0, 0)


async def test_times_are_measured_between_handing_over_place_first_token_and_end() -> None:
    clock = FakeClock()
    async with worker(max_num_seqs=1, clock=clock) as w:
        w.engine.gate.clear()
        (first,) = w.loop.submit(request("a", PROMPT))
        await w.engine.step_begins()
        (second,) = w.loop.submit(request("b", range(300, 340), max_tokens=2))
        clock.advance(1.0)
        w.engine.gate.set()
        await rest(first)
        await rest(second)
        spans = w.loop.load().spans
        assert (spans.queue_s.total, spans.prefill_s.total) == (1.0, 1.0)
        assert spans.queue_s.num_observed == spans.prefill_s.num_observed == 2
        assert (spans.decode_s.total, spans.decode_s.num_observed) == (0.0, 2)
        assert (spans.prompt_tokens.total, spans.generation_tokens.total) == (80, 3)
        assert (spans.step_tokens.total, spans.step_tokens.num_observed) == (81, 3)


async def test_forks_wait_and_prefill_as_long_as_their_request() -> None:
    clock = FakeClock()
    async with worker(clock=clock) as w:
        w.engine.gate.clear()
        streams = w.loop.submit(forked("a", 3))
        await w.engine.step_begins()
        clock.advance(1.0)
        w.engine.gate.set()
        await ends(streams)
        spans = w.loop.load().spans
        assert (spans.queue_s.num_observed, spans.queue_s.total) == (3, 0.0)
        assert (spans.prefill_s.num_observed, spans.prefill_s.total) == (3, 3.0)


async def test_a_failed_request_has_no_length_and_an_aborted_one_has() -> None:
    async with worker() as w:
        w.engine.poison = {"bad"}
        with pytest.raises(KvwayError):
            await w.ask(request("bad", PROMPT))
        w.engine.gate.clear()
        (stream,) = w.loop.submit(request("a", PROMPT, max_tokens=50))
        w.loop.abort("a")
        w.engine.gate.set()
        await rest(stream)
        assert w.loop.load().spans.prompt_tokens.num_observed == 1


async def test_several_requests_are_taken_together_or_not_at_all() -> None:
    """Where there is no room for all of them, or one can never run, none is known."""
    async with worker(max_num_seqs=3, max_waiting=1) as w:
        with pytest.raises(Overloaded):
            w.loop.submit(forked("a", 2), forked("b", 3))
        with pytest.raises(KvwayError):
            w.loop.submit(forked("a", 2), request("b", range(999), max_tokens=3))
        assert (w.loop.load().num_waiting, w.loop.load().num_running) == (0, 0)
        streams = w.loop.submit(forked("a", 2), forked("b", 2, start=1000))
        assert [stream.seq.request_id for stream in streams] == ["a", "a.1", "b", "b.1"]
        answers = [tokens(parts) for parts in await asyncio.gather(*map(rest, streams))]
        assert answers == [answer(PROMPT, 3)] * 2 + [answer(range(1000, 1040), 3)] * 2
        assert await nobody_holds_blocks(w)
