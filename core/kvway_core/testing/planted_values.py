"""Values that applications put into prompts, another one each time: seeded, in many spellings."""

from __future__ import annotations

import random
import string
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from email.utils import format_datetime
from typing import Final

from kvway_core.testing.planted_texts import TextMaker

_START: Final = datetime(2026, 3, 2, 8, 0, tzinfo=UTC)
_BASE62: Final = string.ascii_letters + string.digits
_BASE32: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_HEX: Final = "0123456789abcdef"

Value = Callable[[], str]
"""Makes the next value of a case; all of one case are spelt alike."""


def value_maker(kind: str, rng: random.Random, texts: TextMaker) -> tuple[Value, str]:
    """Returns what makes the values of one case, and the text around them with ``{v}`` in it.

    Args:
        kind: One of `LABELS`.
        rng: Where chance comes from.
        texts: Makes names.
    """
    return _MAKERS[kind](rng, texts), rng.choice(LABELS[kind])


def user_header(rng: random.Random, texts: TextMaker) -> Callable[[], str]:
    """Returns what makes headers that describe one user each, all in one layout."""
    layout = rng.randrange(4)
    fields = rng.sample(("plan", "locale", "city", "member_since", "role", "timezone"), 3)

    def make() -> str:
        name = texts.person()
        first = name.split()[0].lower()
        host = rng.choice(("mail", "post", "inbox"))
        email = f"{first}.{rng.randrange(10, 999)}@{host}.example"
        facts = {"name": name, "email": email}
        choices = {
            "plan": ("free", "pro", "team", "enterprise"),
            "locale": ("en-GB", "de-DE", "fr-CA", "pt-BR", "sv-SE"),
            "city": ("Lisbon", "Leeds", "São Paulo", "Uppsala", "Graz", "Toronto"),
            "member_since": tuple(str(year) for year in range(2012, 2026)),
            "role": ("admin", "editor", "viewer", "billing contact"),
            "timezone": ("Europe/Berlin", "America/Toronto", "Asia/Tokyo", "UTC"),
        }
        facts |= {field: rng.choice(choices[field]) for field in fields}
        if layout == 0:
            return "\n".join(f"{_title(key)}: {value}" for key, value in facts.items())
        if layout == 1:
            rows = "".join(f"  <{key}>{value}</{key}>\n" for key, value in facts.items())
            return f"<user>\n{rows}</user>"
        if layout == 2:
            return "User profile\n" + "\n".join(f"- {k} = {v}" for k, v in facts.items())
        return " | ".join(f"{_title(key)}: {value}" for key, value in facts.items())

    return make


def _title(key: str) -> str:
    return key.replace("_", " ").capitalize()


def _timestamps(rng: random.Random, _texts: TextMaker) -> Value:
    now = _START + timedelta(days=rng.randrange(400), seconds=rng.randrange(86_400))
    zone = timezone(timedelta(hours=rng.randrange(-8, 9)))

    def with_zone(time: datetime) -> str:
        return time.astimezone(zone).isoformat(timespec="microseconds")

    spellings: tuple[Callable[[datetime], str], ...] = (
        lambda t: t.strftime("%Y-%m-%dT%H:%M:%SZ"),
        lambda t: t.strftime("%Y-%m-%d %H:%M:%S"),
        lambda t: t.strftime("%Y-%m-%d %H:%M"),
        with_zone,
        lambda t: t.isoformat(timespec="milliseconds"),
        lambda t: str(format_datetime(t)),
        lambda t: t.strftime("%A, %B %d, %Y at %I:%M %p"),
        lambda t: t.strftime("%d %b %Y %H:%M:%S UTC"),
        lambda t: t.strftime("%H:%M:%S"),
    )
    spell = rng.choice(spellings)
    longest_s = rng.choice((90, 1_200, 40_000))

    def make() -> str:
        nonlocal now
        now += timedelta(
            seconds=rng.randint(61, 61 + longest_s), microseconds=rng.randrange(10**6)
        )
        return spell(now)

    return make


def _epochs(rng: random.Random, _texts: TextMaker) -> Value:
    now = _START.timestamp() + rng.randrange(30_000_000)
    spellings: tuple[Callable[[float], str], ...] = (
        lambda t: str(int(t)),
        lambda t: str(int(t * 1000)),
        lambda t: f"{t:.3f}",
        lambda t: f"{t:.6f}",
    )
    spell = rng.choice(spellings)

    def make() -> str:
        nonlocal now
        now += rng.uniform(1, 900)
        return spell(now)

    return make


