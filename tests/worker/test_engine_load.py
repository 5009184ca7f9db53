"""What a worker learns of its own speed."""

from __future__ import annotations

import pytest

from kvway_worker.load import MIN_PREFILL_TOKENS, PREFILL_WINDOW_TOKENS, Rates, StepStats


def decode(duration_s: float) -> StepStats:
    return StepStats(duration_s, num_prefill_tokens=0, num_decode_tokens=4)


def prefill(duration_s: float, num_tokens: int, *, num_decode: int = 0) -> StepStats:
    return StepStats(duration_s, num_tokens, num_decode)


def learned(*steps: StepStats) -> Rates:
    rates = Rates()
    for step in steps:
        rates.observe(step)
    return rates


def test_nothing_is_known_at_first() -> None:
    rates = learned()
    assert (rates.prefill_tokens_per_s, rates.decode_step_s) == (0.0, 0.0)


def test_the_first_step_is_believed_and_later_ones_move_it() -> None:
    assert learned(decode(0.02)).decode_step_s == pytest.approx(0.02)
    assert learned(decode(0.02), decode(0.12)).decode_step_s == pytest.approx(0.03)
    assert learned(decode(1.0), *[decode(0.01)] * 100).decode_step_s == pytest.approx(
        0.01, abs=1e-4
    )


def test_short_prefills_do_not_make_a_worker_look_slow() -> None:
    short = prefill(0.2, MIN_PREFILL_TOKENS - 1)
    assert learned(short).prefill_tokens_per_s == 0.0
    rates = learned(prefill(1.0, 2000), *[short] * 50)
    assert rates.prefill_tokens_per_s == pytest.approx(2000)
    assert rates.decode_step_s == 0.0


def test_prefill_counts_by_tokens() -> None:
    rates = learned(prefill(1.0, 2000), *[prefill(1.0, MIN_PREFILL_TOKENS)] * 2)
    assert rates.prefill_tokens_per_s > 500, "two slow short steps weigh no more than their tokens"


def test_old_prefill_rates_fade() -> None:
    rates = learned(prefill(8.192, 8192), *[prefill(0.8192, 8192)] * 20)
    assert rates.prefill_tokens_per_s == pytest.approx(10_000, rel=0.01)
    half = learned(
        prefill(PREFILL_WINDOW_TOKENS / 1000, PREFILL_WINDOW_TOKENS),
        prefill(PREFILL_WINDOW_TOKENS / 2000, PREFILL_WINDOW_TOKENS),
    )
    assert half.prefill_tokens_per_s == pytest.approx(1500)


def test_decoding_in_the_same_step_is_not_counted_as_prefill() -> None:
    assert learned(
        decode(0.1), prefill(1.1, 1000, num_decode=3)
    ).prefill_tokens_per_s == pytest.approx(1000)
    assert learned(
        decode(0.1), prefill(0.1, 200, num_decode=3)
    ).prefill_tokens_per_s == pytest.approx(4000), "at least half of the step is prefill"


def test_steps_that_take_no_time_have_no_rate() -> None:
    assert learned(prefill(0.0, 1000)).prefill_tokens_per_s == 0.0
