"""What tokenizing costs: whole, the next turn of a chat, and a cold prompt on the router's path.

    whole     the model's tokenizer on the whole rendered chat, as every request costs without us
    next      the same chat grown by an answer and a question; what came before is known
    again     the very same chat once more
    front     what a router reads of a cold prompt of 64 KB before it chooses a replica
    rest      what is left of it, off the path

The chats are pieces of Python's own library as messages, in the template of the model; each round
has other text, so nothing is known but what the round itself has made known. Times are processor
time of this thread; ratios are taken within a round, way after way, and their median is shown.
The ids of every way are compared with those of the whole.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from kvway_core.api import ChatMessage
from kvway_core.models import find_model, served_model_name
from kvway_core.prompts import PromptEncoder
from kvway_core.tokenizing import TOKENIZERS
from kvway_router.reading import FIRST_STEP_CHARS
from loadtests.report import Report, Spread, commit, machine, table

DEFAULT_MODEL: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"
SIZES: Final = {"2k": 2048, "8k": 8192, "32k": 32768, "131k": 131072}
COLD_BYTES: Final = 64 * 1024
_MESSAGE_CHARS: Final = 1200
_ANSWER_CHARS: Final = 800


class Round(NamedTuple):
    """Milliseconds of one round at one size, and the tokens of the longer chat."""

    whole: float
    next: float
    again: float
    num_tokens: int


def corpus() -> Iterator[str]:
    """Yields characters of text without end that no two messages share."""
    folder = Path(sysconfig.get_path("stdlib"))
    number = 0
    while True:
        for path in sorted(folder.glob("*.py")):
            yield f"# {number}\n" + path.read_text(encoding="utf-8", errors="ignore")
            number += 1


class Source:
    """Hands out text that was not handed out before."""

    def __init__(self) -> None:
        self._files = corpus()
        self._text = ""

    def take(self, num_chars: int) -> str:
        """Returns so many characters."""
        while len(self._text) < num_chars:
            self._text += next(self._files)
        taken, self._text = self._text[:num_chars], self._text[num_chars:]
        return taken


def chat(source: Source, encoder: PromptEncoder, num_tokens: int) -> list[ChatMessage]:
    """Returns a chat of about so many tokens, its last message from the user."""
    num_chars = num_tokens * encoder.texts.chars_per_token
    messages = [ChatMessage("system", "You read source code. " + source.take(600))]
    while sum(len(str(message.content)) for message in messages) < num_chars:
        role = "assistant" if messages[-1].role == "user" else "user"
        messages.append(ChatMessage(role, source.take(_MESSAGE_CHARS)))
    return messages


def grown(source: Source, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Returns the chat one turn later."""
    answer = ChatMessage("assistant", source.take(_ANSWER_CHARS))
    return [*messages, answer, ChatMessage("user", "And what does that do?")]


def timed(call: Callable[[], object]) -> float:
    """Returns the processor time of a call, in milliseconds."""
    begin = time.thread_time()
    call()
    return (time.thread_time() - begin) * 1e3


def measure(
    encoder: PromptEncoder, reference: PromptEncoder, source: Source, num_tokens: int
) -> Round:
    """Measures one chat and its next turn; rendering is not counted."""
    messages = chat(source, encoder, num_tokens)
    before, after = (encoder.render_chat(m) for m in (messages, grown(source, messages)))
    encoder.texts.read(before).finish()
    next_ms = timed(lambda: encoder.texts.read(after).finish())
    again_ms = timed(lambda: encoder.texts.read(after).finish())
    whole_ms = timed(lambda: whole(reference, after))
    ids = whole(reference, after)
    if encoder.texts.read(after).finish().tolist() != ids:
        raise RuntimeError("the ids are not those of the tokenizer")
    return Round(whole_ms, next_ms, again_ms, len(ids))


def whole(reference: PromptEncoder, text: str) -> list[int]:
    """Returns the ids of a text by the tokenizer itself, nothing cut and nothing known."""
    return list(reference.texts._encode(text))  # noqa: SLF001  what runs behind the cache


def cold(encoder: PromptEncoder, source: Source) -> tuple[float, float]:
    """Measures a prompt that nobody holds: what the path waits for, and the rest."""
    reader = encoder.read_text(source.take(COLD_BYTES), add_special_tokens=False)
    front_ms = timed(lambda: reader.advance(FIRST_STEP_CHARS))
    return front_ms, timed(reader.finish)


def run(model_dir: Path, rounds: int) -> dict[str, float | str]:
    """Measures every library that can be taken, interleaved."""
    reference = PromptEncoder.load(model_dir, library=TOKENIZERS)
    best = PromptEncoder.load(model_dir)
    source = Source()
    found: dict[str, float | str] = {
        "library": best.texts.backend,
        "cut_at": best.texts.cutter.kind,
    }
    rows: list[tuple[str, ...]] = []
    cold(best, source), cold(reference, source)  # the first calls of a library warm it up
    encoders = {TOKENIZERS: reference} | {best.texts.backend: best}
    for size, num_tokens in SIZES.items():
        for library, encoder in encoders.items():
            made = [measure(encoder, reference, source, num_tokens) for _ in range(rounds)]
            speedup = Spread.of([one.whole / one.next for one in made])
            medians = [Spread.of([one[i] for one in made]).median for i in range(4)]
            shown = (f"{ms:.2f}" for ms in medians[:3])
            rows.append((library, size, f"{medians[3]:.0f}", *shown, speedup.text(0)))
            key = f"{library}_{size}"
            found |= {f"whole_ms_{size}": round(medians[0], 2)}
            found |= {f"next_turn_ms_{key}": round(medians[1], 3)}
            found |= speedup.metrics(f"next_turn_speedup_{key}", 1)
    for library, encoder in encoders.items():
        times = [cold(encoder, source) for _ in range(3 * rounds)]
        for name, values in zip(("front", "rest"), zip(*times, strict=True), strict=True):
            found[f"cold_64k_{name}_ms_{library}"] = round(Spread.of(values).median, 2)
    found["next_turn_speedup_32k"] = found[f"next_turn_speedup_{best.texts.backend}_32k"]
    header = ("library", "chat", "tokens", "whole ms", "next ms", "again ms", "whole/next")
    print(table(header, rows))
    for library in encoders:
        front, rest = (found[f"cold_64k_{name}_ms_{library}"] for name in ("front", "rest"))
        print(f"cold 64 KB, {library}: {front} ms on the path, {rest} ms after the choice")
    return found


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write the report if asked to."""
    args = parse(argv)
    model_dir = find_model(args.model, os.environ)
    metrics = run(model_dir, args.rounds)
    metrics["model"] = served_model_name(args.model)
    command = f"make bench-tokenize ARGS={shlex.quote(shlex.join(argv))}"
    result = Report("tokenize", commit(), machine(), command, metrics)
    if args.output is not None:
        args.output.write_text(result.json() + "\n")
    print(result.json())
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(
        prog="make bench-tokenize",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="model folder or id")
    parser.add_argument("--rounds", type=int, default=7, help="rounds, of which the median counts")
    parser.add_argument("--output", type=Path, help="write the JSON report there, too")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
