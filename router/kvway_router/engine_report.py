"""What engines without our load report say of themselves: load, capacity, which life.

any of them /metrics            counts of requests, KV in use, when its process started
SGLang      /get_server_info    {"max_total_num_tokens": 64000, "dp_size": 1, ...}
llama.cpp   /props              {"total_slots": 4, "default_generation_settings": {"n_ctx": 4096}}
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import msgspec

from kvway_router.telemetry import Telemetry

_MAX_TOKENS: Final = 10**12


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What an engine says of itself, each None where it does not say.

    Attributes:
        num_tokens: Tokens that its KV cache holds, all data-parallel ranks together.
        started_s: When its process started, Unix time.
        prompt_tokens: Prompt tokens it has taken in; less than before means another life.
        num_running: Requests in its batches.
        num_waiting: Requests in its queues.
        usage: Share of its KV cache that requests hold, 0 to 1.
        lag_s: How old its counts may be when they are read, seconds.
        is_sglang: Whether it is SGLang, as far as it shows.
    """

    num_tokens: int | None = None
    started_s: float | None = None
    prompt_tokens: float | None = None
    num_running: int | None = None
    num_waiting: int | None = None
    usage: float | None = None
    lag_s: float = 0.0
    is_sglang: bool = False

    @property
    def tells_load(self) -> bool:
        """Whether it says how many requests it has."""
        return self.num_running is not None or self.num_waiting is not None

    def is_later_life(self, before: EngineReport) -> bool:
        """Says whether the engine has restarted since it said `before`."""
        if None not in (self.started_s, before.started_s):
            return self.started_s != before.started_s
        now, then = self.prompt_tokens, before.prompt_tokens
        return now is not None and then is not None and now < then

    def after(self, before: EngineReport) -> EngineReport:
        """Returns the same, with what tells its life from `before` where it does not say now."""
        return replace(
            self,
            is_sglang=self.is_sglang or before.is_sglang,
            started_s=before.started_s if self.started_s is None else self.started_s,
            prompt_tokens=(
                before.prompt_tokens if self.prompt_tokens is None else self.prompt_tokens
            ),
        )

    def telemetry(self) -> Telemetry | None:
        """Returns what it says of its load; None if it says nothing of it."""
        if not self.tells_load and self.num_tokens is None:
            return None
        is_known = self.usage is not None and self.num_tokens is not None
        return Telemetry(
            num_running=self.num_running or 0,
            num_waiting=self.num_waiting or 0,
            used_tokens=round((self.usage or 0.0) * (self.num_tokens or 0)) if is_known else None,
            total_tokens=self.num_tokens,
            lag_s=self.lag_s,
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


def read_description(text: bytes) -> int | None:
    """Returns the tokens that llama.cpp's /props or SGLang's /get_server_info tell of."""
    try:
        told = msgspec.json.decode(text, type=_Described)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    slots = told.total_slots * told.default_generation_settings.n_ctx
    return bounded_tokens(slots or told.max_total_num_tokens * told.dp_size)


def bounded_tokens(num_tokens: int) -> int | None:
    """Returns a capacity that one can believe in, None for any other number."""
    return num_tokens if 0 < num_tokens <= _MAX_TOKENS else None