def _dates(rng: random.Random, _texts: TextMaker) -> Value:
    spell = rng.choice(
        ("%Y-%m-%d", "%d/%m/%Y", "%B %d, %Y", "%d %b %Y", "%A, %d %B %Y", "%Y/%m/%d")
    )
    return lambda: (_START + timedelta(days=rng.randrange(700))).strftime(spell)


def _uuids(rng: random.Random, _texts: TextMaker) -> Value:
    spell = rng.choice((str.lower, str.lower, str.upper, "urn:uuid:{}".format))
    return lambda: spell(str(uuid.UUID(int=rng.getrandbits(128), version=4)))


def _opaque_ids(rng: random.Random, _texts: TextMaker) -> Value:
    prefix = rng.choice(("", "", "req_", "sess-", "run-", "trace:", "0x"))
    alphabet, length = rng.choice(
        (
            (_HEX, 8),
            (_HEX, 16),
            (_HEX, 32),
            (_HEX, 40),
            (_BASE62, 22),
            (_BASE62, 16),
            (_BASE32, 26),
        )
    )
    return lambda: prefix + "".join(rng.choices(alphabet, k=length))


def _numeric_ids(rng: random.Random, _texts: TextMaker) -> Value:
    prefix = rng.choice(("", "", "#", "C-", "acct/"))
    length = rng.choice((6, 7, 8, 9, 12))
    return lambda: prefix + str(rng.randrange(10 ** (length - 1), 10**length))


def _names(rng: random.Random, texts: TextMaker) -> Value:
    return rng.choice((texts.person, lambda: texts.person().split()[0], texts.company))


def _numbers(rng: random.Random, _texts: TextMaker) -> Value:
    return rng.choice(
        (
            lambda: str(rng.randrange(2, 900)),
            lambda: f"{rng.uniform(0, 100):.1f}",
            lambda: f"{rng.randrange(1, 100)}%",
            lambda: f"${rng.randrange(1, 90)},{rng.randrange(100, 999)}.{rng.randrange(10, 99)}",
            lambda: f"{rng.uniform(-20, 40):.1f} °C",
        )
    )


_MAKERS: Final[dict[str, Callable[[random.Random, TextMaker], Value]]] = {
    "timestamp": _timestamps,
    "epoch": _epochs,
    "date": _dates,
    "uuid": _uuids,
    "opaque_id": _opaque_ids,
    "numeric_id": _numeric_ids,
    "name": _names,
    "number": _numbers,
}

_ID_LABELS: Final = (
    *("Request id: {v}", "Session {v} has started.", "<session id='{v}'/>", "[trace {v}]"),
    *('{{"conversation": "{v}"}}', "correlation_id={v}", "Ticket {v} is open.", "(ref. {v})"),
)
LABELS: Final[dict[str, tuple[str, ...]]] = {
    "timestamp": (
        *("Current time: {v}", "It is now {v}.", "<now>{v}</now>", "[{v}]", "Generated at {v}."),
        *('{{"now": "{v}"}}', "The clock says {v}, local time.", "# {v}"),
    ),
    "epoch": (
        *("timestamp={v}", '{{"ts": {v}}}', "Server time (epoch): {v}", "[{v}]", "now: {v}"),
        *("<clock>{v}</clock>", "Prompt rendered at {v}."),
    ),
    "date": (
        *("Today is {v}.", "Date: {v}", "<date>{v}</date>", '{{"as_of": "{v}"}}', "As of {v}:"),
        *("The travel date is {v}.", "Report for {v}"),
    ),
    "uuid": _ID_LABELS,
    "opaque_id": _ID_LABELS,
    "numeric_id": _ID_LABELS,
    "name": (
        *("You are talking to {v}.", "User: {v}", "<customer>{v}</customer>", '{{"user": "{v}"}}'),
        *("Answer on behalf of {v} and sign with that name.", "Hello, this is {v}."),
    ),
    "number": (
        *(
            "Unread messages: {v}",
            "The user has {v} left.",
            "<budget>{v}</budget>",
            "Load is {v}.",
        ),
        *('{{"score": "{v}"}}', "Current reading: {v}; the limit is fixed."),
    ),
}
"""Text around a value, by kind."""
