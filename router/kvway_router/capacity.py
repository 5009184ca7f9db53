"""What engines without our load report say of themselves: how much their cache holds, which life.

vLLM        /metrics        vllm:cache_config_info{block_size="16",num_gpu_blocks="4000",...} 1
SGLang      /metrics        sglang:max_total_num_tokens{dp_rank="0",...} 64000
            /get_server_info    {"max_total_num_tokens": 64000, "dp_size": 1, ...}
llama.cpp   /props          {"total_slots": 4, "default_generation_settings": {"n_ctx": 4096}}
any of them /metrics        process_start_time_seconds 1.7e9, and counters that only grow
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

_MAX_TOKENS: Final = 10**12
_SAMPLE: Final = re.compile(
    rb"^(vllm:cache_config_info|sglang:max_total_num_tokens|process_start_time_seconds"
    rb"|(?:vllm|sglang|llamacpp):prompt_tokens_total)(?:\{([^\n]*)\})?[ \t]+(\S+)",
    re.MULTILINE,
)
_LABEL: Final = re.compile(rb'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What an engine says of itself, each None where it does not say.

    Attributes:
        num_tokens: Tokens that its KV cache holds, all data-parallel ranks together.
        started_s: When its process started, Unix time.
        prompt_tokens: Prompt tokens it has taken in; less than before means another life.
    """

    num_tokens: int | None = None
    started_s: float | None = None
    prompt_tokens: float | None = None

    def is_later_life(self, before: EngineReport) -> bool:
        """Says whether the engine has restarted since it said `before`."""
        if None not in (self.started_s, before.started_s):
            return self.started_s != before.started_s
        now, then = self.prompt_tokens, before.prompt_tokens
        return now is not None and then is not None and now < then


def read_metrics(text: bytes) -> EngineReport:
    """Reads a page in the text format of Prometheus; what it does not have stays None."""
    vllm: dict[bytes, int] = {}
    sglang: dict[bytes, int] = {}
    counters: defaultdict[bytes, float] = defaultdict(float)
    started_s: float | None = None
    for name, labels_text, value_text in _SAMPLE.findall(text):
        value = _number(value_text)
        if value is None:
            continue
        labels = dict(_LABEL.findall(labels_text))
        if name == b"vllm:cache_config_info":
            vllm[labels.get(b"engine", b"")] = _vllm_tokens(labels)
        elif name == b"sglang:max_total_num_tokens":
            # Ranks of one group hold parts of the same tokens; data-parallel ranks have their own.
            rank = labels.get(b"dp_rank", b"")
            sglang[rank] = max(sglang.get(rank, 0), int(value))
        elif name == b"process_start_time_seconds":
            started_s = value
        else:
            counters[name] += value
    return EngineReport(
        num_tokens=_count(sum(vllm.values()) or sum(sglang.values())),
        started_s=started_s,
        prompt_tokens=max(counters.values(), default=None),
    )


class _GenerationSettings(msgspec.Struct):
    n_ctx: int = 0


class _Described(msgspec.Struct):
    """Fields of /props and of /get_server_info that tell a capacity."""

    total_slots: int = 0
    default_generation_settings: _GenerationSettings = msgspec.field(
        default_factory=_GenerationSettings
    )
    max_total_num_tokens: int = 0
    dp_size: int = 1


def read_description(text: bytes) -> EngineReport:
    """Reads llama.cpp's /props or SGLang's /get_server_info; anything else tells nothing."""
    try:
        told = msgspec.json.decode(text, type=_Described)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return EngineReport()
    slots = told.total_slots * told.default_generation_settings.n_ctx
    return EngineReport(num_tokens=_count(slots or told.max_total_num_tokens * told.dp_size))


def _vllm_tokens(labels: Mapping[bytes, bytes]) -> int:
    """Returns 0 where a label is not a number: until it has started vLLM says "None"."""
    size, num = labels.get(b"block_size", b""), labels.get(b"num_gpu_blocks", b"")
    is_known = size.isdigit() and num.isdigit() and len(size) + len(num) < 16
    return int(size) * int(num) if is_known else 0


def _number(text: bytes) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _count(num_tokens: int) -> int | None:
    return num_tokens if 0 < num_tokens <= _MAX_TOKENS else None
