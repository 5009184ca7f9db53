"""What the admin listener tells of decisions and replicas."""

from __future__ import annotations

import pytest

from tests.router.conftest import Bench


async def test_decisions_are_listed_newest_first(bench: Bench) -> None:
    ids = [(await bench.chat(text))[1]["x-kvway-request-id"] for text in ("a", "b", "c")]
    listed = await bench.get(bench.admin("/admin/decisions?limit=2"))
    assert [decision["id"] for decision in listed["decisions"]] == ids[:0:-1]


@pytest.mark.parametrize("limit", ["0", "-1", "x", "", "1e3", "٣", "9" * 30])
async def test_a_bad_limit_is_refused(bench: Bench, limit: str) -> None:
    url = bench.admin("/admin/decisions")
    async with bench.client.get(url, params={"limit": limit}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "limit"


async def test_an_unknown_decision_is_404(bench: Bench) -> None:
    async with bench.client.get(bench.admin("/admin/decisions/nope")) as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "not_found"


async def test_replicas_show_their_state(bench: Bench) -> None:
    view = await bench.get(bench.admin("/admin/replicas"))
    (replica,) = view["replicas"]
    assert replica["replica_id"] == bench.replica.replica_id
    assert replica["url"] == bench.replica.url
    assert (replica["state"], replica["error"], replica["blocks_total"]) == ("ready", "", 1000)
    assert replica["fed"] is False
    assert view["totals"]["requests"] == 0
