"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
import pytest

from kvway_core.testing.byte_model import write_byte_model
from tests.e2e.harness import Cluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a real byte-level tokenizer and a ChatML template."""
    return write_byte_model(tmp_path_factory.mktemp("byte-model"))


@pytest.fixture
async def cluster(tmp_path: Path, byte_model: Path) -> AsyncIterator[Cluster]:
    """Start processes through it; whatever still runs at the end is killed."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=40)) as http:
        cluster = Cluster(tmp_path, byte_model, http)
        try:
            yield cluster
        finally:
            await cluster.close()
