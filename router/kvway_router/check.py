"""`kvway check FILE`: what keeps the prompts of a file from sharing; needs no router, no model."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from typing_extensions import override

from kvway_core.blocks import DEFAULT_BLOCK_SIZE
from kvway_core.cli import Command
from kvway_core.errors import ConfigError
from kvway_core.models import find_model
from kvway_core.prompts import PromptEncoder
from kvway_router.check_files import NotRequest, read_requests
from kvway_router.check_prompts import EndlessCache, ModelPrompter, PlainPrompter
from kvway_router.check_report import Checked, render
from kvway_router.prefixes.finder import PrefixFinder

EXIT_OVER: Final = 1
MAX_REQUESTS: Final = 100_000
MAX_BLOCK_SIZE: Final = 4096

SUMMARY: Final = "say what keeps the prompts of a file from sharing, and how to mend it"
DESCRIPTION: Final = (
    "Reads requests and shows which of their prompt tokens an endless prefix cache would hold, "
    "and what stands before those that it could hold and does not: a time, an id, a name, another "
    "order. FILE has JSON lines of requests to the OpenAI API (bare, or under body or request), "
    "conversations, or is a HAR."
)


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """What `kvway check` was asked for."""

    file: Path
    model: str | None
    block_size: int
    fail_over: float | None
    fix_hint: bool
    show_values: bool
    limit: int


class _Parser(argparse.ArgumentParser):
    @override
    def error(self, message: str) -> NoReturn:
        raise ConfigError([f"{message} (see kvway check --help)"])


def run(argv: Sequence[str]) -> int:
    """Prints the report; returns 1 if more could have been shared than `--fail-over` allows.

    Raises:
        ConfigError: The file or an option is not as it must be.
    """
    options = _options(argv)
    checked = check(options)
    sys.stdout.write(render(checked, fix_hint=options.fix_hint, show_values=options.show_values))
    limit = options.fail_over
    if limit is None or checked.avoidable_share <= limit:
        return 0
    sys.stdout.write(
        f"\n{checked.avoidable_share:.1%} of the prompt tokens are avoidable; "
        f"--fail-over allows {limit:.1%}\n"
    )
    return EXIT_OVER


def check(options: CheckOptions) -> Checked:
    """Returns what a file shows.

    Raises:
        ConfigError: It cannot be read, or holds no request.
    """
    prompter = (
        PlainPrompter()
        if options.model is None
        else ModelPrompter(PromptEncoder.load(find_model(options.model, os.environ)))
    )
    cache = EndlessCache(prompter, block_size=options.block_size)
    finder = PrefixFinder(cache.count_tokens)
    checked = Checked(block_size=options.block_size, is_estimated=options.model is None)
    for entry in read_requests(options.file):
        if isinstance(entry, NotRequest):
            checked.skipped.append(f"{entry.ref}: {entry.why}")
            continue
        if len(checked.prompts) >= options.limit:
            checked.is_cut = True
            break
        try:
            prompt = cache.take(entry.ref, entry.body)
        except ValueError as exc:
            checked.skipped.append(f"{entry.ref}: {exc}")
            continue
        checked.prompts.append(prompt)
        checked.losses.append(finder.look(prompt.seen, now_s=0.0).losses)
    if not checked.prompts:
        first = f"; {checked.skipped[0]}" if checked.skipped else ""
        raise ConfigError([f"{options.file} holds no request{first}"])
    checked.findings = finder.findings(now_s=0.0)
    return checked


def _options(argv: Sequence[str]) -> CheckOptions:
    parser = _Parser(prog="kvway check", description=DESCRIPTION)
    parser.add_argument("file", metavar="FILE", type=Path, help="the requests")
    parser.add_argument(
        "--model",
        metavar="PATH_OR_ID",
        help="model folder, or id of a fetched model: its tokenizer counts, its template renders; "
        "without it a token is reckoned to be 4 characters",
    )
    parser.add_argument(
        "--block-size",
        type=int,
        default=DEFAULT_BLOCK_SIZE,
        help="tokens of a KV block (%(default)s)",
    )
    parser.add_argument(
        "--fail-over",
        metavar="SHARE",
        help="exit with 1 if more of the prompt tokens than this, such as 5%%, are avoidable",
    )
    parser.add_argument(
        "--fix-hint", action="store_true", help="show in which order the parts should come"
    )
    parser.add_argument(
        "--show-values", action="store_true", help="show what varies as it is, not its shape"
    )
    parser.add_argument(
        "--limit", type=int, default=MAX_REQUESTS, help="requests that are read (%(default)s)"
    )
    given = parser.parse_args(argv)
    if not 1 <= given.block_size <= MAX_BLOCK_SIZE:
        raise ConfigError([f"--block-size must be 1 to {MAX_BLOCK_SIZE}, got {given.block_size}"])
    if not 1 <= given.limit <= MAX_REQUESTS:
        raise ConfigError([f"--limit must be 1 to {MAX_REQUESTS}, got {given.limit}"])
    fields = {**vars(given), "fail_over": _share(given.fail_over)}
    return CheckOptions(**fields)


def _share(text: str | None) -> float | None:
    """Returns a share given as ``5%`` or ``0.05``.

    Raises:
        ConfigError: It is neither.
    """
    if text is None:
        return None
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise ConfigError([f"--fail-over must be a share such as 5% or 0.05, got {text!r}"])
    return share


COMMAND: Final = Command(name="check", summary=SUMMARY, run=run)
