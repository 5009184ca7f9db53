"""Whose fault it was that attempts of one request failed: its replicas', or its own.

One replica that fails a request which another one answers is at fault. When two fail it, the
request may be what breaks them, or all of them are in trouble: neither is held against a replica,
or one bad prompt would make a whole fleet dear and open its breakers one by one.

A failure makes its replica dearer at once, for those that are chosen meanwhile; that is taken back
if it turns out not to be its fault. Breakers hear of it at the end.
"""

from __future__ import annotations

from typing import Self

from kvway_core.errors import ConnectFailed, ReplicaError, ReplicaFailed
from kvway_router.ledger import Ledger
from kvway_router.replicas import ReplicaSet
from kvway_router.retry import is_neutral
from kvway_router.rotation import Outcome


class Blame:
    """The failures of one request. Use it as a context manager around its attempts."""

    def __init__(self, replicas: ReplicaSet, ledger: Ledger) -> None:
        """Nothing has failed."""
        self._replicas = replicas
        self._ledger = ledger
        self._failed: list[tuple[str, float]] = []
        self._answered: tuple[str, Outcome] | None = None

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Tells the breakers."""
        if self._answered is not None:
            self._replicas.record(*self._answered)
        if self._answered is not None or len(self._failed) == 1:
            for failed in self._failed:
                self._replicas.record(failed[0], Outcome.FAILURE)
        else:
            for replica_id, noted_s in self._failed:
                self._ledger.forgive(replica_id, noted_s=noted_s)

    def failed(self, replica_id: str, error: ReplicaError) -> None:
        """An attempt has failed."""
        if self._replicas.get(replica_id) is None:
            return
        if isinstance(error, ConnectFailed):
            return  # it is out of the choice by its state
        if isinstance(error, ReplicaFailed) and error.is_clients:
            return
        self._ledger.failed(replica_id)
        if not is_neutral(error):
            self._failed.append((replica_id, self._ledger.now()))

    def answered(self, replica_id: str, status: int) -> None:
        """A replica has given its whole answer."""
        is_success = 200 <= status < 300
        self._answered = replica_id, Outcome.SUCCESS if is_success else Outcome.NEUTRAL
