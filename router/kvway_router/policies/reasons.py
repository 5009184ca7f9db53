"""Why a replica was chosen: the closed set of words in decision records and metrics."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Why a replica was chosen. The first five may come from the policy `cost`."""

    PREFIX = "prefix"
    """No other candidate holds more of the prompt."""
    LEAST_LOADED = "least_loaded"
    """No candidate holds enough of the prompt to matter."""
    SPILL = "spill"
    """Another candidate holds more of the prompt, but waiting for it costs more."""
    ONLY_REPLICA = "only_replica"
    """There was one candidate. Any policy may say so."""
    RETRY = "retry"
    """An earlier attempt at another replica failed. Any policy may say so."""

    ROUND_ROBIN = "round_robin"
    """It was its turn."""
    RANDOM = "random"
    """It was drawn."""
    LEAST_REQUESTS = "least_requests"
    """No candidate has fewer requests."""
    POWER_OF_TWO = "power_of_two"
    """Of two drawn candidates it has fewer requests."""
    LEAST_UNCACHED_WORK = "least_uncached_work"
    """Work before this request and its own are the least."""
    HASH = "hash"
    """The hash of the prompt's beginning points at it."""
    HASH_OVERFLOW = "hash_overflow"
    """The hash points at another one, which has more than its share of requests."""
