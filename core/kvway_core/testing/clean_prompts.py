"""Traffic that has no prefix killer: what is shared comes first, or what varies is the content."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from kvway_core.testing.planted_texts import Body, TextMaker, chat_body
from kvway_core.testing.planted_values import user_header, value_maker

_Messages = list[tuple[str, str]]


def single_turns(rng: random.Random, texts: TextMaker, num_requests: int) -> list[Body]:
    """Returns questions to one application, each with the same system prompt before it."""
    system = "\n\n".join(texts.system(rng.randint(5, 10)))
    return [chat_body(("system", system), ("user", texts.question())) for _ in range(num_requests)]


def _chats(rng: random.Random, texts: TextMaker) -> list[Body]:
    """Conversations that only grow, several at once."""
    system = "\n\n".join(texts.system(rng.randint(4, 8)))
    chats: list[_Messages] = [[("system", system)] for _ in range(4)]
    bodies = []
    for _ in range(24):
        chat = rng.choice(chats)
        chat.append(("user", texts.question()))
        bodies.append(chat_body(*chat))
        chat.append(("assistant", texts.answer()))
    return bodies


def _agents(rng: random.Random, texts: TextMaker) -> list[Body]:
    """Tool loops on different tasks that see the same files; instructions follow the task."""
    system = "\n\n".join(texts.system(6))
    tools = [texts.tool() for _ in range(4)]
    instructions = texts.paragraph(12)
    files = [texts.tool_output() for _ in range(4)]
    bodies = []
    for _ in range(6):
        task = f"<task>\n{texts.paragraph(rng.randint(1, 5))}\n</task>\n\n{instructions}"
        messages: _Messages = [("system", system), ("user", task)]
        for step in range(rng.randint(2, 5)):
            bodies.append(chat_body(*messages, tools=tools))
            messages.append(("assistant", f"{texts.sentence()}\n\n```\nls {step}\n```"))
            messages.append(("user", f"Output:\n{rng.choice(files)}"))
    return bodies


def _rollouts(_rng: random.Random, texts: TextMaker) -> list[Body]:
    """The same task tried several times: other answers, often the same outputs."""
    system, task = "\n\n".join(texts.system(5)), texts.paragraph(6)
    outputs = [texts.tool_output() + texts.paragraph(6) for _ in range(4)]
    bodies = []
    for _ in range(7):
        messages: _Messages = [("system", system), ("user", task)]
        for step in range(4):
            bodies.append(chat_body(*messages))
            messages.append(("assistant", texts.paragraph(2)))
            messages.append(("user", f"Output:\n{outputs[step]}"))
    return bodies


def _unrelated_documents(rng: random.Random, texts: TextMaker) -> list[Body]:
    """Retrieval where each question finds other documents; the format is asked for behind them."""
    system = "\n\n".join(texts.system(4))
    reminder = texts.paragraph(8)
    bodies = []
    for _ in range(14):
        documents = [texts.document(rng.randint(3, 8)) for _ in range(3)]
        listed = "\n\n".join(f"[{n}] {t}\n{text}" for n, (t, text) in enumerate(documents, 1))
        user = f"{listed}\n\n{reminder}\n\nQuestion: {texts.question()}"
        bodies.append(chat_body(("system", system), ("user", user)))
    return bodies


def _some_documents_again(rng: random.Random, texts: TextMaker) -> list[Body]:
    """Retrieval from a small library: a document comes back, among others."""
    system = "\n\n".join(texts.system(4))
    library = [texts.document(rng.randint(3, 8)) for _ in range(16)]
    bodies = []
    for _ in range(14):
        found = rng.sample(library, 4)
        listed = "\n\n".join(f"## {title}\n\n{text}" for title, text in found)
        bodies.append(chat_body(("system", system), ("user", f"{listed}\n\n{texts.question()}")))
    return bodies


def _boilerplate(rng: random.Random, texts: TextMaker) -> list[Body]:
    """Two applications whose prompts differ in a name at the front and go on alike."""
    shared = "\n\n".join(texts.system(8))
    names = [texts.company() + " One", texts.company() + " Two"]
    return [
        chat_body(
            ("system", f"You are the assistant of {rng.choice(names)}.\n\n{shared}"),
            ("user", texts.question()),
        )
        for _ in range(20)
    ]


def _fixed_value(rng: random.Random, texts: TextMaker) -> list[Body]:
    """A date, a version and an id near the front that never change."""
    kind = rng.choice(("date", "uuid", "numeric_id", "timestamp"))
    make, label = value_maker(kind, rng, texts)
    system = f"{label.format(v=make())}\n\n" + "\n\n".join(texts.system(8))
    return [chat_body(("system", system), ("user", texts.question())) for _ in range(14)]


def _value_behind(rng: random.Random, texts: TextMaker) -> list[Body]:
    """What varies comes last, as it should: the time, or who asks, in front of the question."""
    system = "\n\n".join(texts.system(8))
    kind = rng.choice(("timestamp", "uuid", "name", "user_header", "number"))
    if kind == "user_header":
        make, label = user_header(rng, texts), "{v}"
    else:
        make, label = value_maker(kind, rng, texts)
    return [
        chat_body(("system", system), ("user", f"{label.format(v=make())}\n\n{texts.question()}"))
        for _ in range(14)
    ]


def _little_behind(rng: random.Random, texts: TextMaker) -> list[Body]:
    """A time at the front of prompts that have hardly anything to share behind it."""
    make, label = value_maker("timestamp", rng, texts)
    role = "Answer briefly."
    return [
        chat_body(("system", f"{label.format(v=make())} {role}"), ("user", texts.question()))
        for _ in range(14)
    ]


def _unrelated(_rng: random.Random, texts: TextMaker) -> list[Body]:
    """Prompts of many people, with nothing in common but the language."""
    return [chat_body(("user", f"{texts.question()}\n\n{texts.paragraph(6)}")) for _ in range(20)]


def _records(rng: random.Random, texts: TextMaker) -> list[Body]:
    """One instruction, then a record to be read: the fields are the content."""
    system = "\n\n".join(texts.system(7))
    header = user_header(rng, texts)
    return [
        chat_body(("system", system), ("user", f"{header()}\nnote: {texts.paragraph(3)}"))
        for _ in range(14)
    ]


def _regenerated(_rng: random.Random, texts: TextMaker) -> list[Body]:
    """Conversations in which a user takes a question back and asks another."""
    system = "\n\n".join(texts.system(6))
    bodies = []
    for _ in range(5):
        messages: _Messages = [("system", system)]
        for _ in range(3):
            bodies.append(chat_body(*messages, ("user", texts.question())))
            messages.append(("user", texts.question()))
            bodies.append(chat_body(*messages))
            messages.append(("assistant", texts.answer()))
    return bodies


def _single(rng: random.Random, texts: TextMaker) -> list[Body]:
    """Questions to one application."""
    return single_turns(rng, texts, 14)


CLEAN: Final[dict[str, Callable[[random.Random, TextMaker], list[Body]]]] = {
    "single_turns": _single,
    "chats": _chats,
    "agents": _agents,
    "rollouts": _rollouts,
    "unrelated_documents": _unrelated_documents,
    "some_documents_again": _some_documents_again,
    "boilerplate": _boilerplate,
    "fixed_value": _fixed_value,
    "value_behind": _value_behind,
    "little_behind": _little_behind,
    "unrelated": _unrelated,
    "records": _records,
    "regenerated": _regenerated,
}
"""Makers of clean traffic, by what it looks like."""
