"""`kvway worker` on the command line: help, the example file, and what stops it from starting."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvway_core.config import load
from kvway_core.errors import ConfigError
from kvway_worker.api.fields import CHAT_FIELDS, COMPLETION_FIELDS
from kvway_worker.cli import COMMAND, DESCRIPTION
from kvway_worker.settings import WorkerSettings

EXAMPLE = Path(__file__).parents[2] / "worker" / "config.example.toml"
SIM = ("--model", "m", "--engine", "sim")
SILENT = (*SIM, "--no-kv-events")
DRAFTS = (*SIM, "--speculate-ngram", "4")
UNCACHED = (*SIM, "--no-prefix-caching")


def sim_option(name: str) -> tuple[str, ...]:
    """Arguments that give an option of the cost model to a torch worker."""
    return ("--model", "m", f"--sim-{name}", "0.5")


def settings_of(*argv: str) -> WorkerSettings:
    """The settings that these arguments make."""
    return load(WorkerSettings, argv, env={}, prog="kvway worker", description=DESCRIPTION).config


def test_help_is_as_agreed(
    golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Every option with its unit and default."""
    with pytest.raises(SystemExit) as stopped:
        COMMAND.run(["--help"])
    assert stopped.value.code == 0
    golden("worker_help.txt", capsys.readouterr().out)


def test_the_example_file_is_the_defaults() -> None:
    """What the file says is what happens without it."""
    example = ("--model", "m", "--config", str(EXAMPLE))
    assert settings_of(*example) == settings_of("--model", "m")


def test_the_example_file_has_every_option_and_they_parse(tmp_path: Path) -> None:
    """Also those that are commented out for having no default."""
    lines = [line.removeprefix("# ") for line in EXAMPLE.read_text().splitlines() if " = " in line]
    names = [line.partition(" = ")[0] for line in lines]
    assert names == [field.name for field in dataclasses.fields(WorkerSettings)]
    uncommented = tmp_path / "all.toml"
    uncommented.write_text("\n".join(line for line in lines if "kv_cache_gib" not in line))
    assert settings_of("--config", str(uncommented)).num_blocks == 2048


