"""What a worker's options make of engine, pool and scheduler: seen in what these do."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvway_core.errors import ConfigError, ContextLengthExceeded, PinQuotaExceeded
from kvway_core.testing.fake_clock import FakeClock
from kvway_worker.loading import Loaded, load_for_good, load_model
from kvway_worker.scheduling.sequence import Sequence as Request
from kvway_worker.settings import WorkerSettings
from kvway_worker.sim import PRINTABLE_ASCII
from tests.worker.batching import request
from tests.worker.http_worker import make_settings
from tests.worker.torch_models import write_model

PROMPT = range(40)


def loaded(model_dir: Path, **fields: Any) -> Loaded:
    settings = make_settings(model_dir, sim_decode_step_s=0.0, **fields)
    assert settings.validate() == []
    return load_model(settings, model_dir, FakeClock())


def loaded_torch(model_dir: Path, **fields: Any) -> Loaded:
    """Load the model itself."""
    options = {"dtype": "float32", "device": "cpu", "num_threads": 1, **fields}
    options = {"compile": False, **options}  # compiling takes long, and is tested elsewhere
    settings = WorkerSettings(model=str(model_dir), engine="torch", **options)
    assert settings.validate() == []
    return load_model(settings, model_dir, FakeClock())


@pytest.fixture
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


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


# --- torch --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("threads_as_before")
def test_the_model_computes_on_as_many_threads_as_asked_for(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    for num_threads in (2, 1):
        loaded_torch(folder, num_threads=num_threads)
        assert torch.get_num_threads() == num_threads


@pytest.mark.usefixtures("threads_as_before")
def test_deterministic_reaches_the_engine(tmp_path: Path) -> None:
    """Seen in what it refuses."""
    folder = write_model(tmp_path, "phi3")
    loaded_torch(folder)
    with pytest.raises(ConfigError, match="--deterministic does not work with this model"):
        loaded_torch(folder, deterministic=True)


@pytest.mark.usefixtures("threads_as_before")
def test_memory_and_type_make_the_blocks(tmp_path: Path) -> None:
    """16 tokens of this model are 6,144 bytes in float32."""
    folder = write_model(tmp_path)
    memory = {"kv_cache_gib": (6144 * 50 + 1) / 2**30}
    assert loaded_torch(folder, **memory).engine.num_blocks == 50
    assert loaded_torch(folder, **memory, dtype="bfloat16").engine.num_blocks == 100
    halves = loaded_torch(folder, **memory, block_size=8).engine
    assert (halves.num_blocks, halves.block_size) == (100, 8)
    assert loaded_torch(folder).engine.num_blocks == 2**30 // 6144
    assert loaded_torch(folder, num_blocks=40).engine.num_blocks == 40


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_device_reaches_the_engine(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no GPU"):
        loaded_torch(write_model(tmp_path), device="cuda")


# --- context ------------------------------------------------------------------------------------


def contexts(made: Loaded) -> tuple[int, int, int]:
    return made.model.max_model_len, made.engine.max_model_len, made.scheduler.max_model_len


@pytest.mark.usefixtures("threads_as_before")
def test_a_prompt_longer_than_the_positions_of_the_model_is_refused(tmp_path: Path) -> None:
    """GPT-2 has another name for them."""
    folder = write_model(
        tmp_path, "gpt2", num_key_value_heads=6, max_position_embeddings=128, num_attention_heads=6
    )
    config = json.loads((folder / "config.json").read_text())
    assert "max_position_embeddings" not in config
    assert config["n_positions"] == 128
    made = loaded_torch(folder, num_blocks=64)
    assert contexts(made) == (128, 128, 128)
    with pytest.raises(ContextLengthExceeded) as caught:
        made.scheduler.validate(request("long", [2] * 300))
    assert caught.value.http_status == 400
    run(made, good := request("good", [1] * 20, max_tokens=108))
    assert good.num_output_tokens == 108


@pytest.mark.usefixtures("threads_as_before")
def test_the_context_is_the_engines_where_the_folder_does_not_say(tmp_path: Path) -> None:
    """Transformers has a default for each family; Llama's is 2,048."""
    folder = write_model(tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["max_position_embeddings"]
    path.write_text(json.dumps(config))
    assert contexts(loaded_torch(folder, num_blocks=1000)) == (2048, 2048, 2048)
    assert contexts(loaded_torch(folder, num_blocks=100)) == (1600, 1600, 1600)
    assert contexts(loaded_torch(folder, max_model_len=700)) == (700, 700, 700)
    with pytest.raises(ConfigError, match="2049 is more than the 2048"):
        loaded_torch(folder, max_model_len=2049)


def test_the_context_of_a_sim_worker_is_the_folders_or_what_its_blocks_hold(
    byte_model: Path,
) -> None:
    assert loaded(byte_model, num_blocks=1000).model.max_model_len == 8192
    assert loaded(byte_model, num_blocks=512).model.max_model_len == 8192
    assert loaded(byte_model, num_blocks=511).model.max_model_len == 511 * 16
    assert loaded(byte_model, num_blocks=10, block_size=8).model.max_model_len == 80
    with pytest.raises(ConfigError, match="the KV blocks hold 160 tokens; add blocks"):
        loaded(byte_model, num_blocks=10, max_model_len=161)
    with pytest.raises(ConfigError, match="the model's context is 8192 tokens"):
        loaded(byte_model, num_blocks=1000, max_model_len=8193)
