"""A thousand streams are held at once, each with two tokens a second.

The replicas work like engines: all streams of one get their token in the same step, so that the
router gets hundreds of events at a time.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from loadtests.load_fleet import fleet
from loadtests.open_loop import OpenLoop, Shot, quantile
from loadtests.soak import asking

NUM_STREAMS: Final = 1000
STEP_MS: Final = 500.0
ARRIVE_S: Final = 4.0
AT_MOST: Final = {"streams_broken": 0, "streams_kb_each": 128.0}
AT_LEAST: Final = {"streams_held": NUM_STREAMS, "streams_pace": 0.95}


async def measure(folder: Path, seconds: float) -> dict[str, float | int]:
    """Holds them for so long."""
    num_tokens = max(4, round((ARRIVE_S + seconds) * 1000 / STEP_MS))
    body = b'{"model":"m","stream":true,"max_tokens":%d,"prompt":"stream %d"}'
    shots = [
        Shot(n / NUM_STREAMS * ARRIVE_S, body % (num_tokens, n), path="/v1/completions")
        for n in range(NUM_STREAMS)
    ]
    asked_ms: list[float] = []
    async with fleet(folder, num_replicas=4, slots=512, step_ms=STEP_MS) as servers:
        before_mb, before_s = servers.resident_mb(), servers.cpu_s()
        with asking(servers.url, asked_ms):
            running = asyncio.create_task(OpenLoop(servers.url).run(shots))
            most_mb, most_held = 0.0, 0
            while not running.done():
                await asyncio.wait([running], timeout=STEP_MS / 1000)
                most_mb = max(most_mb, servers.resident_mb())
                most_held = max(most_held, (await servers.count())["num_running"])
            fates = running.result()
        cpu_s = servers.cpu_s() - before_s
    good = [f for f in fates if f.answer.is_good and f.answer.num_events == num_tokens + 1]
    took_s = [fate.ended_s - (fate.first_s or 0.0) for fate in good]
    ideal_s = (num_tokens - 1) * STEP_MS / 1000
    return {
        "streams_held": most_held,
        "streams_broken": len(fates) - len(good),
        "streams_pace": round(ideal_s / max(quantile(took_s, 0.99), ideal_s), 3),
        "streams_router_mb": round(most_mb, 1),
        "streams_kb_each": round((most_mb - before_mb) * 1024 / NUM_STREAMS, 1),
        "streams_cpu_us_per_chunk": round(cpu_s / max(1, len(good) * num_tokens) * 1e6, 1),
        "streams_loop_ms_p99": round(quantile(asked_ms, 0.99), 1),
        "streams_loop_ms_max": round(max(asked_ms, default=0.0), 1),
    }
