"""From a request body to what the router must know about it: pure CPU work, for threads.

`Reading` reads one request, its prompt from the front and no further than it is asked to.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

import msgspec
import xxhash

from kvway_core.api import ChatRequest, CompletionRequest, parse_chat, parse_completion
from kvway_core.blocks import Namespace
from kvway_core.errors import ContextLengthExceeded, ModelNotFound
from kvway_core.prompting import PromptReader, read_prompts
from kvway_core.prompts import PromptEncoder
from kvway_core.strict_json import top_level_fields
from kvway_router.chains import ChainCache, EventChain

_SALT: Final = "cache_salt"
"""Field of a body that never reaches a replica: who shares a cache is not the client's choice."""

STICKY_HEADER: Final = "x-kvway-sticky"
"""Requests with the same value go to the same of otherwise equal replicas."""

EXPECTED_OUTPUT_TOKENS: Final = 256
"""Longest answer that the choice reckons with: clients allow far more than most answers take."""

KEY_BLOCKS: Final = 8
"""Blocks that name a prompt's beginning. One alone is a chat template's words, which all share."""

FIRST_STEP_CHARS: Final = 1024
"""New text of a prompt that is read before anybody is asked whether they hold it."""

_LIKE_OBJECT: Final = re.compile(rb"[\s\x00\xef\xbb\xbf\xff\xfe]*+\{")
"""How an object begins, also in an encoding or behind a mark that some parsers take."""

_DOUBT: Final = 1.5
"""A prompt whose length is estimated may be so much longer."""

_SLICE_CHARS: Final = 16 * 1024
"""New text that is read before it is asked whether the time is up."""


OPAQUE_BYTES_PER_TOKEN: Final = 4
OPAQUE_TOKENS: Final = 512
"""Most work that a request counts for whose body is not read: it may be a sound or a picture."""


class Route(Enum):
    """Where requests come in; the value of those that generate is their path.

    What comes to any other path below ``/v1`` is `OPAQUE`: its body is passed on and not looked
    at, so replicas are weighed for it by their load alone.
    """

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    OPAQUE = "/v1/*"


