"""`kvway top`: what it shows of a real router, once and live."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pty
import re
import signal
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console, RenderableType

from kvway_core.errors import ConfigError
from kvway_core.testing.fake_replica import Answer
from kvway_router.admin_client import AdminClient
from kvway_router.fleet import FleetView, TokenCounts
from kvway_router.prefixes.watch import PrefixReport
from kvway_router.top import frames, look, run
from kvway_router.top_view import MAX_KILLERS, WIDE, Look, view
from tests.router.conftest import Bench, StartBench
from tests.router.test_prefixes import found, numbered

KVWAY = str(Path(sys.executable).with_name("kvway"))
NUM_TOKENS = 100 + len("|user\n|\n|assistant\n")


def drawn(part: RenderableType, *, width: int = 200) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(part)
    return capture.get()


async def test_once_shows_every_replica_and_the_latest_requests(
    start_bench: StartBench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = await start_bench(2)
    for replica in bench.replicas:
        replica.answer = Answer(cached_tokens=NUM_TOKENS // 2)
    _, headers, _ = await bench.chat("x" * 100)
    argv = ["--once", "--admin", bench.admin("")]
    assert await asyncio.to_thread(run, argv) == 0
    text = capsys.readouterr().out
    assert f"test-model  2 of 2 replicas ready  1 answers  {NUM_TOKENS} prompt tokens" in text
    assert "50% cached, 0% held by some replica" in text
    for replica in bench.replicas:
        assert re.search(rf"^{replica.replica_id} +ready ", text, re.MULTILINE)
    assert headers["x-kvway-request-id"] in text
    assert "\x1b" not in text


async def test_rates_are_since_the_last_look(bench: Bench) -> None:
    bench.replica.answer = Answer(cached_tokens=0)
    client = AdminClient(bench.admin(""))
    await bench.chat("x" * 100)
    before = await asyncio.to_thread(look, client, now_s=lambda: 10.0)
    bench.replica.answer = Answer(cached_tokens=NUM_TOKENS)
    for _ in range(2):
        await bench.chat("x" * 100)
    now = await asyncio.to_thread(look, client, now_s=lambda: 14.0)
    text = drawn(view(before, now, width=WIDE))
    assert f"0.5 answers/s  {2 * NUM_TOKENS / 4:,.0f} prompt tokens/s  100% cached" in text
    assert "67% cached" in drawn(view(None, now, width=WIDE))


async def test_a_narrow_terminal_gets_fewer_columns_and_no_cut_numbers(bench: Bench) -> None:
    _, headers, _ = await bench.chat("x" * 100)
    now = await asyncio.to_thread(look, AdminClient(bench.admin("")))
    narrow = drawn(view(None, now, width=80), width=80)
    assert re.search(rf"^{bench.replica.replica_id} +ready +0 +0.00 s", narrow, re.MULTILINE)
    assert headers["x-kvway-request-id"][:8] in narrow
    assert "\N{HORIZONTAL ELLIPSIS}" not in narrow
    assert "prefill/s" not in narrow
    assert "prefill/s" in drawn(view(None, now, width=WIDE), width=WIDE)


async def test_why_a_replica_is_not_ready_is_told(bench: Bench) -> None:
    now = await asyncio.to_thread(look, AdminClient(bench.admin("")))
    (replica,) = now.fleet.replicas
    ill = msgspec.structs.replace(replica, state="unhealthy", error="connection refused")
    fleet = msgspec.structs.replace(now.fleet, replicas=[ill])
    shown = drawn(view(None, dataclasses.replace(now, fleet=fleet), width=WIDE))
    assert f"{replica.replica_id}: connection refused" in shown


def looked(requests: int, prefixes: PrefixReport | None = None) -> Look:
    totals = TokenCounts(requests=requests)
    fleet = FleetView(model="m", replicas=[], totals=totals)
    return Look(float(requests), fleet, decisions=(), prefixes=prefixes or PrefixReport())


def test_after_a_restart_counting_begins_anew() -> None:
    assert "m  0 of 0 replicas ready  3 answers" in drawn(view(looked(9), looked(3), width=WIDE))


def test_the_most_costly_killers_are_named() -> None:
    findings, _ = found([numbered(1_000_000 + 7919 * number) for number in range(9)])
    text = drawn(view(None, looked(9, PrefixReport(findings=(findings[0],) * 9)), width=WIDE))
    (finding, *_) = findings
    assert text.count(finding.advice[:30]) == MAX_KILLERS
    assert f"{finding.what} {finding.shape}" in text
    assert f"{finding.role}, character {finding.char}, token {finding.token}" in text


async def test_a_router_that_is_gone_leaves_its_last_picture(bench: Bench) -> None:
    client = AdminClient(bench.admin(""))
    shown = frames(client, Console(width=WIDE))
    first = drawn(await asyncio.to_thread(next, shown))
    assert bench.replica.replica_id in first
    client._port = 1  # as if it had left
    second = drawn(await asyncio.to_thread(next, shown))
    assert second.startswith("no router's admin listener")
    assert bench.replica.replica_id in second


def test_once_without_a_router_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--once", "--admin", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.startswith("kvway: no router's admin listener")


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "1e9", "x"])
def test_an_interval_that_is_none_is_refused(interval: str) -> None:
    with pytest.raises(ConfigError, match="--interval-s"):
        run([f"--interval-s={interval}"])


async def test_in_a_terminal_it_runs_until_ctrl_c(bench: Bench) -> None:
    ours, its = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        KVWAY, "top", "--interval-s", "0.1", "--admin", bench.admin(""),
        stdin=its, stdout=its, stderr=its, env=os.environ | {"TERM": "xterm", "COLUMNS": "200"},
    )  # fmt: skip
    os.close(its)
    try:
        seen = b""
        # A second look is there when the router has been asked twice.
        while seen.count(bench.replica.replica_id.encode()) < 2:
            seen += await asyncio.to_thread(os.read, ours, 65_536)
        process.send_signal(signal.SIGINT)
        await asyncio.to_thread(drain, ours)
        assert await process.wait() == 0
    finally:
        os.close(ours)
        if process.returncode is None:
            process.kill()
            await process.wait()


def drain(terminal: int) -> None:
    """Reads until nobody writes any more."""
    while True:
        try:
            if not os.read(terminal, 65_536):
                return
        except OSError:  # what Linux says when the other side is closed
            return
