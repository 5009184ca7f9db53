"""The torch engine: greedy answers are transformers' own, whatever the batch and the cache do."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvway_core.errors import ConfigError, EngineFailed
from kvway_worker.torch_engine import TorchEngine
from tests.worker.torch_models import Driver, generate, write_model


def random_prompt(length: int, *, seed: int = 0, prefix: Sequence[int] = ()) -> list[int]:
    tokens = [random.Random(f"{seed}/{i}").randrange(256) for i in range(length - len(prefix))]
    return [*prefix, *tokens]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of one operation that wait for each other are ruinous on shared cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=[False, True], ids=["default", "deterministic"])
def loaded_engine(folder: Path, request: pytest.FixtureRequest) -> TorchEngine:
    return TorchEngine(
        folder, dtype="float32", device="cpu", num_blocks=128, deterministic=request.param
    )


@pytest.fixture
def engine(loaded_engine: TorchEngine) -> TorchEngine:
    """An engine in whose blocks whatever is read before it is written shows up as NaN."""
    for layer in (*loaded_engine._cache.k, *loaded_engine._cache.v):
        layer.fill_(float("nan"))
    return loaded_engine


LENGTHS = (1, 15, 16, 17, 40, 200)
NUM_NEW = 20


def test_greedy_equals_generate_cold_and_alone(engine: TorchEngine, folder: Path) -> None:
    prompts = [random_prompt(length, seed=length) for length in LENGTHS]
    expected = generate(folder, prompts, NUM_NEW)
    for prompt, answer in zip(prompts, expected, strict=True):
        assert Driver(engine).answer(prompt, NUM_NEW) == (answer, 0)


@pytest.mark.parametrize("num_shared", [16, 48, 70])
def test_greedy_equals_generate_on_a_cached_prefix(
    engine: TorchEngine, folder: Path, num_shared: int
) -> None:
    shared = random_prompt(num_shared)
    prompts = [random_prompt(90, seed=seed, prefix=shared) for seed in (1, 2)]
    expected = generate(folder, prompts, NUM_NEW)
    driver = Driver(engine)
    assert driver.answer(prompts[0], NUM_NEW) == (expected[0], 0)
    assert driver.answer(prompts[1], NUM_NEW) == (expected[1], num_shared)


def test_greedy_equals_generate_on_a_fully_cached_prompt(
    engine: TorchEngine, folder: Path
) -> None:
    """The last token is computed again on a copy of its block, which stays as it was."""
    prompt = random_prompt(64)
    (expected,) = generate(folder, [prompt], NUM_NEW)
    driver = Driver(engine)
    assert driver.answer(prompt, NUM_NEW) == (expected, 0)
    for _ in range(2):
        assert driver.answer(prompt, NUM_NEW) == (expected, 63)


def test_greedy_equals_generate_in_a_batch_of_eight_that_comes_and_goes(
    engine: TorchEngine, folder: Path
) -> None:
    shared = random_prompt(33)
    prompts = [random_prompt(35 + 13 * i, seed=i, prefix=shared) for i in range(7)]
    prompts.append(prompts[2])
    expected = generate(folder, prompts, 30)
    for _ in range(2):
        driver = Driver(engine)
        requests = []
        for i, prompt in enumerate(prompts):
            requests.append(driver.add(prompt, 30 - i))
            if i % 3 == 0:
                driver.step()
        driver.finish()
        for i, request in enumerate(requests):
            assert request.output_token_ids == expected[i][: 30 - i]


def test_greedy_equals_generate_with_chunked_prompts(engine: TorchEngine, folder: Path) -> None:
    prompts = [random_prompt(length, seed=length) for length in (100, 9, 61)]
    expected = generate(folder, prompts, NUM_NEW)
    driver = Driver(engine, max_num_batched_tokens=7, max_num_seqs=4)
    requests = [driver.add(prompt, NUM_NEW) for prompt in prompts]
    driver.finish()
    assert [request.output_token_ids for request in requests] == expected


def test_greedy_equals_generate_through_preemption(folder: Path) -> None:
    engine = TorchEngine(folder, dtype="float32", device="cpu", num_blocks=8, max_model_len=128)
    prompts = [random_prompt(30, seed=seed) for seed in range(3)]
    expected = generate(folder, prompts, 60)
    driver = Driver(engine)
    requests = [driver.add(prompt, 60) for prompt in prompts]
    driver.finish()
    assert driver.scheduler.counters.preemptions
    assert [request.output_token_ids for request in requests] == expected


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen2", {}),
        ("qwen3", {}),
        ("mistral", {"sliding_window": None}),
        ("smollm3", {"use_sliding_window": False}),
        ("llama", {"num_key_value_heads": 6, "tie_word_embeddings": True}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    ],
)
def test_greedy_equals_generate_for_each_family(
    tmp_path: Path, model_type: str, changes: dict[str, object]
) -> None:
    folder = write_model(tmp_path, model_type, **changes)
    shared = random_prompt(40)
    prompts = [random_prompt(50 + seed, seed=seed, prefix=shared) for seed in range(3)]
    expected = generate(folder, prompts, 12)
    driver = Driver(TorchEngine(folder, dtype="float32", device="cpu", num_blocks=64))
    assert driver.answer(prompts[0], 12) == (expected[0], 0)
    requests = [driver.add(prompt, 12) for prompt in prompts[1:]]
    driver.finish()
    assert [request.output_token_ids for request in requests] == expected[1:]
    assert [request.cached_tokens for request in requests] == [40, 40]


def test_a_seed_gives_the_same_tokens_alone_and_in_any_batch(engine: TorchEngine) -> None:
    prompts = [random_prompt(20 + i, seed=i) for i in range(5)]
    kinds: list[dict[str, Any]] = [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}]

    def add(driver: Driver, i: int) -> list[int]:
        request = driver.add(prompts[i], 25, seed=100 + i, **kinds[i % 2])
        driver.finish()
        return request.output_token_ids

    alone = [add(Driver(engine), i) for i in range(5)]
    driver = Driver(engine)
    batch = [driver.add(prompts[i], 25, seed=100 + i, **kinds[i % 2]) for i in (3, 0, 4, 1, 2)]
    driver.finish()
    assert [r.output_token_ids for r in batch] == [alone[i] for i in (3, 0, 4, 1, 2)]
    assert len({tuple(tokens) for tokens in alone}) == 5


def test_each_position_draws_its_own_number(tmp_path: Path) -> None:
    """Where all tokens are equally likely the number alone decides; it stays when others leave."""
    folder = write_model(tmp_path, initializer_range=0.0)
    engine = TorchEngine(folder, dtype="float32", device="cpu", num_blocks=64)
    driver = Driver(engine)
    whole = driver.add([1, 2, 3], 30, temperature=1.0, seed=5)
    driver.finish()
    assert len(set(whole.output_token_ids)) > 20
    rest = driver.add([1, 2, 3, *whole.output_token_ids[:10]], 20, temperature=1.0, seed=5)
    driver.finish()
    assert rest.output_token_ids == whole.output_token_ids[10:]


def test_keys_and_values_live_in_the_blocks_and_nowhere_else(folder: Path) -> None:
    engine = TorchEngine(folder, dtype="float32", device="cpu", num_blocks=64)
    prompt = random_prompt(40)
    expected, _ = Driver(engine).answer(prompt, 10)
    driver = Driver(engine)
    request = driver.add(prompt, 10)
    driver.step()
    for layer in (*engine._cache.k, *engine._cache.v):
        layer.zero_()
    driver.finish()
    assert request.output_token_ids[0] == expected[0]
    assert request.output_token_ids != expected


def kv_of(driver: Driver, tokens: Sequence[int]) -> torch.Tensor:
    """Return the KV of the tokens' full blocks, all layers, as a next request would find it."""
    request = driver.add(tokens, 1)
    found = driver.pool.match(request.chain.hashes, request.token_ids, namespace=request.namespace)
    hits = found.blocks
    driver.scheduler.abort(request.request_id)
    assert len(hits) == len(tokens) // 16
    cache = driver.engine._cache
    return torch.stack([layer[list(hits)] for layer in (*cache.k, *cache.v)])


