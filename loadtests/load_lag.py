"""What a body of 10 MB now and then does to 100 streams of 50 tokens a second.

How long the event loop was busy is asked from outside: what /health takes bounds it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from loadtests.load_fleet import fleet
from loadtests.open_loop import OpenLoop, Shot, quantile
from loadtests.soak import asking

NUM_STREAMS: Final = 100
STEP_MS: Final = 20.0
LONG_BYTES: Final = 10 * 1000 * 1000
EVERY_S: Final = 2.0
AT_MOST: Final = {"lag_broken": 0, "lag_loop_ms_p99": 20.0, "lag_loop_ms_max": 100.0}
AT_LEAST: Final = {"lag_refused_bodies": 1}
_PATH: Final = "/v1/completions"


async def measure(folder: Path, seconds: float) -> dict[str, float | int]:
    """Sends both for so long."""
    num_tokens = round(seconds * 1000 / STEP_MS)
    body = b'{"model":"m","stream":true,"max_tokens":%d,"prompt":"stream %d"}'
    streams = [Shot(n * 0.005, body % (num_tokens, n), _PATH) for n in range(NUM_STREAMS)]
    text = b"".join(b"word %07d " % n for n in range(LONG_BYTES // 13))
    long_body = b'{"model":"m","max_tokens":1,"prompt":"%b"}' % text
    longs = [Shot(EVERY_S * (n + 0.5), long_body, _PATH) for n in range(int(seconds / EVERY_S))]
    asked_ms: list[float] = []
    async with fleet(folder, step_ms=STEP_MS) as servers:
        with asking(servers.url, asked_ms):
            fates = await OpenLoop(servers.url).run([*streams, *longs])
    whole = [f for f in fates if f.answer.is_good and f.answer.num_events == num_tokens + 1]
    # Longer than any context here: refused, by its length.
    refused = [f for f in fates if f.answer.status == 400 and b"context_length" in f.answer.error]
    return {
        "lag_streams": len(whole),
        "lag_refused_bodies": len(refused),
        "lag_broken": len(fates) - len(whole) - len(refused),
        "lag_refused_ms_p50": round(quantile([f.ended_s for f in refused], 0.5) * 1000, 1),
        "lag_loop_ms_p50": round(quantile(asked_ms, 0.5), 1),
        "lag_loop_ms_p99": round(quantile(asked_ms, 0.99), 1),
        "lag_loop_ms_max": round(max(asked_ms, default=0.0), 1),
    }
