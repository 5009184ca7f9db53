"""The worker's HTTP application: routes and what stands around them."""

from __future__ import annotations

from aiohttp import web

from kvway_core.openapi import OPENAPI_PATH
from kvway_core.web import new_app
from kvway_worker.api import handlers, pins_api
from kvway_worker.api.running_requests import RUNNING, RunningRequests
from kvway_worker.api.state import WORKER, Worker


def build_app(worker: Worker) -> web.Application:
    """Return the application that serves `worker`."""
    app = new_app()
    app[WORKER] = worker
    app[RUNNING] = RunningRequests()
    app.middlewares.insert(0, handlers.count_errors)
    app.add_routes(
        [
            web.post("/v1/chat/completions", handlers.chat_completions),
            web.post("/v1/completions", handlers.completions),
            web.get("/v1/models", handlers.models),
            web.post("/tokenize", handlers.tokenize),
            web.post("/detokenize", handlers.detokenize),
            web.get("/load", handlers.load),
            web.post("/abort_requests", handlers.abort_requests),
            web.post("/pins", pins_api.create_pin),
            web.get("/pins", pins_api.list_pins),
            web.delete("/pins/{id}", pins_api.delete_pin),
            web.post("/reset_prefix_cache", handlers.reset_prefix_cache),
            web.get("/metrics", handlers.metrics),
            web.get("/health", handlers.health),
            web.get("/ready", handlers.ready),
            web.get(OPENAPI_PATH, handlers.document(worker.settings.name)),
        ]
    )
    return app
