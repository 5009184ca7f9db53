"""How commands print for a person."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.text import Text

PIPE_WIDTH: Final = 160
"""Columns where the output is no terminal."""


def new_console() -> Console:
    """Returns where to print: as wide as the terminal, or wide enough where there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def plain(text: str, *, style: str = "") -> Text:
    """Returns text of others as it is to be read: neither markup nor anything a terminal obeys."""
    return Text(
        "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text), style
    )
