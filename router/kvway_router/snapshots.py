"""What the index held at one moment, as bytes and as a file, for the router that comes next.

A snapshot is an estimate: replicas went on without the router. So it says in which life of a
replica it was taken, and whoever restores it clears a replica that lives another one.

    magic, checksum, msgpack: [version, byte order, [run, ...], {replica: saved}]
    run  = [number of the run before it or -1, hash it waits for or None, packed hashes]
    saved = [boot id, [tier, ...], number of the next batch of KV events or None]
    tier = [number of the run, how many of its blocks, ...]      least recently used first
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated, Final

import msgspec
import xxhash

from kvway_router.runs import HASH_BYTES, unpack

VERSION: Final = 1
_MAGIC: Final = b"kvway-index\n"
_CHECKSUM_BYTES: Final = 8

_Unsigned = Annotated[int, msgspec.Meta(ge=0)]
"""A number that fits 64 bits without a sign: no larger one can be written in msgpack."""


class SavedRun(msgspec.Struct, frozen=True, array_like=True):
    """A run of blocks, once for all who hold it.

    Attributes:
        before: Number of the run that it follows, always a smaller one; -1 for none.
        waits_for: Where there is none: the hash of the block that is missing before it; None for a
            run that starts a prompt.
        hashes: Packed, in the byte order of the machine.
    """

    before: Annotated[int, msgspec.Meta(ge=-1)]
    waits_for: _Unsigned | None
    hashes: bytes


class SavedReplica(msgspec.Struct, frozen=True, array_like=True):
    """What one replica held.

    Attributes:
        boot_id: The life it was in; None if it does not say.
        tiers: For each tier numbers of runs, each followed by how many of its leading blocks it
            held, least recently used first.
        next_seq: Number of the first batch of KV events that is not in it; None where none were
            followed.
    """

    boot_id: str | None
    tiers: list[list[_Unsigned]]
    next_seq: _Unsigned | None = None


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """What a snapshot of any version begins with."""

    version: int
    byte_order: str


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """What the index held at one moment."""

    version: int
    byte_order: str
    runs: list[SavedRun]
    replicas: dict[str, SavedReplica]

    def parent_of(self, number: int) -> int | None:
        """Returns the hash of the block before a run; None for one that starts a prompt."""
        run = self.runs[number]
        if run.before < 0:
            return run.waits_for
        return unpack(self.runs[run.before].hashes[-HASH_BYTES:])[0]


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """Returns a snapshot as bytes. May run in a thread: nothing in it changes any more."""
    payload = msgspec.msgpack.encode(snapshot)
    return _MAGIC + xxhash.xxh3_64_digest(payload) + payload


def decode_snapshot(data: bytes) -> Snapshot:
    """Reads a snapshot.

    Raises:
        ValueError: It is none, of another version or kind of machine, damaged, or refers to runs
            that it does not have.
    """
    start = len(_MAGIC) + _CHECKSUM_BYTES
    payload = data[start:]
    if not data.startswith(_MAGIC) or data[len(_MAGIC) : start] != xxhash.xxh3_64_digest(payload):
        raise ValueError("it is damaged, or not a snapshot of an index")
    # The version first: of another one nothing else need be where it is here.
    head = msgspec.msgpack.decode(payload, type=_Head)
    if (head.version, head.byte_order) != (VERSION, sys.byteorder):
        raise ValueError(
            f"it is of version {head.version}, {head.byte_order} endian;"
            f" this router reads version {VERSION}, {sys.byteorder} endian"
        )
    snapshot = msgspec.msgpack.decode(payload, type=Snapshot)
    for number, run in enumerate(snapshot.runs):
        if not run.hashes or len(run.hashes) % HASH_BYTES or run.before >= number:
            raise ValueError("it has a run without blocks or before what it follows")
    for replica in snapshot.replicas.values():
        for tier in replica.tiers:
            if len(tier) % 2 or not all(run < len(snapshot.runs) for run in tier[::2]):
                raise ValueError("it names runs that it does not have")
            for number, count in zip(tier[::2], tier[1::2], strict=True):
                if not 0 < count <= len(snapshot.runs[number].hashes) // HASH_BYTES:
                    raise ValueError("it names more blocks of a run than that has, or none")
    return snapshot


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Writes a snapshot to a file that appears at once and whole. Takes its time: not for a loop.

    Raises:
        OSError: It cannot be written there; what was there before stays.
        OverflowError: A number in it has more than 64 bits; the same.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        data = encode_snapshot(snapshot)
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def read_snapshot(path: Path) -> Snapshot | None:
    """Reads a file that `write_snapshot` wrote; None if there is none.

    Raises:
        OSError: It cannot be read.
        ValueError: As `decode_snapshot`.
    """
    try:
        return decode_snapshot(path.read_bytes())
    except FileNotFoundError:
        return None
