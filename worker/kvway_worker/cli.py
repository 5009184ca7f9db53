"""`kvway worker`: one replica."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Final

from kvway_core import logs
from kvway_core.cli import Command, require
from kvway_core.config import load
from kvway_core.lifecycle import run as run_supervised
from kvway_core.models import find_model
from kvway_worker.settings import WorkerSettings

DESCRIPTION: Final = "Serve one model, with a paged KV cache shared between requests."


def run(argv: Sequence[str]) -> int:
    """Run a worker until SIGTERM; return its exit code.

    Raises:
        ConfigError: The options, the model or the ports are wrong.
    """
    loaded = load(
        WorkerSettings, argv, env=os.environ, prog="kvway worker", description=DESCRIPTION
    )
    settings = loaded.config
    model_dir = find_model(settings.model or "", os.environ)
    if settings.engine == "torch":
        require("worker", "torch", "transformers")
    logs.setup(settings.log_level)
    from kvway_worker.loading import load_for_good
    from kvway_worker.serving import serve

    return run_supervised(partial(serve, settings, model_dir, load=load_for_good))


COMMAND: Final = Command("worker", "serve one model, with prefix caching", run)
