"""Logs: one line per event on stderr, JSON in containers and key=value on a terminal.

Event names are constants in the past tense. Values are escaped, so that one event is one line
whatever a client sent. No prompt text is logged at any level.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from typing import Literal, TextIO, cast

import structlog
from typing_extensions import override

Level = Literal["debug", "info", "warning", "error"]
LEVELS: tuple[Level, ...] = ("debug", "info", "warning", "error")
Format = Literal["auto", "json", "text"]
FORMATS: tuple[Format, ...] = ("auto", "json", "text")


def setup(level: str = "info", *, json: bool | Literal["auto"] = "auto") -> None:
    """Sets logging up for the whole process; call it once, at start.

    What libraries log through the standard library comes out in the same form, from warnings on. A
    line that cannot be written, because the disk is full or nobody reads the pipe any more, is
    lost: a program that serves goes on without its log.

    Args:
        level: One of `LEVELS`; less severe events cost almost nothing.
        json: True for JSON, False for text, "auto" for text on a terminal and JSON elsewhere.

    Raises:
        ValueError: If the level is unknown.
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}, got {level!r}")
    as_json = not sys.stderr.isatty() if json == "auto" else json
    stderr = cast("TextIO", _Stderr())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    rendering: list[structlog.typing.Processor]
    if as_json:
        # A traceback without the local variables of its frames: prompts are among them.
        tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        rendering = [
            structlog.processors.ExceptionRenderer(tracebacks),
            structlog.processors.JSONRenderer(),
        ]
    else:
        rendering = [
            _escape_event,
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(),
                repr_native_str=True,
                exception_formatter=structlog.dev.plain_traceback,
            ),
        ]
    structlog.configure(
        processors=[*shared, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=stderr),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)


class _Stderr(io.TextIOBase):
    """The process's stderr, to which writing never fails."""

    @override
    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            return sys.stderr.write(text)
        return len(text)

    @override
    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


def _escape_event(
    _logger: object, _method: str, event_dict: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Escapes line breaks and terminal codes in the event, which libraries put anything into."""
    event = str(event_dict["event"])
    if not event.isprintable():
        event_dict["event"] = repr(event)[1:-1]
    return event_dict
