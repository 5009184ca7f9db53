"""Traffic with one prefix killer planted in it, and traffic without any: seeded, for tests.

    case = planted_case("timestamp", seed=7)
    case.requests    bodies of chat requests, in the order of their arrival
    case.spans       where the planted text is in each of them

A case is one application: a system prompt, often tools or documents, a new question each time.
What varies is put where applications put it. Some cases run beside another application. `CLEAN`
names traffic that shares much and loses nothing that it could keep.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvway_core.testing.clean_prompts import CLEAN, single_turns
from kvway_core.testing.planted_texts import Body, TextMaker, chat_body
from kvway_core.testing.planted_values import LABELS, user_header, value_maker

KINDS: Final = (*LABELS, "user_header", "reordered", "key_order", "whitespace", "history")
"""What can be planted."""


@dataclass(frozen=True, slots=True)
class Span:
    """Where the planted text is: characters of a message's content, or somewhere in the tools."""

    message: int | None
    begin: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True)
class Case:
    """Some requests.

    Attributes:
        name: What it is, with its seed.
        kind: What was planted; None for clean traffic.
        requests: Bodies of chat requests, in order.
        spans: Of each request, where it is; None where nothing is planted.
    """

    name: str
    kind: str | None
    requests: tuple[Body, ...]
    spans: tuple[Span | None, ...]


def planted_cases(num_cases: int, *, first_seed: int = 0) -> list[Case]:
    """Returns so many cases, all kinds in turn, the first one of `first_seed`."""
    return [
        planted_case(KINDS[number % len(KINDS)], seed=first_seed + number)
        for number in range(num_cases)
    ]


def planted_case(kind: str, *, seed: int) -> Case:
    """Returns a case of a kind; the same seed makes the same case."""
    rng = random.Random(f"{kind}/{seed}")
    texts = TextMaker(rng)
    rows = _PLANTERS.get(kind, _plant_value)(kind, rng, texts)
    if rng.random() < 0.3:  # another application, which hits
        rows = _mixed(rng, rows, [(body, None) for body in single_turns(rng, TextMaker(rng), 8)])
    return _case(f"{kind}/{seed}", kind, rows)


def clean_case(name: str, *, seed: int) -> Case:
    """Returns traffic without a prefix killer, of a name in `CLEAN`."""
    rng = random.Random(f"{name}/{seed}")
    bodies = CLEAN[name](rng, TextMaker(rng))
    return _case(f"{name}/{seed}", None, [(body, None) for body in bodies])


Row = tuple[Body, Span | None]


def _case(name: str, kind: str | None, rows: Sequence[Row]) -> Case:
    bodies, spans = zip(*rows, strict=True)
    return Case(name, kind, tuple(bodies), tuple(spans))


def _mixed(rng: random.Random, first: Sequence[Row], second: Sequence[Row]) -> list[Row]:
    """Returns both, each in its order."""
    turns = [True] * len(first) + [False] * len(second)
    rng.shuffle(turns)
    ours, theirs = iter(first), iter(second)
    return [next(ours) if turn else next(theirs) for turn in turns]


def _num_requests(rng: random.Random) -> int:
    return rng.randint(10, 16)


# -- what is planted ----------------------------------------------------------------------------


def _plant_value(kind: str, rng: random.Random, texts: TextMaker) -> list[Row]:
    """A value in the system prompt, or at the head of a user message that goes on with rules."""
    if kind == "user_header":
        value, label = user_header(rng, texts), "{v}"
    else:
        value, label = value_maker(kind, rng, texts)
    paragraphs = texts.system(rng.randint(6, 14))
    tools = [texts.tool() for _ in range(rng.randint(2, 4))] if rng.random() < 0.25 else None
    in_user = rng.random() < 0.25
    at = 0 if in_user else rng.randrange(3)
    joint, before = "\n\n", "".join(f"{paragraph}\n\n" for paragraph in paragraphs[:at])
    behind = "\n\n".join(paragraphs[at:])
    if at < 2 and kind != "user_header" and rng.random() < 0.4:  # within a paragraph
        sentence, _, behind = behind.partition(". ")
        before, joint = f"{before}{sentence}. ", " "
    before_label, after_label = label.format(v="\0").split("\0")
    before += before_label
    rows: list[Row] = []
    for _ in range(_num_requests(rng)):
        planted = value()
        begin = len(before)
        text = before + planted + after_label + joint + behind
        question = texts.question()
        fields = {"tools": tools} if tools else {}
        if in_user:
            system = "You are a careful assistant. Follow the instructions of each task."
            body = chat_body(("system", system), ("user", f"{text}\n\nTask: {question}"), **fields)
        else:
            body = chat_body(("system", text), ("user", question), **fields)
        rows.append((body, Span(1 if in_user else 0, begin, begin + len(planted))))
    return rows


def _plant_reordered(_kind: str, rng: random.Random, texts: TextMaker) -> list[Row]:
    """The same documents, retrieved in another order each time."""
    documents = [texts.document(rng.randint(4, 9)) for _ in range(rng.randint(4, 7))]
    layout = rng.randrange(4)
    in_system = rng.random() < 0.5
    head = "\n\n".join(texts.system(rng.randint(4, 8))) + "\n\nDocuments:\n\n"
    rows: list[Row] = []
    for _ in range(_num_requests(rng)):
        shuffled = rng.sample(documents, len(documents))
        blocks = [_block(layout, n, title, text) for n, (title, text) in enumerate(shuffled, 1)]
        listed, question = "\n\n".join(blocks), texts.question()
        if in_system:
            body = chat_body(("system", head + listed), ("user", question))
            span = Span(0, len(head), len(head) + len(listed))
        else:
            body = chat_body(("system", head), ("user", f"{listed}\n\nQuestion: {question}"))
            span = Span(1, 0, len(listed))
        rows.append((body, span))
    return rows


