"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.harness import Cluster


@pytest.fixture
async def cluster(tmp_path: Path, byte_model: Path) -> AsyncIterator[Cluster]:
    """Start processes through it; whatever still runs at the end is killed."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=40)) as http:
        cluster = Cluster(tmp_path, byte_model, http)
        try:
            yield cluster
        finally:
            await cluster.close()
