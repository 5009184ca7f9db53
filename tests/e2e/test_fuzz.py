"""A short run of what `make fuzz` does for longer."""

from __future__ import annotations

import pytest

from loadtests.fuzz import fuzz
from tests.e2e.harness import Cluster


@pytest.mark.e2e
async def test_junk_is_refused_in_good_form_and_both_programs_live_on(cluster: Cluster) -> None:
    await fuzz(cluster, is_over=lambda: True, num_cases=10, seed_=0)
