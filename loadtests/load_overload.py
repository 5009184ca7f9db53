"""Twice as many requests come as the replicas can answer: the rest is refused, and at once.

Before that comes 0.8 of what they can, to compare with, and after it half of it, to see when the
last refusal was. What they can is known: their slots, and the time that an answer takes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from loadtests.load_fleet import fleet
from loadtests.open_loop import Fate, OpenLoop, evenly, quantile

NUM_REPLICAS: Final = 2
SLOTS: Final = 8
STEP_MS: Final = 20.0
NUM_TOKENS: Final = 10
CAPACITY: Final = NUM_REPLICAS * SLOTS / (NUM_TOKENS * STEP_MS / 1000)
"""Requests per second."""
BODY: Final = b'{"model":"m","max_tokens":%d,"prompt":"A question."}' % NUM_TOKENS
_PATH: Final = "/v1/completions"
AT_MOST: Final = {
    "overload_other_endings": 0,
    "overload_refused_ms_p99": 50.0,
    "overload_recovery_s": 5.0,
}
AT_LEAST: Final = {"overload_goodput": 0.9, "overload_refused": 1}


async def measure(folder: Path, seconds: float) -> dict[str, float | int]:
    """Overloads a router for so long."""
    before_s, after_s = seconds / 4, seconds / 2
    shots = [
        *evenly(0.8 * CAPACITY, before_s, BODY, path=_PATH),
        *evenly(2.0 * CAPACITY, seconds, BODY, from_s=before_s, path=_PATH),
        *evenly(0.5 * CAPACITY, after_s, BODY, from_s=before_s + seconds, path=_PATH),
    ]
    async with fleet(folder, num_replicas=NUM_REPLICAS, slots=SLOTS, step_ms=STEP_MS) as servers:
        fates = await OpenLoop(servers.url).run(shots)
    end_s = before_s + seconds
    good = [fate for fate in fates if fate.answer.is_good]
    refused = [fate for fate in fates if is_refusal(fate)]
    # All replicas are busy from soon after the beginning until the end.
    from_s = before_s + seconds / 4
    done = [f for f in good if from_s <= f.shot.at_s + f.ended_s < end_s]
    calm = [fate.ended_s for fate in good if fate.shot.at_s < before_s]
    loaded = [fate.ended_s for fate in good if before_s <= fate.shot.at_s < end_s]
    last_s = max((fate.shot.at_s for fate in refused), default=0.0)
    return {
        "overload_goodput": round(len(done) / (end_s - from_s) / CAPACITY, 3),
        "overload_refused": len(refused),
        "overload_refused_ms_p50": round(quantile([f.ended_s for f in refused], 0.5) * 1e3, 1),
        "overload_refused_ms_p99": round(quantile([f.ended_s for f in refused], 0.99) * 1e3, 1),
        "overload_other_endings": len(fates) - len(good) - len(refused),
        "overload_calm_ms_p99": round(quantile(calm, 0.99) * 1e3, 1),
        "overload_admitted_ms_p99": round(quantile(loaded, 0.99) * 1e3, 1),
        "overload_recovery_s": round(max(0.0, last_s - end_s), 2),
        "overload_client_late_ms_p99": round(quantile([f.late_s for f in fates], 0.99) * 1e3, 1),
    }


def is_refusal(fate: Fate) -> bool:
    """Says whether the server refused a request as it should: 503, a reason, when to come back."""
    answer = fate.answer
    is_told = answer.headers.get("retry-after", "").isdigit() and b'"code"' in answer.error
    return answer.status == 503 and answer.is_complete and is_told
