"""Files of requests: what the OpenAI API is sent, as logs, exports and browsers keep it.

* JSON lines of request bodies, bare or under ``body`` (batch files) or ``request`` (logs);
* conversations, of which every answer was a request: ``messages`` that end with the assistant,
  ``conversations`` of ``from`` and ``value``, and exports with a ``mapping`` of messages;
* a HAR, as a browser saves it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvway_core.errors import ConfigError

MAX_FILE_BYTES: Final = 1024**3

_SPEAKERS: Final = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}


class Logged(NamedTuple):
    """One request of a file.

    Attributes:
        ref: Where it is: "line 7", or "item 7" with the number of the turn.
        body: What was posted.
    """

    ref: str
    body: dict[str, Any]


class NotRequest(NamedTuple):
    """What is in a file and is no request."""

    ref: str
    why: str


def read_requests(path: Path) -> Iterator[Logged | NotRequest]:
    """Yields the requests of a file in their order, and what is none.

    Raises:
        ConfigError: It cannot be read, is too long, or is neither JSON nor JSON lines.
    """
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ConfigError([f"{path} has {size} bytes; at most {MAX_FILE_BYTES} are read"])
        with path.open(encoding="utf-8") as lines:
            first = next((line for line in lines if line.strip()), "")
        whole = _json(first)
        if isinstance(whole, dict) and not {"log", "mapping"} & whole.keys():
            yield from _lines(path)
            return
        items = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError([f"{path} cannot be read: {exc.strerror}"]) from exc
    except (ValueError, RecursionError) as exc:
        raise ConfigError([f"{path} is neither JSON nor JSON lines: {exc}"]) from exc
    if isinstance(items, dict) and isinstance(items.get("log"), dict):
        items = items["log"].get("entries")
    for number, item in enumerate(items if isinstance(items, list) else [items], start=1):
        yield from _requests(f"item {number}", item)


def _json(text: str) -> object:
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value


def _lines(path: Path) -> Iterator[Logged | NotRequest]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            item = _json(line)
            if item is None:
                yield NotRequest(f"line {number}", "not JSON")
            else:
                yield from _requests(f"line {number}", item)


def _requests(ref: str, item: object) -> Iterator[Logged | NotRequest]:
    """Yields what one item of a file holds."""
    if not isinstance(item, dict):
        yield NotRequest(ref, "not an object")
        return
    for name in ("body", "request"):
        inner = item.get(name)
        if isinstance(inner, dict):
            posted = inner.get("postData")
            if isinstance(posted, dict):
                inner = _json(str(posted.get("text") or ""))
            yield from _requests(ref, inner)
            return
    messages = _conversation(item)
    if messages is not None:
        yield from _turns(ref, item, messages)
    elif "prompt" in item:
        yield Logged(ref, item)
    else:
        yield NotRequest(ref, "neither messages nor a prompt")


def _conversation(item: dict[str, Any]) -> list[Any] | None:
    """Returns the messages of an item, None if it has none."""
    messages = item.get("messages")
    if isinstance(messages, list) and messages:
        return messages
    said = item.get("conversations")
    if isinstance(said, list) and said:
        return [
            {"role": _SPEAKERS.get(turn["from"], turn["from"]), "content": str(turn.get("value"))}
            for turn in said
            if isinstance(turn, dict) and isinstance(turn.get("from"), str)
        ]
    tree = item.get("mapping")
    return _branch(tree, item.get("current_node")) if isinstance(tree, dict) else None


def _branch(tree: dict[str, Any], node: object) -> list[Any]:
    """Returns the messages from the root of an exported conversation to its last one."""
    if not isinstance(node, str) or node not in tree:
        node = next(reversed(tree), None)
    branch: list[Any] = []
    seen: set[str] = set()
    while isinstance(node, str) and node in tree and node not in seen:
        seen.add(node)
        message = tree[node].get("message") if isinstance(tree[node], dict) else None
        if isinstance(message, dict):
            parts = (message.get("content") or {}).get("parts") or []
            text = "\n".join(part for part in parts if isinstance(part, str))
            role = (message.get("author") or {}).get("role")
            if text and isinstance(role, str):
                branch.append({"role": role, "content": text})
        node = tree[node].get("parent") if isinstance(tree[node], dict) else None
    return branch[::-1]


def _turns(ref: str, item: dict[str, Any], messages: list[Any]) -> Iterator[Logged]:
    """Yields a request, or of a conversation that ends with an answer one for each answer."""
    fields: dict[str, Any] = {name: item[name] for name in ("model", "tools") if name in item}
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    if roles[-1] != "assistant":
        yield Logged(ref, {**fields, "messages": messages})
        return
    for number, role in enumerate(roles):
        if role == "assistant" and number:
            yield Logged(f"{ref}, message {number}", {**fields, "messages": messages[:number]})
