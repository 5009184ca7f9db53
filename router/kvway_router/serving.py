"""Serves a router until the process is asked to stop; SIGHUP has its configuration read again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import structlog

from kvway_core.clock import SystemClock
from kvway_core.errors import ConfigError
from kvway_core.lifecycle import Supervisor, on_hangup, write_ready_file
from kvway_core.prompts import PromptEncoder
from kvway_router.app import Router
from kvway_router.settings import RouterSettings

_log = structlog.get_logger(__name__)


async def serve(
    settings: RouterSettings,
    *,
    name: str,
    encoder: PromptEncoder,
    supervisor: Supervisor,
    reread: Callable[[], RouterSettings],
) -> None:
    """Runs a router until the process is asked to stop.

    Args:
        settings: Its options.
        name: Served model name.
        encoder: Tokenizer and chat template of the model.
        supervisor: Of the process.
        reread: Reads the options again.

    Raises:
        ConfigError: It cannot listen, or the ready file cannot be written.
    """
    router = Router(
        settings,
        name=name,
        encoder=encoder,
        supervisor=supervisor,
        clock=SystemClock(),
        reread=reread,
    )
    async with router:
        addresses = router.addresses
        texts = encoder.texts
        _log.info(
            "tokenizer_chosen",
            library=texts.backend,
            why=texts.backend_why,
            cut_at=texts.cutter.kind,
            not_further=texts.cutter.why or None,
        )
        with on_hangup(partial(_reload, router)):
            if settings.ready_file is not None:
                ready = {"api": addresses.api, "admin": addresses.admin}
                write_ready_file(settings.ready_file, ready)
            _log.info("router_started", model=name, api=addresses.api, admin=addresses.admin)
            await supervisor.wait_for_stop()
            _log.info("drain_started", running=router.dispatcher.running.num_running)
            await router.drain()
        _log.info("drain_finished")


def _reload(router: Router) -> None:
    try:
        router.reload()
    except ConfigError as exc:
        _log.error("reload_failed", problems=exc.problems)