@pytest.mark.parametrize(
    ("problem", "argv"),
    [
        ("no model: give --model", ()),
        ("--port must be 0 to 65535, got 65536", (*SIM, "--port", "65536")),
        ("--kv-events-port must be 0 to 65535", (*SIM, "--kv-events-port", "-1")),
        ("must differ", (*SIM, "--port", "9000", "--kv-events-port", "9000")),
        ("exclude each other", ("--model", "m", "--num-blocks", "9", "--kv-cache-gib", "1")),
        ("--kv-cache-gib has no meaning with --engine sim", (*SIM, "--kv-cache-gib", "1")),
        ("--dtype has no meaning with --engine sim", (*SIM, "--dtype", "float32")),
        ("--kv-dtype has no meaning with --engine sim", (*SIM, "--kv-dtype", "int8")),
        ("--device has no meaning with --engine sim", (*SIM, "--device", "cpu")),
        ("--deterministic has no meaning with --engine sim", (*SIM, "--deterministic")),
        ("--num-threads has no meaning with --engine sim", (*SIM, "--num-threads", "1")),
        ("--attention has no meaning with --engine sim", (*SIM, "--attention", "sdpa")),
        ("--compile has no meaning with --engine sim", (*SIM, "--no-compile")),
        ("--cascade has no meaning with --engine sim", (*SIM, "--no-cascade")),
        (
            "--attention compiled and --no-compile exclude each other",
            ("--model", "m", "--attention", "compiled", "--no-compile"),
        ),
        (
            "--attention triton and --deterministic exclude each other",
            ("--model", "m", "--attention", "triton", "--deterministic"),
        ),
        ("--sim-decode-step-s has no meaning with --engine torch", sim_option("decode-step-s")),
        ("--sim-decode-s-per-seq has no meaning", sim_option("decode-s-per-seq")),
        ("--sim-prefill-tokens-per-s has no meaning", sim_option("prefill-tokens-per-s")),
        ("--sim-attention-s-per-pair has no meaning", sim_option("attention-s-per-pair")),
        ("--kv-events-host needs", (*SILENT, "--kv-events-host", "127.0.0.2")),
        ("--kv-events-port needs", (*SILENT, "--kv-events-port", "5557")),
        ("--kv-events-replay-port needs", (*SILENT, "--kv-events-replay-port", "5558")),
        ("--kv-events-buffer needs --kv-events", (*SILENT, "--kv-events-buffer", "5")),
        ("--num-blocks must be at most 1048576", (*SIM, "--num-blocks", "100000000000")),
        ("--kv-cache-gib must be at most", ("--model", "m", "--kv-cache-gib", "1e300")),
        ("--block-size must be at most 1024", (*SIM, "--block-size", "1000000000")),
        (
            "--num-blocks (1048576) times --block-size (65) must be at most 67108864 tokens",
            (*SIM, "--num-blocks", "1048576", "--block-size", "65"),
        ),
        ("in float32 on a CPU", ("--model", "m", "--deterministic", "--dtype", "bfloat16")),
        ("in float32 on a CPU", ("--model", "m", "--deterministic", "--device", "cuda")),
        ("--kv-events-token-ids needs", (*SIM, "--kv-events-token-ids", "--no-kv-events")),
        ("must be at least --max-num-seqs", (*SIM, "--max-num-batched-tokens", "8")),
        ("--num-blocks must be more than 0, got 0", (*SIM, "--num-blocks", "0")),
        ("--block-size must be more than 0", (*SIM, "--block-size", "0")),
        ("--max-waiting must not be negative, got -1", (*SIM, "--max-waiting", "-1")),
        ("--drain-timeout-s must not be negative", (*SIM, "--drain-timeout-s", "-0.5")),
        ("--ageing must not be negative, got -0.1", (*SIM, "--ageing", "-0.1")),
        ("--ageing must be at most 1000", (*SIM, "--ageing", "1e9")),
        ("--ageing needs --queue-order", (*SIM, "--queue-order", "arrival", "--ageing", "1")),
        ("--queue-order", (*SIM, "--queue-order", "longest")),
        ("--speculate-ngram must not be negative", (*SIM, "--speculate-ngram", "-1")),
        ("--speculate-ngram must be at most 64", (*SIM, "--speculate-ngram", "65")),
        ("--ngram-min-match needs --speculate-ngram", (*SIM, "--ngram-min-match", "2")),
        ("--ngram-min-match must be more than 0", (*DRAFTS, "--ngram-min-match", "0")),
        ("--ngram-min-match must be at most 64", (*DRAFTS, "--ngram-min-match", "65")),
        ("--pin-quota must be at most 1, got 1.5", (*SIM, "--pin-quota", "1.5")),
        ("--pin-quota must not be negative", (*SIM, "--pin-quota", "-0.5")),
        ("--pin-quota needs --prefix-caching", (*UNCACHED, "--pin-quota", "0.5")),
        ("--force-prefix-misses needs", (*UNCACHED, "--force-prefix-misses")),
        ("--engine", ("--model", "m", "--engine", "gpu")),
        ("--bogus", (*SIM, "--bogus")),
    ],
)
def test_what_is_wrong_is_said_in_one_line(problem: str, argv: tuple[str, ...]) -> None:
    """One problem, one line."""
    with pytest.raises(ConfigError) as caught:
        settings_of(*argv)
    (line,) = caught.value.problems
    assert problem in line


def test_all_problems_are_said_at_once() -> None:
    """Not one per try."""
    with pytest.raises(ConfigError) as caught:
        settings_of("--port", "-1", "--block-size", "0")
    assert len(caught.value.problems) == 3


def test_the_served_name_follows_the_model(tmp_path: Path) -> None:
    """The id as given, a folder's own name, or what is asked for."""
    assert settings_of("--model", "owner/name").name == "owner/name"
    assert settings_of("--model", str(tmp_path)).name == tmp_path.name
    assert settings_of("--model", "owner/name", "--served-model-name", "x").name == "x"


def test_a_model_that_is_not_there_says_how_to_fetch_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything listens."""
    monkeypatch.setenv("KVWAY_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="kvway fetch owner/name"):
        COMMAND.run(["--model", "owner/name"])


def test_a_sim_worker_loads_no_torch() -> None:
    """The torch engine is imported when it is asked for, and only then."""
    code = (
        "import sys, kvway_worker.cli, kvway_worker.serving\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "[]"


def test_the_api_page_lists_exactly_the_fields_that_are_taken() -> None:
    """docs/worker-api.md names what is supported and what is accepted without effect."""
    page = (Path(__file__).parents[2] / "docs" / "worker-api.md").read_text()
    section = page.partition("## Requests")[2].partition("Any other field")[0]
    listed = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    listed += [line for line in section.splitlines() if line.startswith("Accepted")]
    assert set(re.findall(r"`(\w+)`", " ".join(listed))) == CHAT_FIELDS | COMPLETION_FIELDS
