"""The processor of this machine: what it is called, and what it can do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_CPUINFO: Final = Path("/proc/cpuinfo")


def processor_name() -> str:
    """Return the model of the CPU, or its architecture where the system does not tell."""
    return _value("model name") or os.uname().machine


def processor_flags() -> frozenset[str]:
    """Return the names of its extensions, as Linux tells them; empty where it does not."""
    return frozenset((_value("flags") or _value("Features")).split())


def _value(key: str) -> str:
    """Return what stands behind a key for the first CPU; empty: nothing."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""
