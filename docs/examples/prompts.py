"""Each rule of docs/prompts.md as code: requests of a small application before it and after it.

    python docs/examples/prompts.py FOLDER      writes before and after of each rule
    kvway check FOLDER/time-before.jsonl        measures one of them

The application answers questions about an online shop. Nothing here talks to a model.
"""

from __future__ import annotations

import datetime as dt
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Body = dict[str, Any]

RULES_TEXT = """You answer customers of Larkspur, a shop for garden tools.
Be friendly and brief. Never promise
a delivery date that the tracking page does not show. Refunds are possible within 30 days;
after that, offer a repair. If a customer is angry, apologize once and then help. Prices
include tax. Do not discuss other shops. When you are not sure, say so and offer to ask a
colleague. Write in the customer's language. Quote the order number when there is one. Never
ask for a password or a card number. If an order is lost, open a case and give its number. Gift
cards cannot be refunded. Tools with a motor carry a warranty of two years, all others of five.
Batteries may not be sent by air. For bulk orders of more than 20 pieces, point to the business
team."""

QUESTIONS = [
    "Where is my order 4711?",
    "Can I return a lawn mower after six weeks?",
    "The handle of my spade broke. What now?",
    "Do you ship batteries to Madeira?",
    "I would like 40 rakes for our school.",
    "My gift card does not work.",
    "Which shears are good for roses?",
    "The parcel was opened when it arrived.",
    "How do I sharpen a scythe?",
    "Please cancel the hose, I found mine.",
]

ARTICLES = {
    "care": "Clean blades after use and oil them before the winter. " * 6,
    "delivery": "Parcels leave the warehouse every weekday at four in the afternoon. " * 6,
    "returns": "Put the form into the parcel and bring it to any post office. " * 6,
    "warranty": "Keep the receipt, and take a picture of what is broken before you write. " * 6,
    "batteries": "Charge a battery fully before it is stored, and never below freezing. " * 6,
}

TOOLS: list[Body] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{what} Use it only when the customer has given what it needs.",
            "parameters": {
                "type": "object",
                "properties": {field: {"type": "string", "description": f"The {field}."}},
                "required": [field],
            },
        },
    }
    for name, what, field in (
        ("track_parcel", "Tells where a parcel is.", "order"),
        ("open_case", "Opens a case for a colleague.", "summary"),
        ("find_article", "Finds a page of the manual.", "topic"),
        ("start_return", "Sends a return form by mail.", "order"),
        ("check_stock", "Tells how many of a tool are left.", "tool"),
    )
]


def chat(*messages: tuple[str, str], **fields: Any) -> Body:
    """Returns a request."""
    said = [{"role": role, "content": content} for role, content in messages]
    return {"model": "larkspur", "messages": said, **fields}


def time_before() -> Iterator[Body]:
    """The time stands in front of everything that never changes."""
    for number, question in enumerate(QUESTIONS):
        yield chat(("system", f"It is {clock(number)}.\n{RULES_TEXT}"), ("user", question))


def time_after() -> Iterator[Body]:
    """It stands in front of the question."""
    for number, question in enumerate(QUESTIONS):
        yield chat(("system", RULES_TEXT), ("user", f"It is {clock(number)}.\n{question}"))


def ids_before() -> Iterator[Body]:
    """An id, which the model has no use for, stands in the prompt."""
    for number, question in enumerate(QUESTIONS):
        yield chat(("system", f"[request {request_id(number)}]\n{RULES_TEXT}"), ("user", question))


def ids_after() -> Iterator[Body]:
    """It is metadata of the request."""
    for number, question in enumerate(QUESTIONS):
        named = {"metadata": {"request": request_id(number)}}
        yield chat(("system", RULES_TEXT), ("user", question), **named)


def users_before() -> Iterator[Body]:
    """Who asks stands in front of what holds for everybody."""
    for number, question in enumerate(QUESTIONS):
        yield chat(("system", f"{profile(number)}\n\n{RULES_TEXT}"), ("user", question))


def users_after() -> Iterator[Body]:
    """What holds for everybody comes first."""
    for number, question in enumerate(QUESTIONS):
        yield chat(("system", RULES_TEXT), ("user", f"{profile(number)}\n\n{question}"))


