"""Where n-gram speculation wins: answers that repeat what the prompt says.

The same requests with and without drafts, on one engine, one directly after the other; who goes
first alternates. Beside the prompts to copy from, sampled answers to prompts of random tokens show
what drafts cost where there is nothing to copy. (Greedy ones of a small model repeat themselves.)
Answers are compared: rounding in a step of several tokens may tip a choice between two tokens that
are almost equally likely; nothing else may.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from tqdm import tqdm

from kvway_core.prompts import PromptEncoder
from kvway_worker.engine import Engine
from loadtests.report import Spread
from loadtests.steps import Run, StepLoop

NUM_DRAFTS = 8

NOTES = (
    "The ferry to Holm leaves at 7:40 from pier 3 and takes 55 minutes.",
    "Tickets cost 14 euros, bicycles travel for 4 euros, dogs are free.",
    "In a storm the boats stay in the harbour and the bus 218 drives around the bay.",
    "The museum on the island opens on Tuesday, Thursday and Sunday from 11 to 16.",
    "Groups of more than 12 people write to the harbour office three days before.",
)
NAMES = ("Asta", "Birk", "Cleo", "Dora", "Emil", "Fria", "Gorm", "Hedda")


class Speculation(NamedTuple):
    """Of each pair, with drafts and without.

    Attributes:
        speedup: Tokens per second with drafts, as a multiple of those without.
        tokens_per_s: With drafts.
        plain_tokens_per_s: Without.
        accepted_pct: Of the drafts that were computed, over all pairs.
        differing: Answers of the last pair that are not the same with and without drafts.
    """

    speedup: Spread
    tokens_per_s: Spread
    plain_tokens_per_s: Spread
    accepted_pct: float
    differing: int


def edits(encoder: PromptEncoder) -> list[list[int]]:
    """Return prompts that ask for a text again with a name changed, by showing how it is done."""
    prompts = []
    for old, new in pairwise(NAMES):
        text = "\n".join(f"{line} Ask for {{name}}." for line in NOTES)
        shown = f"{text.format(name=old)}\n---\n{text.format(name=new)}\n---\n"
        prompts.append(encoder.encode_text(shown))
    return prompts


def unrelated(encoder: PromptEncoder, count: int, num_tokens: int) -> list[list[int]]:
    """Return prompts of random tokens, which no answer repeats on purpose."""
    chooser = random.Random(13)
    ids = range(encoder.vocab_size)
    return [chooser.choices(ids, k=num_tokens) for _ in range(count)]


def measure(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    pairs: int,
    max_tokens: int,
    temperature: float = 0.0,
) -> Speculation:
    """Run the pairs; the first one warms up, the cache too, and does not count."""
    plain = StepLoop(engine)
    drafting = StepLoop(engine, options={"num_drafts": NUM_DRAFTS})
    measured: list[tuple[Run, Run]] = []
    for index in tqdm(range(pairs + 1), unit="pair", file=sys.stderr):
        order = (drafting, plain) if index % 2 else (plain, drafting)
        runs = {loop: loop.run(prompts, max_tokens, temperature=temperature) for loop in order}
        measured.append((runs[drafting], runs[plain]))
    last = zip(measured[-1][0].answers, measured[-1][1].answers, strict=True)
    num_tokens = len(prompts) * max_tokens
    counters = drafting.scheduler.counters
    return Speculation(
        speedup=Spread.of([off.total_s / on.total_s for on, off in measured[1:]]),
        tokens_per_s=Spread.of([num_tokens / on.total_s for on, _ in measured[1:]]),
        plain_tokens_per_s=Spread.of([num_tokens / off.total_s for _, off in measured[1:]]),
        accepted_pct=100 * counters.num_accepted / max(1, counters.num_drafts),
        differing=sum(on != off for on, off in last),
    )