def _block(layout: int, number: int, title: str, text: str) -> str:
    return (
        f"[{number}] {title}\n{text}",
        f"<document title='{title}'>\n{text}\n</document>",
        f"## {title}\n\n{text}",
        f"Document {number}: {title}. {text}",
    )[layout]


def _plant_key_order(_kind: str, rng: random.Random, texts: TextMaker) -> list[Row]:
    """Tools in another order, or the keys of an object in the system prompt."""
    paragraphs = texts.system(rng.randint(6, 10))
    tools = [texts.tool() for _ in range(rng.randint(4, 7))]
    how = rng.choice(("tools", "properties", "object"))
    facts: dict[str, Any] = {
        f"{word}_{n}": texts.sentence() for n, word in enumerate(("policy", "scope", "region"))
    }
    facts |= {"limit": rng.randrange(100), "verbose": True, "currency": "EUR", "tags": ["a", "b"]}
    rows: list[Row] = []
    for _ in range(_num_requests(rng)):
        if how == "object":
            context = json.dumps(_shuffled(rng, facts), indent=rng.choice((None,)))
            head = f"{paragraphs[0]}\n\nContext: "
            text = f"{head}{context}\n\n" + "\n\n".join(paragraphs[1:])
            body = chat_body(("system", text), ("user", texts.question()))
            rows.append((body, Span(0, len(head), len(head) + len(context))))
            continue
        given = rng.sample(tools, len(tools)) if how == "tools" else [_mix(rng, t) for t in tools]
        text = "\n\n".join(paragraphs)
        rows.append(
            (chat_body(("system", text), ("user", texts.question()), tools=given), Span(None))
        )
    return rows


def _shuffled(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    return {key: fields[key] for key in rng.sample(list(fields), len(fields))}


def _mix(rng: random.Random, tool: dict[str, Any]) -> dict[str, Any]:
    """Returns a tool with its properties in another order."""
    function = dict(tool["function"])
    parameters = dict(function["parameters"])
    parameters["properties"] = _shuffled(rng, parameters["properties"])
    return {"type": "function", "function": {**function, "parameters": parameters}}


def _plant_whitespace(_kind: str, rng: random.Random, texts: TextMaker) -> list[Row]:
    """A system prompt that is put together anew, with other blanks at some of its lines."""
    text = "\n\n".join(texts.system(rng.randint(8, 14)))
    lines = text.split("\n")
    at = rng.randrange(min(3, len(lines)))
    how = rng.choice(("trailing", "indent", "blank_lines", "spaces"))
    rows: list[Row] = []
    for _ in range(_num_requests(rng)):
        given = list(lines)
        num_blanks = rng.randint(0, 24)
        if how == "trailing":
            given[at] += " " * num_blanks
        elif how == "indent":
            given[at:] = [" " * num_blanks + line if line else line for line in given[at:]]
        elif how == "blank_lines":
            given[at] += "\n" * num_blanks
        else:
            words = given[at].split(" ")
            first = rng.randrange(1, 4) if len(words) > 4 else 0
            words[first : first + 1] = [" " * num_blanks + words[first]]
            given[at] = " ".join(words)
        body = chat_body(("system", "\n".join(given)), ("user", texts.question()))
        begin = sum(len(line) + 1 for line in given[:at])
        rows.append((body, Span(0, begin, len("\n".join(given)))))
    return rows


def _plant_history(_kind: str, rng: random.Random, texts: TextMaker) -> list[Row]:
    """Conversations whose history is cut to its last messages, or rewritten, at every turn."""
    how = rng.choice(("truncated", "summarized", "elided"))
    system = "\n\n".join(texts.system(rng.randint(4, 8)))
    chats: list[list[Row]] = []
    for _ in range(3):
        messages: list[tuple[str, str]] = []
        rows: list[Row] = []
        before: list[tuple[str, str]] = []
        for _ in range(rng.randint(6, 9)):
            messages.append(("user", texts.question()))
            given = _rewritten(how, texts, messages)
            pairs = enumerate(zip(before, given, strict=False))
            same = next((n for n, (then, now) in pairs if then != now), None)
            span = None if same is None else Span(1 + same, 0, len(given[same][1]))
            rows.append((chat_body(("system", system), *given), span))
            before = given
            answer = texts.answer() + (" " + texts.tool_output() if how == "elided" else "")
            messages.append(("assistant", answer))
        chats.append(rows)
    mixed = chats[0]
    for chat in chats[1:]:
        mixed = _mixed(rng, mixed, chat)
    return mixed


def _rewritten(
    how: str, texts: TextMaker, messages: Sequence[tuple[str, str]]
) -> list[tuple[str, str]]:
    """Returns what an application sends of a conversation."""
    keep = 5
    if len(messages) <= keep:
        return list(messages)
    old, recent = messages[:-keep], list(messages[-keep:])
    if how == "truncated":
        return recent
    if how == "summarized":
        return [("user", f"Summary of the conversation so far: {texts.paragraph(3)}"), *recent]
    return [
        *((role, text if role == "user" else f"{text[:80]} [... cut]") for role, text in old),
        *recent,
    ]


_PLANTERS: Final[dict[str, Callable[[str, random.Random, TextMaker], list[Row]]]] = {
    "reordered": _plant_reordered,
    "key_order": _plant_key_order,
    "whitespace": _plant_whitespace,
    "history": _plant_history,
}
