"""`kvway router`: reads the settings and the model's tokenizer, then serves."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from typing import Final

from kvway_core import logs
from kvway_core.cli import Command
from kvway_core.config import load
from kvway_core.lifecycle import run as run_supervised
from kvway_core.models import find_model, served_model_name
from kvway_core.prompts import PromptEncoder
from kvway_router.settings import RouterSettings

SUMMARY: Final = "send each request to the replica that holds most of its prompt"
DESCRIPTION: Final = (
    "Sends each OpenAI request to the replica that already holds the longest part of its prompt, "
    "weighed against how busy each one is, and says why."
)


def run(argv: Sequence[str]) -> int:
    """Runs a router until it is stopped; returns the exit code.

    Raises:
        ConfigError: It cannot start as configured.
    """

    def read() -> RouterSettings:
        return load(
            RouterSettings, argv, env=os.environ, prog="kvway router", description=DESCRIPTION
        ).config

    settings = read()
    if settings.processes > 1 and not settings.share_port:
        logs.setup(settings.log_level)
        from kvway_router.processes import serve_processes

        return run_supervised(
            lambda supervisor: serve_processes(argv, settings, supervisor=supervisor)
        )
    spec = settings.model or ""  # never empty: the settings check it
    encoder = PromptEncoder.load(
        find_model(spec, os.environ),
        library=settings.tokenizer,
        cache_bytes=settings.tokenizer_cache_bytes,
    )
    name = settings.served_model_name or served_model_name(spec)
    logs.setup(settings.log_level)
    from kvway_router.serving import serve  # the web server is not needed for --help

    # What is there now stays: a full collection would go through it, 30 ms of the event loop.
    gc.collect()
    gc.freeze()
    return run_supervised(
        lambda supervisor: serve(
            settings, name=name, encoder=encoder, supervisor=supervisor, reread=read
        )
    )


COMMAND: Final = Command(name="router", summary=SUMMARY, run=run)