def test_deterministic_mode_computes_the_same_bits_whatever_the_batch(folder: Path) -> None:
    """Cold, warm, chunked and batched: every key and value of prompt and answer, bit for bit."""
    engine = TorchEngine(folder, device="cpu", num_blocks=256, deterministic=True)
    prompt = random_prompt(300)

    def run(*, chunk: int, num_others: int, warm: bool) -> tuple[list[int], torch.Tensor]:
        driver = Driver(engine, max_num_batched_tokens=chunk)
        if warm:
            driver.answer(prompt[:123], 3)
        for i in range(num_others):
            driver.add(random_prompt(7 + 19 * i, seed=i + 1), 40)
        for _ in range(3 if num_others else 0):
            driver.step()
        answer, num_cached = driver.answer(prompt, 20)
        assert num_cached == (123 if warm else 0)
        return answer, kv_of(driver, [*prompt, *answer][:304]).clone()

    answer, kv = run(chunk=2048, num_others=0, warm=False)
    for chunk, num_others, warm in (
        (2048, 0, True),
        (17, 0, False),
        (99, 4, False),
        (40, 4, True),
    ):
        other_answer, other_kv = run(chunk=chunk, num_others=num_others, warm=warm)
        assert other_answer == answer
        assert torch.equal(other_kv, kv)


