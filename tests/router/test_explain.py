"""`kvway explain`: the decision of a real router, as a table."""

from __future__ import annotations

import asyncio
import re

import pytest
from aiohttp import web

from kvway_core.errors import ConfigError
from kvway_core.testing.fake_replica import Answer
from kvway_router.admin_client import DEFAULT_ADMIN, AdminClient
from kvway_router.explain import run
from kvway_router.terminal import plain
from tests.router.conftest import Bench, StartBench

Capture = pytest.CaptureFixture[str]


async def explain(bench: Bench, capsys: Capture, *argv: str) -> tuple[int, str]:
    code = await asyncio.to_thread(run, [*argv, "--admin", bench.admin("")])
    said = capsys.readouterr()
    return code, said.out + said.err


async def test_candidates_terms_and_what_came_are_shown(
    start_bench: StartBench, capsys: Capture
) -> None:
    bench = await start_bench(2)
    for replica in bench.replicas:
        replica.answer = Answer(cached_tokens=32)
    await bench.chat("x" * 400)
    _, headers, _ = await bench.chat("x" * 400, stream=True)
    record = await bench.decision(headers)
    code, text = await explain(bench, capsys, record["id"])
    assert code == 0
    assert record["id"] in text
    assert f"{record['replica_id']}  {record['reason']}: {record['detail']}" in text
    rows = {replica.replica_id: replica for replica in bench.replicas}
    for candidate in record["candidates"]:
        (row,) = (line for line in text.splitlines() if re.search(_row(candidate), line))
        assert row.startswith(">") == (candidate["replica_id"] == record["replica_id"])
        assert candidate["replica_id"] in rows
    assert re.search(r"cached tokens +416 +32$", text, re.MULTILINE)
    ttft = rf"first token +{record['predicted_ttft_s']:.3f} s +{record['ttft_s']:.3f} s"
    assert re.search(ttft, text)
    assert re.search(r"^done, status 200, after \d+\.\d{3} s$", text, re.MULTILINE)


def _row(candidate: dict[str, float]) -> str:
    """What a row has of a candidate, up to the terms that are there only if one is not 0."""
    matched = candidate["matched_blocks"] * 16
    return (
        rf"{candidate['replica_id']} +{matched} +{candidate['uncached_tokens']} "
        rf"+{candidate['queued_s']:.3f} .* {candidate['predicted_ttft_s']:.3f} .*"
        rf"{candidate['cost_s']:.3f} +{candidate['in_flight']} +{candidate['blocks_held']}$"
    )


async def test_without_an_id_the_latest_request_is_shown(bench: Bench, capsys: Capture) -> None:
    assert (await explain(bench, capsys))[0] == 1
    await bench.chat("a")
    _, headers, _ = await bench.chat("b")
    code, text = await explain(bench, capsys)
    assert (code, headers["x-kvway-request-id"] in text) == (0, True)


async def test_every_attempt_is_told_when_one_failed(
    start_bench: StartBench, capsys: Capture
) -> None:
    bench = await start_bench(2)
    bench.replicas[0].answer = bench.replicas[1].answer = Answer(status=503)
    _, headers, _ = await bench.chat("x")
    record = await bench.decision(headers)
    _, text = await explain(bench, capsys, record["id"])
    for number, attempt in enumerate(record["attempts"], start=1):
        line = f"attempt {number}: {attempt['replica_id']}, {attempt['reason']}: "
        assert f"{line}{attempt['error']}" in text
    assert f"{record['finish']}, status {record['status']}" in text


async def test_who_could_not_take_a_request_is_told(bench: Bench, capsys: Capture) -> None:
    bench.router.replicas.set_replicas([])
    _, headers, _ = await bench.chat("x")
    record = await bench.decision(headers)
    _, text = await explain(bench, capsys, headers["x-kvway-request-id"])
    assert f"no replica ({record['reason']})" in text


async def test_a_forgotten_id_and_a_router_that_is_not_there_are_one_line(
    bench: Bench, capsys: Capture
) -> None:
    code, text = await explain(bench, capsys, "no/such id")
    assert code == 1
    assert text == (
        f"kvway: {bench.admin('')} answers 404: No decision of this id is remembered.\n"
    )
    code = await asyncio.to_thread(run, ["x", "--admin", "http://127.0.0.1:1"])
    said = capsys.readouterr()
    assert (code, said.out) == (1, "")
    assert said.err.startswith("kvway: no router's admin listener at http://127.0.0.1:1: ")


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"decisions": 1}'])
async def test_another_server_is_told_from_a_router(body: bytes, capsys: Capture) -> None:
    async def answer(_request: web.Request) -> web.Response:
        return web.Response(body=body)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    try:
        assert await asyncio.to_thread(run, ["--admin", f"http://{host}:{port}"]) == 1
    finally:
        await runner.cleanup()
    assert "is no kvway router of this version" in capsys.readouterr().err


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8081", "ftp://h", "http://", "http://h:x", "http://h/admin"]
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"--admin must be like {DEFAULT_ADMIN}")):
        AdminClient(url)


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/ui", "http://h:1/ui/"])
def test_the_address_of_the_page_will_do(url: str) -> None:
    assert AdminClient(url).url == "http://h:1"


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="--nope"):
        run(["--nope"])


def test_text_of_others_cannot_command_the_terminal() -> None:
    assert (
        plain("[bold]a\x1b[31mb\n").plain
        == "[bold]a\N{REPLACEMENT CHARACTER}[31mb\N{REPLACEMENT CHARACTER}"
    )
