"""How a request ended, in two letters: who ended it, and where it was then.

    first   O  nobody: the client has it all         second   K  a status below 400
                                                              E  the replica's own error
            B  a bad request                                  R  before its prompt was read
            C  the client left                                Q  before a replica was chosen
            P  a replica failed it, or there was none         W  waiting for content
            L  a limit of the router: too many, too late      D  in its data
            S  the router stopped
            I  an error of the router's

HAProxy ends its log lines with such letters, and they are what one counts when many fail.
"""

from __future__ import annotations

from enum import Enum

from kvway_core.errors import (
    DeadlineExceeded,
    KvwayError,
    NoReplicaAvailable,
    Overloaded,
    QueueTimeout,
    ReplicaError,
    RequestCrashedReplica,
    ShuttingDown,
)


class Where(Enum):
    """How far a request had come."""

    READING = "R"
    QUEUE = "Q"
    WAITING = "W"
    DATA = "D"


def end_of_answer(status: int) -> str:
    """Returns how a request ended whose answer the client has whole."""
    return "OK" if status < 400 else "OE"


def end_by_client(where: Where) -> str:
    """Returns how a request ended whose client left."""
    return "C" + where.value


def end_of_failure(error: KvwayError, where: Where) -> str:
    """Returns how a request ended that an error ended."""
    return _who(error) + where.value


def _who(error: KvwayError) -> str:
    match error:
        case ReplicaError() | NoReplicaAvailable() | RequestCrashedReplica():
            return "P"
        case DeadlineExceeded() | Overloaded() | QueueTimeout():
            return "L"
        case ShuttingDown():
            return "S"
        case _:
            return "B" if error.http_status < 500 else "I"
