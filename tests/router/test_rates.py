"""Rates: what is fitted is what was there, and nothing absurd comes of odd samples."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvway_router.rates import ATTENTION_RANGE, MAX_RATE, MIN_RATE, PrefillSample, Rates

ASSUMED = 60_000.0


def sample(num_uncached: int, num_cached: int = 0) -> PrefillSample:
    made = PrefillSample()
    made.add(num_uncached, num_cached, chunk_tokens=2048)
    return made


def takes_s(num_uncached: int, num_cached: int, *, rate: float, attention: float) -> float:
    return num_uncached / rate * (1 + (num_cached + num_uncached / 2) / attention)


def rate_of(rates: Rates) -> float:
    assert rates.prefill_tokens_per_s is not None
    return rates.prefill_tokens_per_s


def attention_of(rates: Rates) -> float:
    assert rates.attention_tokens is not None
    return rates.attention_tokens


def test_one_sample_gives_the_rate_and_keeps_what_was_assumed_of_attention() -> None:
    rates = Rates(attention_tokens=ASSUMED)
    rates.prefilled(sample(4000), takes_s(4000, 0, rate=900, attention=ASSUMED), decoding=False)
    assert rate_of(rates) == pytest.approx(900)
    assert attention_of(rates) == pytest.approx(ASSUMED)


@pytest.mark.parametrize("attention", [6_000.0, 20_000.0, 400_000.0])
def test_contexts_of_many_lengths_show_rate_and_attention(attention: float) -> None:
    """With a tenth of noise in every time."""
    rng = random.Random(3)
    rates = Rates(attention_tokens=ASSUMED)
    for _ in range(200):
        num_uncached, num_cached = rng.randint(200, 30_000), rng.randint(0, 100_000)
        seconds = takes_s(num_uncached, num_cached, rate=5000, attention=attention)
        rates.prefilled(
            sample(num_uncached, num_cached), seconds * rng.uniform(0.9, 1.1), decoding=False
        )
    assert rate_of(rates) == pytest.approx(5000, rel=0.4)
    assert attention_of(rates) == pytest.approx(attention, rel=0.5)
    # What it is for: the time of a prompt unlike the mean of those seen.
    for num_uncached, num_cached in ((500, 0), (500, 90_000), (30_000, 0)):
        real = takes_s(num_uncached, num_cached, rate=5000, attention=attention)
        fitted = takes_s(
            num_uncached, num_cached, rate=rate_of(rates), attention=attention_of(rates)
        )
        assert fitted == pytest.approx(real, rel=0.4)


def test_a_replica_that_slows_down_is_known_as_slow_soon() -> None:
    rates = Rates(attention_tokens=ASSUMED)
    for rate in [4000] * 50 + [1000] * 15:
        seconds = takes_s(2000, 0, rate=rate, attention=ASSUMED)
        rates.prefilled(sample(2000), seconds, decoding=False)
    assert rate_of(rates) == pytest.approx(1000, rel=0.3)


def test_steps_of_answers_beside_it_are_no_prefill() -> None:
    rates = Rates(attention_tokens=1e12)
    rates.gap(0.1)
    rates.prefilled(sample(4096), 2.2, decoding=True)  # two chunks, each with a step of 0.1 s
    assert rate_of(rates) == pytest.approx(4096 / 2.0)
    few = Rates(attention_tokens=1e12)
    few.gap(5.0)
    few.prefilled(sample(4096), 2.2, decoding=True)
    assert rate_of(few) == pytest.approx(4096 / 1.1), "half of the time at least"


def test_what_the_replica_measured_counts_for_as_long_as_it_says_so() -> None:
    rates = Rates(attention_tokens=1e12)
    rates.report(prefill_tokens_per_s=700.0, decode_step_s=0.02)
    rates.prefilled(sample(1000), 1.0, decoding=False)
    assert (rate_of(rates), rates.decode_step_s) == (700.0, 0.02)
    rates.report(prefill_tokens_per_s=0.0, decode_step_s=0.0)
    assert rate_of(rates) == pytest.approx(1000.0)
    assert rates.decode_step_s == 0.02
    rates.report(prefill_tokens_per_s=800.0, decode_step_s=0.0)
    rates.distrust_report()
    assert rate_of(rates) == pytest.approx(1000.0)


@pytest.mark.property
@given(
    st.lists(
        st.tuples(st.integers(1, 10**7), st.integers(0, 10**7), st.floats(1e-9, 1e9)),
        min_size=1,
        max_size=50,
    )
)
def test_whatever_is_seen_the_rates_stay_within_reason(
    seen: list[tuple[int, int, float]],
) -> None:
    rates = Rates(attention_tokens=ASSUMED)
    for num_uncached, num_cached, seconds in seen:
        rates.prefilled(sample(num_uncached, num_cached), seconds, decoding=False)
        if rates.prefill_tokens_per_s is not None:
            assert MIN_RATE <= rates.prefill_tokens_per_s <= MAX_RATE
            assert ASSUMED / ATTENTION_RANGE <= attention_of(rates) <= ASSUMED * ATTENTION_RANGE
