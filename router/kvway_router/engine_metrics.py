"""The load of other engines, read from their /metrics as it arrives.

engine      running                      waiting                      share of the KV in use
vLLM        vllm:num_requests_running    vllm:num_requests_waiting    vllm:kv_cache_usage_perc
                                                                      vllm:gpu_cache_usage_perc
SGLang      sglang:num_running_reqs      sglang:num_queue_reqs        sglang:token_usage
llama.cpp   llamacpp:requests_processing llamacpp:requests_deferred   llamacpp:kv_cache_usage_ratio

and what the KV cache holds:

vLLM        vllm:cache_config_info{block_size="16",num_gpu_blocks="4000",...} 1
SGLang      sglang:max_total_num_tokens{dp_rank="0",...} 64000

Each data-parallel rank has a series of its own (label ``engine`` or ``dp_rank``); ranks are added.
The series of one rank, of its tensor-parallel ranks and of its priorities beside their sum, tell
parts of the same, so the largest counts. A line that is not understood is no reason not to read
the next one.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from enum import Enum, auto
from typing import Final

from kvway_router.engine_report import EngineReport, bounded_tokens

MAX_LINE_BYTES: Final = 64 * 1024
"""A longer line is skipped."""
_MAX_RANKS: Final = 1024
_MAX_REQUESTS: Final = 10**6
_SGLANG_LAG_S: Final = 30.0
"""SGLang writes its counts with every prefill and every 40 decode steps; idle, twice a minute."""
_LAG_S: Final = 1.0


class _What(Enum):
    """What a sample tells."""

    RUNNING = auto()
    WAITING = auto()
    USAGE = auto()
    CAPACITY = auto()
    STARTED = auto()
    PROMPT_TOKENS = auto()


_NAMES: Final = {
    b"vllm:num_requests_running": _What.RUNNING,
    b"vllm:num_requests_waiting": _What.WAITING,
    b"vllm:kv_cache_usage_perc": _What.USAGE,
    b"vllm:gpu_cache_usage_perc": _What.USAGE,
    b"vllm:cache_config_info": _What.CAPACITY,
    b"vllm:prompt_tokens_total": _What.PROMPT_TOKENS,
    b"sglang:num_running_reqs": _What.RUNNING,
    b"sglang:num_queue_reqs": _What.WAITING,
    b"sglang:token_usage": _What.USAGE,
    b"sglang:max_total_num_tokens": _What.CAPACITY,
    b"sglang:prompt_tokens_total": _What.PROMPT_TOKENS,
    b"llamacpp:requests_processing": _What.RUNNING,
    b"llamacpp:requests_deferred": _What.WAITING,
    b"llamacpp:kv_cache_usage_ratio": _What.USAGE,
    b"llamacpp:prompt_tokens_total": _What.PROMPT_TOKENS,
    b"process_start_time_seconds": _What.STARTED,
}
_NAME_END: Final = re.compile(rb"[ \t{]")
_REST: Final = re.compile(rb'(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?[ \t]+(\S+)')
_LABEL: Final = re.compile(rb'(?<!\w)([a-zA-Z_]\w{0,63})="((?:[^"\\]|\\.)*)"')
"""Begins at the beginning of a word only: whatever a line has, it is read in time linear in it."""


class MetricsReader:
    """Reads a page in the text format of Prometheus, piece by piece.

    Bounded: it keeps the beginning of one line, and a number for each thing and rank.
    """

    def __init__(self) -> None:
        """Has read nothing."""
        self._line = b""
        self._values: dict[_What, dict[bytes, float]] = {what: {} for what in _What}
        self._counters: defaultdict[bytes, float] = defaultdict(float)
        self._is_sglang = False

    def feed(self, piece: bytes) -> None:
        """Reads on."""
        *lines, self._line = (self._line + piece).split(b"\n")
        for line in lines:
            self._read(line)
        if len(self._line) > MAX_LINE_BYTES:
            self._line = b"#"  # what is left of it is a comment

    def report(self) -> EngineReport:
        """Returns what the whole page tells, which ends here."""
        self.feed(b"\n")
        values = self._values
        num_tokens = sum(values[_What.CAPACITY].values())
        return EngineReport(
            num_tokens=bounded_tokens(int(num_tokens)),
            started_s=max(values[_What.STARTED].values(), default=None),
            prompt_tokens=max(self._counters.values(), default=None),
            num_running=_total(values[_What.RUNNING]),
            num_waiting=_total(values[_What.WAITING]),
            usage=_mean(values[_What.USAGE], weights=values[_What.CAPACITY]),
            lag_s=_SGLANG_LAG_S if self._is_sglang else _LAG_S,
            is_sglang=self._is_sglang,
        )

    def _read(self, line: bytes) -> None:
        end = _NAME_END.search(line)
        what = _NAMES.get(line[: end.start()]) if end else None
        found = _REST.match(line, end.start()) if end and what else None
        value = _number(found[2]) if found else None
        if end is None or what is None or found is None or value is None:
            return
        name, labels = line[: end.start()], dict(_LABEL.findall(found[1] or b""))
        if what is _What.PROMPT_TOKENS:
            self._counters[name] += value  # of all ranks and kinds of requests
            return
        if name == b"vllm:cache_config_info":
            value = _vllm_tokens(labels)
        elif what is _What.USAGE:
            value = min(1.0, value)
        elif what in (_What.RUNNING, _What.WAITING):
            value = min(_MAX_REQUESTS, value)
        self._is_sglang |= name.startswith(b"sglang:")
        ranks = self._values[what]
        rank = labels.get(b"engine") or labels.get(b"dp_rank") or b""
        if rank in ranks or len(ranks) < _MAX_RANKS:
            ranks[rank] = max(ranks.get(rank, 0.0), value)


def _total(ranks: Mapping[bytes, float]) -> int | None:
    return int(sum(ranks.values())) if ranks else None


def _mean(ranks: Mapping[bytes, float], *, weights: Mapping[bytes, float]) -> float | None:
    """Returns the mean of ranks; those weigh alike of which a weight is not known."""
    if not ranks:
        return None
    known = {rank: weights.get(rank, 0.0) for rank in ranks}
    if not all(known.values()):
        known = dict.fromkeys(ranks, 1.0)
    return sum(value * known[rank] for rank, value in ranks.items()) / sum(known.values())


def _vllm_tokens(labels: Mapping[bytes, bytes]) -> float:
    """Returns 0 where a label is not a number: until it has started vLLM says "None"."""
    size, num = labels.get(b"block_size", b""), labels.get(b"num_gpu_blocks", b"")
    is_known = size.isdigit() and num.isdigit() and len(size) + len(num) < 16
    return float(int(size) * int(num)) if is_known else 0.0


def _number(text: bytes) -> float | None:
    """Returns a number that is not negative, None for anything else."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
