"""How commands print for a person."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.text import Text

PIPE_WIDTH: Final = 160
"""Columns where the output is no terminal."""


def new_console(*, at_least: int = 0) -> Console:
    """Returns where to print: as wide as the terminal, or wide enough where there is none.

    Args:
        at_least: Columns to print even if the terminal has fewer, which then wraps them.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        return Console(highlight=False, width=PIPE_WIDTH)
    return console if console.width >= at_least else Console(highlight=False, width=at_least)


def plain(text: str, *, style: str = "") -> Text:
    """Returns text of others as it is to be read: neither markup nor anything a terminal obeys."""
    return Text(
        "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text), style
    )