GENERATING: Final = (Route.CHAT, Route.COMPLETIONS)
"""The routes whose prompts are read."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """What routing needs of a request.

    Attributes:
        model: Served model name.
        stream: Whether the client asked for an event stream.
        num_prompts: Prompts in the request; all but the first count as work only. 0 of one whose
            body is not read.
        num_tokens: Prompt tokens of all prompts together; about so many unless `exact`.
        num_output_tokens: Output to reckon with: what the client allows, within reason.
        hashes: Event hash of each full block of the first prompt, as far as it was read.
        body: The bytes for the replica: the client's own unless it had a salt.
        sticky_key: Digest of what the client wants kept together; empty for nothing.
        exact: Whether all prompts were read to their end.
        text_key: Names the beginning of a first prompt of which nothing was read yet.
    """

    model: str
    stream: bool
    num_prompts: int
    num_tokens: int
    num_output_tokens: int
    hashes: Sequence[int]
    body: bytes
    exact: bool = True
    text_key: bytes = b""
    sticky_key: bytes = b""

    @property
    def sticky(self) -> bool:
        """Whether the client gave a key to keep requests together."""
        return bool(self.sticky_key)

    @property
    def prefix_key(self) -> bytes:
        """Names the first `KEY_BLOCKS` of the first prompt, or all its blocks; empty for none."""
        hashes = self.hashes
        if not hashes:
            return self.text_key
        return hashes[min(KEY_BLOCKS, len(hashes)) - 1].to_bytes(8, "big")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The one model behind this router.

    Attributes:
        name: What clients call it.
        encoder: Its tokenizer and chat template.
        namespace: What its block hashes start from.
        chains: Hashes of the prompts that were read last.
    """

    name: str
    encoder: PromptEncoder
    namespace: Namespace
    chains: ChainCache = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Starts with no prompt known."""
        object.__setattr__(self, "chains", ChainCache(self.namespace))


def read_request(
    body: bytes,
    *,
    route: Route,
    model: ServedModel,
    max_model_len: int | None,
    sticky: str | None = None,
) -> ReadRequest:
    """Decodes, checks, tokenizes and hashes one request, whole.

    Args:
        body: As the client sent it.
        route: Where it was sent.
        model: What this router serves.
        max_model_len: Tokens of prompt and answer together, None when nobody said.
        sticky: Key of the header `STICKY_HEADER`; it counts more than ``prompt_cache_key``.

    Raises:
        InvalidRequest: Anything malformed, with the field's name.
        ModelNotFound: Another model is asked for.
        ContextLengthExceeded: A prompt leaves no room for a single token of an answer.
    """
    reading = Reading(body, route=route, model=model, max_model_len=max_model_len, sticky=sticky)
    reading.finish()
    reading.check_fits()
    return reading.request


def opaque_request(body: bytes, *, model: ServedModel, sticky: str | None) -> ReadRequest:
    """Returns what routing needs of a request whose body is not read: how long it is.

    What looks like a JSON object, to a lenient parser even, must be one: its salt is taken out.

    Raises:
        InvalidRequest: It is not.
    """
    if _LIKE_OBJECT.match(body) and _SALT in top_level_fields(body):
        body = without_salt(body)
    return ReadRequest(
        model=model.name,
        stream=False,
        num_prompts=0,
        num_tokens=max(1, min(OPAQUE_TOKENS, len(body) // OPAQUE_BYTES_PER_TOKEN)),
        num_output_tokens=0,
        hashes=(),
        body=body,
        exact=False,
        sticky_key=sticky_key(sticky),
    )


class Reading:
    """One request whose first prompt is tokenized from the front, step by step.

    `parse`, `advance` and `finish` are for threads, one at a time; `request` is replaced as a
    whole, so the loop may look at it meanwhile.

    Attributes:
        request: What is known. There once `parse` has returned.
        is_parsed: Whether it has.
        front_done: Whether the first prompt was read to its end.
        overdue: Set when its time is up: then `advance` ends soon, and it is routed as it is.
        piece_keys: What names the beginnings of the first prompt, the one that comes next as well.
        parsed: The request as it was decoded; None before `parse`.

    Args:
        body: As for `read_request`, like the other arguments.
        route: Where it was sent.
        model: What this router serves.
        max_model_len: Tokens of prompt and answer together, None when nobody said.
        sticky: Key of the header `STICKY_HEADER`; it counts more than ``prompt_cache_key``.
    """

    request: ReadRequest

    def __init__(
        self,
        body: bytes,
        *,
        route: Route,
        model: ServedModel,
        max_model_len: int | None,
        sticky: str | None = None,
    ) -> None:
        """Does nothing yet."""
        self._body = body
        self._route = route
        self._model = model
        self._max_model_len = max_model_len
        self._sticky = sticky
        self._parse_lock = threading.Lock()
        self._read_lock = threading.Lock()
        self._prompts: Sequence[PromptReader] = ()
        self._chain = EventChain(model.chains)
        self._step_chars = FIRST_STEP_CHARS
        self.is_parsed = False
        self.front_done = False
        self.overdue = False
        self.piece_keys: Sequence[int] = ()
        self.parsed: ChatRequest | CompletionRequest | None = None

    @property
    def done(self) -> bool:
        """Whether all is read."""
        return self.is_parsed and self.request.exact

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt, about so many while it is not read; 0 before `parse`."""
        return max((prompt.num_tokens for prompt in self._prompts), default=0)

    @property
    def prompt_text(self) -> str | None:
        """The first prompt as text; None before `parse`, and if it is given as tokens or cut."""
        return self._prompts[0].text if self._prompts else None

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens of the first prompt, as far as it was read; none before `parse`."""
        return self._prompts[0].token_ids if self._prompts else ()

    @property
    def next_key(self) -> int | None:
        """Names the beginning of the first prompt up to the piece that comes next."""
        return self.piece_keys[-1] if self.piece_keys and not self.front_done else None

    def parse(self) -> None:
        """Decodes and checks the body and renders its prompts; tokenizes nothing.

        Raises:
            InvalidRequest: As `read_request`.
            ModelNotFound: As `read_request`.
            ContextLengthExceeded: A prompt is too long however it is tokenized.
        """
        with self._parse_lock:
            if self.is_parsed:
                return
            if self._route is Route.OPAQUE:
                self.request = opaque_request(self._body, model=self._model, sticky=self._sticky)
                self.front_done = self.is_parsed = True
                return
            chat = self._route is Route.CHAT
            parsed = parse_chat(self._body) if chat else parse_completion(self._body)
            if parsed.model != self._model.name:
                raise ModelNotFound(
                    f"The model is not served here; this server has {self._model.name}.",
                    param="model",
                )
            self._prompts = read_prompts(
                parsed, self._model.encoder, max_model_len=self._max_model_len, with_images=True
            )
            first = self._prompts[0]
            head = first.head.encode(errors="surrogatepass")
            self.request = ReadRequest(
                model=parsed.model,
                stream=bool(parsed.stream),
                num_prompts=len(self._prompts),
                num_tokens=sum(prompt.num_tokens for prompt in self._prompts),
                num_output_tokens=_expected_output(parsed) * len(self._prompts),
                hashes=(),
                body=self._body if parsed.cache_salt is None else without_salt(self._body),
                exact=False,
                text_key=xxhash.xxh3_64_digest(head) if head else b"",
                sticky_key=sticky_key(self._sticky or parsed.prompt_cache_key),
            )
            self.piece_keys = tuple(first.piece_keys)
            self.parsed = parsed
            self.is_parsed = True

    def advance(self) -> None:
        """Reads on: all that is known already, and some text that is not, more at each call.

        Raises:
            InvalidRequest: As `parse`.
            ModelNotFound: As `parse`.
            ContextLengthExceeded: As `read_request`. What may be too long is read on, so that it
                can be said.
        """
        self.parse()
        with self._read_lock:
            left, limit = self._step_chars, self._max_model_len
            self._step_chars *= 2
            for prompt in self._prompts:
                while left > 0 and self._goes_on(prompt):
                    step = min(left, _SLICE_CHARS)
                    left -= step - prompt.advance(step)
                while limit is not None and self._goes_on(prompt):
                    if prompt.num_tokens * _DOUBT < limit:
                        break
                    _ = prompt.advance(_SLICE_CHARS)
            self._publish()
        self.check_fits()

    def finish(self) -> None:
        """Reads all prompts to their end."""
        self.parse()
        with self._read_lock:
            for prompt in self._prompts:
                prompt.finish()
            self._publish()

    def check_fits(self) -> None:
        """Refuses what leaves no room for an answer, as far as that is certain.

        Raises:
            ContextLengthExceeded: As `read_request`.
        """
        limit = self._max_model_len
        longest = max((prompt.num_tokens for prompt in self._prompts if prompt.done), default=0)
        if limit is not None and longest >= limit:
            raise ContextLengthExceeded(
                f"The prompt has {longest} tokens and the model's context has {limit}, "
                "of which the answer needs at least one; shorten the prompt.",
                param="messages" if self._route is Route.CHAT else "prompt",
            )

    def _goes_on(self, prompt: PromptReader) -> bool:
        """Says whether there is more of a prompt, and time for it."""
        return not prompt.done and not self.overdue

    def _publish(self) -> None:
        """Puts what is known by now into `request`."""
        first = self._prompts[0]
        hashed = self._chain.num_tokens
        self._chain.extend(
            first.token_ids[hashed:] if hashed else first.token_ids,
            images=[image for image in first.images if image.place >= hashed],
        )
        begun = first.done or len(first.token_ids) > 0
        self.request = replace(
            self.request,
            num_tokens=sum(prompt.num_tokens for prompt in self._prompts),
            hashes=self._chain.hashes[:],
            exact=all(prompt.done for prompt in self._prompts),
            text_key=b"" if begun else self.request.text_key,
        )
        self.piece_keys = tuple(first.piece_keys)
        self.front_done = first.done


def sticky_key(text: str | None) -> bytes:
    """Returns what stands for a client's key: 8 bytes however long it is, none for no key."""
    return xxhash.xxh3_64_digest(text.encode("utf-8", "surrogatepass")) if text else b""


def _expected_output(request: ChatRequest | CompletionRequest) -> int:
    allowed = request.max_output_tokens
    length = EXPECTED_OUTPUT_TOKENS if allowed is None else min(allowed, EXPECTED_OUTPUT_TOKENS)
    return length * request.num_choices


def without_salt(body: bytes) -> bytes:
    """Returns `body` without the client's salt. What stays keeps its order and its spelling."""
    fields = top_level_fields(body)
    return msgspec.json.encode({key: value for key, value in fields.items() if key != _SALT})
