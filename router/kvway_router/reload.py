"""Which options a running router takes on, and which need a new start: pure."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Final

import msgspec

from kvway_router.settings import RouterSettings

RELOADABLE: Final = frozenset(
    {
        *("replica", "replica_dns", "log_level"),
        *("max_attempts", "request_timeout_s", "first_token_timeout_s", "token_timeout_s"),
        *("max_queued", "queue_timeout_s", "lame_duck_s", "drain_timeout_s"),
    }
)
"""Options whose new value counts from the next request on; what runs keeps the old one."""


class Reloaded(msgspec.Struct, frozen=True):
    """What became of a changed configuration.

    Attributes:
        changed: Options that have their new value.
        refused: Options that keep their old one, as only a new start can change them.
    """

    changed: list[str]
    refused: list[str]


def reloaded(old: RouterSettings, new: RouterSettings) -> tuple[RouterSettings, Reloaded]:
    """Returns the settings to go on with, and what is new in them.

    Args:
        old: Those that count now.
        new: Those that were read again.
    """
    names = [field.name for field in fields(old)]
    differing = [name for name in names if getattr(old, name) != getattr(new, name)]
    changed = [name for name in differing if name in RELOADABLE]
    refused = [name for name in differing if name not in RELOADABLE]
    settings = replace(old, **{name: getattr(new, name) for name in changed})
    return settings, Reloaded(changed, refused)
