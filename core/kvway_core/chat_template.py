"""A model's chat template: Jinja in the environment that transformers gives it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from typing_extensions import override

from kvway_core.errors import ConfigError, InvalidRequest

_PROBE = "kvway-probe"
_FAULTS_OF_INPUT = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template can raise when it is given messages that it was not written for."""


_MARK = "kvway-continue-here "
"""Put behind the content to go on with; a template that trims contents takes its space away."""

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables of every template, which requests set with fields of their own or not at all."""

_COMMON_KWARGS = frozenset({"enable_thinking", "thinking"})
"""What clients send to every model; it changes nothing where the template has no such mode."""


class ChatTemplate:
    """Renders conversations. The template is sandboxed: it sees the messages and nothing else.

    Attributes:
        takes_parts: Whether a message's content may be a list of parts.
        takes_images: Whether images among them have a place in the text.
        kwargs: Names of the variables that a request may set.
    """

    def __init__(
        self, source: str, *, tool_source: str | None = None, variables: Mapping[str, str]
    ) -> None:
        """Compiles the template.

        Args:
            source: Jinja source.
            tool_source: Template for requests with tools, if it is another one.
            variables: Special tokens by name, e.g. `bos_token`.

        Raises:
            ConfigError: If the source is not Jinja.
        """
        environment = _environment()
        declared: set[str] = set()
        try:
            self._template = environment.from_string(source)
            self._tool_template = environment.from_string(tool_source or source)
            for text in (source, tool_source or source):
                declared |= meta.find_undeclared_variables(environment.parse(text))
        except jinja2.TemplateError as exc:
            raise ConfigError([f"the chat template of the model is broken: {exc}"]) from exc
        self._literal_text = source + (tool_source or "")
        self._variables = dict(variables)
        hidden = _RESERVED.union(variables, environment.globals)
        self.kwargs = frozenset(declared - hidden) | _COMMON_KWARGS
        self.takes_parts = self._probe_parts()
        self.takes_images = self.takes_parts and self._probe_images()

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """Returns the conversation as text.

        Args:
            messages: The conversation.
            tools: What the assistant may call.
            add_generation_prompt: Whether the text ends where the assistant begins to answer, or
                behind the last message.
            kwargs: Values for variables in `self.kwargs`.

        Raises:
            InvalidRequest: If a variable is not one that requests may set, or the template refuses
                the messages. Its reason is given only when it stands in the template word for
                word: no prompt text leaks into it.
        """
        kwargs = kwargs or {}
        if not self.kwargs.issuperset(kwargs):
            raise InvalidRequest(
                "chat_template_kwargs has a name that the model's chat template does not know; it "
                f"may have {', '.join(sorted(self.kwargs))}.",
                param="chat_template_kwargs",
            )
        template = self._template if tools is None else self._tool_template
        try:
            return template.render(
                **kwargs,
                **self._variables,
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except _FAULTS_OF_INPUT as exc:
            reason = str(exc) if isinstance(exc, jinja2.TemplateError) else ""
            known = reason and reason in self._literal_text
            raise InvalidRequest(
                "The chat template of the model refuses these messages"
                + (f": {reason}" if known else "."),
                param="messages",
            ) from exc

    def render_open(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """Returns the conversation as text up to the end of the last message's content.

        The content is rendered with a mark behind it, and the text ends where the mark stands.
        White space before it stays, unless the template trims contents.

        Raises:
            InvalidRequest: As `render`, or if the last message has no text to go on with.
        """
        last = dict(messages[-1])
        content = last.get("content")
        if isinstance(content, str):
            last["content"] = content + _MARK
        elif isinstance(content, list) and content and "text" in content[-1]:
            last["content"] = [*content[:-1], {**content[-1], "text": content[-1]["text"] + _MARK}]
        text = self.render(
            [*messages[:-1], last], tools=tools, add_generation_prompt=False, kwargs=kwargs
        )
        end = text.rfind(_MARK.rstrip())
        if end < 0:
            raise InvalidRequest(
                "The last message cannot be continued: the model's chat template does not show "
                "its content.",
                param="continue_final_message",
            )
        return text[:end] if text.startswith(_MARK, end) else text[:end].rstrip()

    def _probe_parts(self) -> bool:
        """Says whether the template renders a list of one text part as that text."""
        parts = [{"type": "text", "text": _PROBE}]
        try:
            rendered = self.render([{"role": "user", "content": parts}])
        except InvalidRequest:
            return False
        return _PROBE in rendered and "'type'" not in rendered and '"type"' not in rendered

    def _probe_images(self) -> bool:
        """Says whether an image between two texts shows in the text that the template makes."""
        texts = [{"type": "text", "text": mark} for mark in (_PROBE, _PROBE[::-1])]
        try:
            without = self.render([{"role": "user", "content": texts}])
            image: dict[str, object] = {"type": "image"}
            rendered = self.render([{"role": "user", "content": [texts[0], image, texts[1]]}])
        except InvalidRequest:
            return False
        # Not as the list that it is: templates for texts alone may print that.
        return rendered != without and _PROBE in rendered and "'type'" not in rendered


class _GenerationTag(Extension):
    """`{% generation %}`: marks the assistant's words for training; renders what is inside."""

    tags = {"generation"}  # noqa: RUF012 (the base class has it so)

    @override
    def parse(self, parser: Parser) -> nodes.Node:
        """Returns the inner statements in a scope of their own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """Returns the environment that templates of the hub are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    """Raises what a template uses to refuse a conversation."""
    raise jinja2.TemplateError(message)


def _strftime_now(template: str) -> str:
    """Returns the local time as a template wants it: local, because transformers gives that."""
    return datetime.now().astimezone().strftime(template)


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 (the signature templates call)
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Returns a value as JSON, without the escaping for HTML that Jinja's own filter does."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
