"""What tests of the worker share: the default model, loaded once for all of them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from aiohttp import web_app

if TYPE_CHECKING:  # torch takes seconds to import, and most of these tests need none
    from kvway_worker.torch_engine import TorchEngine


@pytest.fixture(scope="module", autouse=True)
def nothing_left_over() -> Iterator[None]:
    """Lets go of workers and engines after each file: aiohttp remembers every application.

    What is left are circles of some megabytes each, which Python would leave until a quarter of
    all that torch consists of has come anew.
    """
    yield
    web_app._cached_build_middleware.cache_clear()
    gc.collect()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Returns the folder of the default model, fetched as a user would."""
    from kvway_worker.fetch import DEFAULT_MODEL, resolve_model

    return resolve_model(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def smollm2_engine(smollm2: Path) -> TorchEngine:
    """Returns an engine of it in float32 that attends plainly; whoever uses it makes a pool."""
    from kvway_worker.torch_engine import TorchEngine

    return TorchEngine(smollm2, dtype="float32", device="cpu", num_blocks=512)
