"""Ends a piece of work from outside, with an error that says why.

A request may have to end for reasons that its own code does not wait for: the process stops, its
replica freezes, its time is up. Each of them calls `Cut.cut`; the work inside the scope is
cancelled, and the scope raises the error.

A stream has a limit for the time to its next token. `Watch` is that clock: winding it sets a
number, and its one timer looks at the number when it rings, so a token costs no timer.
"""

from __future__ import annotations

import asyncio
import math
from types import TracebackType
from typing import Self

from kvway_core.errors import KvwayError


class Cut:
    """The scope of work that others may end. Use it as an async context manager, once."""

    def __init__(self) -> None:
        """Nobody has asked for its end."""
        self._scope = asyncio.timeout(None)
        self._error: KvwayError | None = None
        self._open = False

    async def __aenter__(self) -> Self:
        """Begins the work."""
        await self._scope.__aenter__()
        self._open = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends it.

        Raises:
            KvwayError: What `cut` was told, if the work was cancelled by it.
        """
        self._open = False
        try:
            await self._scope.__aexit__(kind, exc, traceback)
        except TimeoutError:
            if self._error is None:
                raise
            raise self._error from None

    def cut(self, error: KvwayError) -> None:
        """Ends the work with an error; the first one counts, and none once it has ended."""
        if self._open and self._error is None:
            self._error = error
            self._scope.reschedule(asyncio.get_running_loop().time())


class Watch:
    """A limit for the time to the next sign of life; cuts the work when it is over.

    Use it as a context manager inside the scope of its `Cut`. It starts at rest.
    """

    __slots__ = ("_cut", "_due_s", "_error", "_loop", "_timer")

    def __init__(self, cut: Cut) -> None:
        """Nothing is expected."""
        self._cut = cut
        self._loop = asyncio.get_running_loop()
        self._due_s = math.inf
        self._error: KvwayError | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stops the clock."""
        if self._timer is not None:
            self._timer.cancel()

    def expect(self, within_s: float, error: KvwayError) -> None:
        """Has the work cut with `error` unless this or `rest` is called within so many seconds."""
        self._due_s = self._loop.time() + within_s
        self._error = error
        if self._timer is None:
            self._wind()
        elif self._due_s < self._timer.when():
            self._timer.cancel()
            self._wind()

    def rest(self) -> None:
        """Expects nothing until the next `expect`."""
        self._due_s = math.inf

    def _wind(self) -> None:
        self._timer = self._loop.call_at(self._due_s, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._loop.time() < self._due_s:
            if self._due_s < math.inf:
                self._wind()
        elif self._error is not None:
            self._cut.cut(self._error)
