"""What a worker's options make of pool and scheduler: seen in what these do."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvway_core.errors import PinQuotaExceeded
from kvway_core.testing.fake_clock import FakeClock
from kvway_worker.loading import Loaded, load_for_good, load_model
from kvway_worker.scheduling.sequence import Sequence as Request
from kvway_worker.sim import PRINTABLE_ASCII
from tests.worker.batching import request
from tests.worker.http_worker import make_settings

PROMPT = range(40)


def loaded(model_dir: Path, **fields: Any) -> Loaded:
    settings = make_settings(model_dir, sim_decode_step_s=0.0, **fields)
    assert settings.validate() == []
    return load_model(settings, model_dir, FakeClock())


def run(made: Loaded, *seqs: Request) -> list[str]:
    """Runs requests to their ends and returns their ids in the order of their first tokens."""
    begun: dict[str, None] = {}
    for seq in seqs:
        made.scheduler.add(seq)
    while made.scheduler.has_work:
        plan = made.scheduler.plan()
        for output in made.scheduler.commit(plan, made.engine.execute(plan)):
            begun[output.seq.request_id] = None
    return list(begun)


def cached(made: Loaded) -> int | None:
    """Sends a prompt twice and returns what the second one found."""
    run(made, request("first", PROMPT))
    second = request("second", PROMPT)
    run(made, second)
    return second.cached_tokens


def test_the_cache_is_read_unless_it_is_off_or_misses_are_forced(byte_model: Path) -> None:
    """Forced misses fill the cache all the same."""
    assert cached(loaded(byte_model)) == 39
    assert cached(loaded(byte_model, prefix_caching=False)) == 0
    forced = loaded(byte_model, force_prefix_misses=True)
    assert cached(forced) == 0
    assert len(forced.scheduler.pool.committed()) == 2


def test_pins_have_their_share(byte_model: Path) -> None:
    hashes = request("a", range(16 * 5)).chain.hashes
    made = loaded(byte_model, num_blocks=16, max_model_len=256)
    with pytest.raises(PinQuotaExceeded):
        made.scheduler.pool.pin("p", hashes, expires_s=1.0)
    made = loaded(byte_model, num_blocks=16, max_model_len=256, pin_quota=0.5)
    assert made.scheduler.pool.pin("p", hashes, expires_s=1.0).num_blocks == 5


@pytest.mark.parametrize(
    ("options", "order"),
    [
        ({}, ["first", "short", "long"]),
        ({"queue_order": "arrival"}, ["first", "long", "short"]),
        ({"ageing": 1000.0}, ["first", "long", "short"]),
    ],
)
def test_who_waits_is_served_in_the_order_asked_for(
    byte_model: Path, options: dict[str, Any], order: Sequence[str]
) -> None:
    """With strong ageing, whoever came before the work of a step goes first."""
    made = loaded(byte_model, max_num_seqs=1, **options)
    scheduler = made.scheduler
    scheduler.add(request("first", PROMPT, max_tokens=2))
    scheduler.add(request("long", range(100, 200)))
    plan = scheduler.plan()
    scheduler.add(request("short", range(200, 220)))
    scheduler.commit(plan, made.engine.execute(plan))
    assert run(made) == list(order)


def test_drafts_are_made_when_asked_for(byte_model: Path) -> None:
    prompt = PRINTABLE_ASCII  # whatever the answer says was in the prompt
    for options, drafts in (
        ({}, False),
        ({"speculate_ngram": 4, "ngram_min_match": 1}, True),
        ({"speculate_ngram": 4, "ngram_min_match": 64}, False),
    ):
        made = loaded(byte_model, **options)
        run(made, request("a", prompt, max_tokens=20))
        assert bool(made.scheduler.counters.num_drafts) == drafts


def test_a_model_that_stays_is_kept_from_the_garbage_collector(byte_model: Path) -> None:
    assert not gc.get_freeze_count()
    try:
        made = load_for_good(make_settings(byte_model), byte_model, FakeClock())
        assert gc.get_freeze_count()
        assert not any(thing is made.scheduler.pool for thing in gc.get_objects())
    finally:
        gc.unfreeze()
