"""Every option of a worker, its unit and its default: the only place that has them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvway_core.blocks import DEFAULT_BLOCK_SIZE
from kvway_core.config import option
from kvway_core.models import served_model_name
from kvway_core.piece_cache import DEFAULT_CACHE_BYTES
from kvway_core.web_limits import (
    DEFAULT_MAX_BODIES_BYTES,
    DEFAULT_MAX_BODY_BYTES,
    DEFAULT_MAX_CONNECTIONS,
    HttpLimits,
)
from kvway_worker.scheduling.waiting import AGEING

SIM_NUM_BLOCKS: Final = 4096
MAX_BLOCK_SIZE: Final = 1024
MAX_NUM_THREADS: Final = 512
MAX_NUM_BLOCKS: Final = 2**20
MAX_KV_CACHE_GIB: Final = 2**20
MAX_NUM_DRAFTS: Final = 64
MAX_NGRAM: Final = 64
MAX_AGEING: Final = 1000.0
SIM_MAX_KV_TOKENS: Final = 2**26
"""Tokens in the blocks of a sim worker, which keeps 8 bytes for each."""
_MAX_PORT: Final = 65_535


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker was told, validated by `validate`, unchanged while it runs."""

    model: str | None = option(
        None, help="model to serve: a folder, or a hub id that `kvway fetch` has fetched"
    )
    served_model_name: str | None = option(
        None, help="name clients use; else the id as given, or the name of the folder"
    )
    engine: str = option(
        "torch",
        help="what computes: the model itself, or a cost model with made-up text",
        choices=("torch", "sim"),
    )
    host: str = option("127.0.0.1", help="interface to listen on")
    port: int = option(8001, help="port to listen on; 0 takes a free one")
    dtype: str = option(
        "auto",
        help="type of weights and KV; auto is bfloat16 where the hardware computes with it",
        choices=("auto", "float32", "bfloat16"),
    )
    kv_dtype: str = option(
        "auto",
        help="type of cached keys and values, torch only; int8 and fp8_e4m3 take about half the"
        " memory of bfloat16 and round; auto is that of the weights",
        choices=("auto", "int8", "fp8_e4m3"),
    )
    device: str = option(
        "auto",
        help="where the model runs; auto is the GPU if there is one",
        choices=("auto", "cpu", "cuda"),
    )
    attention: str = option(
        "auto",
        help="what attends, torch only: kernels compiled for this machine, torch's own operations,"
        " or Triton's kernels for a GPU; auto takes the fastest that can run here",
        choices=("auto", "compiled", "sdpa", "triton"),
    )
    compile: bool = option(
        True,
        help="let --attention auto take what is compiled when the worker starts, which takes a"
        " while the first time; it is kept for the next start",
    )
    cascade: bool = option(
        True,
        help="read a prefix that requests of a batch share once for all of them, where that is"
        " faster; torch only",
    )
    num_threads: int | None = option(
        None,
        help="threads that compute on a CPU, torch only; give fewer where workers share the cores,"
        " else torch takes all",
    )
    num_blocks: int | None = option(
        None,
        help="KV blocks in the pool; else by --kv-cache-gib, with sim 4096",
        unit="blocks",
    )
    kv_cache_gib: float | None = option(
        None, help="memory for KV blocks, torch only; else by --num-blocks, or 1", unit="GiB"
    )
    block_size: int = option(
        DEFAULT_BLOCK_SIZE, help="tokens per KV block; routers learn it from /load", unit="tokens"
    )
    max_num_seqs: int = option(32, help="requests in one step at most", unit="requests")
    max_num_batched_tokens: int = option(
        512,
        help="tokens computed in one step at most; a client that leaves is noticed between steps,"
        " so a CPU takes few, a GPU can take 2048 and more",
        unit="tokens",
    )
    max_model_len: int | None = option(
        None, help="prompt and answer together at most; else the model's limit", unit="tokens"
    )
    max_waiting: int = option(
        256, help="requests that may wait for a place; more are refused with 503", unit="requests"
    )
    queue_order: str = option(
        "shortest",
        help="who gets a free place first among requests of one priority: the one with the fewest"
        " uncached tokens to compute, or the one that came first",
        choices=("shortest", "arrival"),
    )
    ageing: float = option(
        AGEING,
        help="with --queue-order shortest, how soon waiting outweighs length: only requests that"
        " come before (own uncached tokens / ageing) tokens of work were done can overtake one;"
        " 0 lets short ones overtake for ever",
    )
    speculate_ngram: int = option(
        0,
        help="tokens to guess per request and step, from what its text said before, and have"
        " the model check: same answers, sooner where they repeat the prompt; 0 guesses none",
        unit="tokens",
    )
    ngram_min_match: int = option(
        4,
        help="tokens that must have occurred before for a guess; fewer guess more often and worse",
        unit="tokens",
    )
    prefix_caching: bool = option(True, help="share KV blocks between requests")
    pin_quota: float = option(
        0.25, help="share of the KV blocks, 0 to 1, that pinned prefixes may keep"
    )
    force_prefix_misses: bool = option(
        False,
        help="fill the prefix cache but never read it: for comparing cold answers with warm ones",
    )
    deterministic: bool = option(
        False,
        help="answers equal bit for bit, cold or warm, alone or in a batch; slower, and only for"
        " the llama, mistral, qwen2 and qwen3 families",
    )
    debug_invariants: bool = option(
        False, help="check the books of pool, tables and queue twice per step; slow"
    )
    kv_events: bool = option(True, help="publish cache changes on ZMQ")
    kv_events_host: str = option("127.0.0.1", help="interface of the KV event sockets")
    kv_events_port: int = option(0, help="port of the KV events; 0 takes a free one (see /load)")
    kv_events_replay_port: int = option(0, help="port of their replay; 0 takes a free one")
    kv_events_token_ids: bool = option(
        False, help="put token ids into KV events; they are prompts, so mind who can connect"
    )
    kv_events_buffer: int = option(
        10_000, help="batches of KV events kept for replay", unit="batches"
    )
    sim_prefill_tokens_per_s: float = option(
        8000.0, help="sim: prompt tokens computed per second, attention aside", unit="tokens/s"
    )
    sim_attention_s_per_pair: float = option(
        0.0, help="sim: time per pair of a computed token and one before it", unit="seconds"
    )
    sim_decode_step_s: float = option(
        0.01, help="sim: time of a step before its tokens count", unit="seconds"
    )
    sim_decode_s_per_seq: float = option(
        0.0, help="sim: time a generated token adds to its step", unit="seconds"
    )
    max_body_bytes: int = option(DEFAULT_MAX_BODY_BYTES, help="largest request body", unit="bytes")
    max_bodies_bytes: int = option(
        DEFAULT_MAX_BODIES_BYTES,
        help="request bodies in memory, all together; beyond, requests get 503",
        unit="bytes",
    )
    max_connections: int = option(
        DEFAULT_MAX_CONNECTIONS, help="clients' connections at a time; beyond, they get 503"
    )
    headers_timeout_s: float = option(
        10.0, help="time for the headers of a request to arrive", unit="seconds"
    )
    body_timeout_s: float = option(30.0, help="time for a request body to arrive", unit="seconds")
    client_stall_timeout_s: float = option(
        60.0,
        help="how long a client may take nothing of an answer before it is cut off",
        unit="seconds",
    )
    tokenizer_threads: int = option(2, help="threads that tokenize", unit="threads")
    tokenizer_cache_bytes: int = option(
        DEFAULT_CACHE_BYTES, help="memory for texts whose tokens are known", unit="bytes"
    )
    max_tokenizing: int = option(
        256, help="requests being tokenized or waiting for it; more get 503", unit="requests"
    )
    drain_timeout_s: float = option(
        30.0, help="time running requests have after SIGTERM", unit="seconds"
    )
    ready_file: Path | None = option(
        None, help="file to write when ready: JSON with url, pid, boot_id", metavar="FILE"
    )
    log_level: str = option(
        "info", help="least level that is logged", choices=("debug", "info", "warning", "error")
    )

    @property
    def http_limits(self) -> HttpLimits:
        """What clients may take."""
        return HttpLimits(
            max_body_bytes=self.max_body_bytes,
            max_bodies_bytes=self.max_bodies_bytes,
            max_connections=self.max_connections,
            headers_timeout_s=self.headers_timeout_s,
            body_timeout_s=self.body_timeout_s,
            stall_timeout_s=self.client_stall_timeout_s,
        )

    def validate(self) -> list[str]:
        """Return every problem, one line each; empty when the settings make sense."""
        problems = [] if self.model else ["no model: give --model, a folder or a fetched hub id"]
        problems += [
            f"{_flag(name)} must be 0 to {_MAX_PORT}, got {getattr(self, name)}"
            for name in ("port", "kv_events_port", "kv_events_replay_port")
            if not 0 <= getattr(self, name) <= _MAX_PORT
        ]
        problems += [
            f"{_flag(name)} must be more than 0, got {value:g}"
            for name in _POSITIVE
            if (value := getattr(self, name)) is not None and not value > 0
        ]
        problems += [
            f"{_flag(name)} must not be negative, got {getattr(self, name):g}"
            for name in _NOT_NEGATIVE
            if getattr(self, name) < 0
        ]
        problems += [
            f"{_flag(name)} must be at most {most}, got {value}"
            for name, most in _AT_MOST
            if (value := getattr(self, name)) is not None and value > most
        ]
        return problems + self._contradictions()

    def _contradictions(self) -> list[str]:
        problems: list[str] = []
        if self.num_blocks is not None and self.kv_cache_gib is not None:
            problems.append("--num-blocks and --kv-cache-gib exclude each other: give one")
        no_meaning = _TORCH_ONLY if self.engine == "sim" else _SIM_ONLY
        problems += [
            f"{_flag(name)} has no meaning with --engine {self.engine}"
            for name in self._changed(no_meaning)
        ]
        if self.engine == "sim":
            problems += self._too_large_for_sim()
        if self.deterministic and (self.dtype == "bfloat16" or self.device == "cuda"):
            problems.append("--deterministic works in float32 on a CPU: drop --dtype and --device")
        if self.attention in ("compiled", "triton"):
            wrong = [("--no-compile", not self.compile), ("--deterministic", self.deterministic)]
            problems += [
                f"--attention {self.attention} and {flag} exclude each other: drop one"
                for flag, given in wrong
                if given
            ]
        if self.max_bodies_bytes < self.max_body_bytes:
            problems.append(
                f"--max-bodies-bytes ({self.max_bodies_bytes}) must be at least "
                f"--max-body-bytes ({self.max_body_bytes})"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            problems.append(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least "
                f"--max-num-seqs ({self.max_num_seqs})"
            )
        ports = (self.port, self.kv_events_port, self.kv_events_replay_port)
        fixed = [port for port in ports if port]
        if len(set(fixed)) < len(fixed):
            problems.append("--port, --kv-events-port and --kv-events-replay-port must differ")
        problems += [
            f"{_flag(name)} needs {needed}"
            for given, needed, names in (
                (self.kv_events, "--kv-events", _KV_EVENTS_ONLY),
                (self.prefix_caching, "--prefix-caching", _PREFIX_CACHING_ONLY),
                (self.queue_order == "shortest", "--queue-order shortest", ("ageing",)),
                (self.speculate_ngram, "--speculate-ngram", ("ngram_min_match",)),
            )
            if not given
            for name in self._changed(names)
        ]
        return problems

    def _too_large_for_sim(self) -> list[str]:
        num_blocks = self.num_blocks or SIM_NUM_BLOCKS
        num_tokens = num_blocks * self.block_size
        if (
            num_blocks > MAX_NUM_BLOCKS
            or self.block_size > MAX_BLOCK_SIZE
            or num_tokens <= SIM_MAX_KV_TOKENS
        ):
            return []
        product = f"--num-blocks ({num_blocks}) times --block-size ({self.block_size})"
        return [f"{product} must be at most {SIM_MAX_KV_TOKENS} tokens with --engine sim"]

    def _changed(self, names: tuple[str, ...]) -> list[str]:
        """Return which of these options do not have their default."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return [name for name in names if getattr(self, name) != defaults[name]]

    @property
    def name(self) -> str:
        """The name clients use for the model."""
        return self.served_model_name or served_model_name(self.model or "")


_POSITIVE: Final = (
    "num_threads",
    "num_blocks",
    "kv_cache_gib",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "ngram_min_match",
    "kv_events_buffer",
    "sim_prefill_tokens_per_s",
    "max_body_bytes",
    "max_connections",
    "headers_timeout_s",
    "client_stall_timeout_s",
    "body_timeout_s",
    "tokenizer_threads",
    "max_tokenizing",
)
_NOT_NEGATIVE: Final = (
    "max_waiting",
    "ageing",
    "speculate_ngram",
    "pin_quota",
    "sim_attention_s_per_pair",
    "sim_decode_step_s",
    "sim_decode_s_per_seq",
    "tokenizer_cache_bytes",
    "drain_timeout_s",
)
_AT_MOST: Final = (
    ("num_blocks", MAX_NUM_BLOCKS),
    ("kv_cache_gib", MAX_KV_CACHE_GIB),
    ("block_size", MAX_BLOCK_SIZE),
    ("num_threads", MAX_NUM_THREADS),
    ("ageing", MAX_AGEING),
    ("speculate_ngram", MAX_NUM_DRAFTS),
    ("ngram_min_match", MAX_NGRAM),
    ("pin_quota", 1),
)
_TORCH_ONLY: Final = (
    "kv_cache_gib",
    "dtype",
    "kv_dtype",
    "device",
    "attention",
    "compile",
    "cascade",
    "num_threads",
    "deterministic",
)
_SIM_ONLY: Final = (
    "sim_prefill_tokens_per_s",
    "sim_attention_s_per_pair",
    "sim_decode_step_s",
    "sim_decode_s_per_seq",
)
_PREFIX_CACHING_ONLY: Final = ("pin_quota", "force_prefix_misses")
_KV_EVENTS_ONLY: Final = (
    "kv_events_host",
    "kv_events_port",
    "kv_events_replay_port",
    "kv_events_token_ids",
    "kv_events_buffer",
)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