def test_the_first_step_is_not_the_models_first(folder: Path) -> None:
    """Loading has run the model, and has left no trace in the blocks."""
    engine = TorchEngine(folder, dtype="float32", device="cpu", num_blocks=64)
    assert not any(layer.any() for layer in (*engine._cache.k, *engine._cache.v))


def test_scores_that_are_not_finite_fail_the_step(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[65] = float("nan")
    model.save_pretrained(folder)
    engine = TorchEngine(folder, dtype="float32", device="cpu", num_blocks=64)
    driver = Driver(engine)
    driver.add([65], 4)
    with pytest.raises(EngineFailed, match="not finite"):
        driver.step()


# --- refused by name ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "changes", "problem"),
    [
        ("mistral", {"sliding_window": 64}, "a sliding window of 64 tokens is not supported"),
        ("phi3", {"sliding_window": 64}, "a sliding window of 64 tokens is not supported"),
        ("starcoder2", {"sliding_window": 64}, "a sliding window of 64 tokens is not supported"),
        ("gemma2", {}, "layers of type sliding_attention are not supported"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            "layers of type sliding_attention are not supported",
        ),
        ("gemma2", {"layer_types": ["full_attention"] * 3}, "softcap"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("mamba", {}, "mamba"),
        ("gpt_neox_japanese", {}, "attends in 0 of its 3 layers"),
        ("deepseek_v3", {}, "does not run on the paged cache"),
    ],
)
def test_architectures_that_need_more_are_refused(
    tmp_path: Path, model_type: str, changes: dict[str, object], problem: str
) -> None:
    folder = write_model(tmp_path, model_type, **changes)
    with pytest.raises(ConfigError, match=problem) as caught:
        TorchEngine(folder, dtype="float32", device="cpu", num_blocks=64)
    assert "\n" not in str(caught.value)


def test_missing_weights_are_never_made_up(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 weights, the first is model\.layers\.1"):
        TorchEngine(tmp_path, dtype="float32", device="cpu", num_blocks=64)


def test_a_folder_without_weights_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(ConfigError, match="cannot load the model"):
        TorchEngine(tmp_path, dtype="float32", device="cpu", num_blocks=64)


def test_a_broken_copy_of_the_weights_is_refused(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(folder, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="cannot load the model"):
        TorchEngine(broken, dtype="float32", device="cpu", num_blocks=8)


def test_more_blocks_than_memory_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"KV blocks take .* GiB, and cpu has no such memory"):
        TorchEngine(folder, dtype="float32", device="cpu", num_blocks=10**10)


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no such thing"}')
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json"):
        TorchEngine(tmp_path, dtype="float32", device="cpu")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"num_blocks": 31, "max_model_len": 500},
            r"31 blocks of 16 .*500 tokens needs 32: give it --num-blocks 32",
        ),
        ({"kv_cache_bytes": 100}, "0 blocks"),
        ({"num_blocks": 64, "kv_cache_bytes": 10**6}, "not both"),
        ({"max_model_len": 513}, "513 is more than the 512"),
        ({"deterministic": True, "dtype": "bfloat16"}, "float32"),
        ({"dtype": "float16"}, "float16"),
    ],
)
def test_options_that_cannot_be_are_refused(
    folder: Path, options: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        TorchEngine(folder, **{"device": "cpu", **options})  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no GPU"):
        TorchEngine(folder, device="cuda")


def test_the_cache_takes_the_memory_it_is_given(folder: Path) -> None:
    """3 layers x 2 x 16 tokens x 2 heads x 8 x 4 bytes = 6,144 bytes a block."""
    by_bytes = TorchEngine(folder, dtype="float32", device="cpu", kv_cache_bytes=6144 * 50 + 1)
    assert by_bytes.num_blocks == 50
    by_default = TorchEngine(folder, dtype="float32", device="cpu")
    assert by_default.num_blocks == 2**30 // 6144
    assert by_default.max_model_len == 512
    small = TorchEngine(folder, dtype="float32", device="cpu", num_blocks=20)
    assert small.max_model_len == 320
    in_bfloat16 = TorchEngine(folder, dtype="bfloat16", device="cpu", kv_cache_bytes=6144 * 50)
    assert in_bfloat16.num_blocks == 100


def test_bfloat16_answers(folder: Path) -> None:
    engine = TorchEngine(folder, dtype="bfloat16", device="cpu", num_blocks=64)
    answer, _ = Driver(engine).answer(random_prompt(40), 10)
    assert len(answer) == 10