def order_before() -> Iterator[Body]:
    """The articles come in the order in which the search liked them."""
    names = list(ARTICLES)
    for number, question in enumerate(QUESTIONS):
        ranked = [names[(at * (1 + number % 4) + number) % 5] for at in range(5)]
        yield chat(("system", f"{RULES_TEXT}\n\n{articles(ranked)}"), ("user", question))


def order_after() -> Iterator[Body]:
    """The same articles in one order."""
    for question in QUESTIONS:
        yield chat(("system", f"{RULES_TEXT}\n\n{articles(sorted(ARTICLES))}"), ("user", question))


def keys_before() -> Iterator[Body]:
    """Tools come out of a set, in another order in each process."""
    for number, question in enumerate(QUESTIONS):
        given = [TOOLS[(at * (1 + number % 4) + number) % 5] for at in range(5)]
        yield chat(("system", RULES_TEXT), ("user", question), tools=given)


def keys_after() -> Iterator[Body]:
    """They are sorted."""
    given = sorted(TOOLS, key=lambda tool: str(tool["function"]["name"]))
    for question in QUESTIONS:
        yield chat(("system", RULES_TEXT), ("user", question), tools=given)


def blanks_before() -> Iterator[Body]:
    """A template leaves blanks where it had nothing to write."""
    for number, question in enumerate(QUESTIONS):
        banner = "\n" * (1 + number)
        yield chat(("system", f"Larkspur support{banner}{RULES_TEXT}"), ("user", question))


def blanks_after() -> Iterator[Body]:
    """They are taken out."""
    for question in QUESTIONS:
        yield chat(("system", f"Larkspur support\n{RULES_TEXT}"), ("user", question))


def history_before() -> Iterator[Body]:
    """Each turn keeps the last four messages: its beginning is another one each time."""
    said: list[tuple[str, str]] = []
    for number, question in enumerate(QUESTIONS):
        said.append(("user", question))
        yield chat(("system", RULES_TEXT), *said[-5:])
        said.append(("assistant", answer(number)))


def history_after() -> Iterator[Body]:
    """Turns are appended; when there are twelve messages, all but the last four go at once."""
    said: list[tuple[str, str]] = []
    for number, question in enumerate(QUESTIONS):
        said.append(("user", question))
        if len(said) > 12:
            said = said[-5:]
        yield chat(("system", RULES_TEXT), *said)
        said.append(("assistant", answer(number)))


def clock(number: int) -> str:
    """Returns the time of a request."""
    begin = dt.datetime(2026, 5, 4, 9, 30, tzinfo=dt.UTC)
    return (begin + dt.timedelta(seconds=97 * number)).isoformat()


def request_id(number: int) -> str:
    """Returns what names a request."""
    return f"{(number + 1) * 0x9E3779B97F4A7C15 % 2**64:016x}"


def profile(number: int) -> str:
    """Returns what is known of who asks."""
    name = ("Ada", "Boris", "Carla", "Dinh", "Elif", "Farid", "Gwen", "Hugo", "Ines", "Jan")[
        number
    ]
    place = ("Porto", "Kiel", "Lyon", "Cork", "Graz")[number % 5]
    return f"Name: {name}\nEmail: {name.lower()}@mail.example\nCity: {place}"


def articles(names: list[str]) -> str:
    """Returns articles as text."""
    return "\n\n".join(f"## {name}\n{ARTICLES[name]}" for name in names)


def answer(number: int) -> str:
    """Returns what the shop answered."""
    topic = list(ARTICLES)[number % 5]
    return f"Thank you for question {number + 1}. {ARTICLES[topic][:200]} Can I help you further?"


EXAMPLES: dict[str, tuple[Callable[[], Iterator[Body]], Callable[[], Iterator[Body]]]] = {
    "time": (time_before, time_after),
    "ids": (ids_before, ids_after),
    "users": (users_before, users_after),
    "order": (order_before, order_after),
    "keys": (keys_before, keys_after),
    "blanks": (blanks_before, blanks_after),
    "history": (history_before, history_after),
}
"""Before and after, by rule."""


def write(folder: Path) -> None:
    """Writes the requests of all rules as JSON lines."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, makers in EXAMPLES.items():
        for when, make in zip(("before", "after"), makers, strict=True):
            lines = "".join(json.dumps(body) + "\n" for body in make())
            (folder / f"{name}-{when}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
