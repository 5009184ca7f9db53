"""The most memory that this process held during something, as Linux counts it."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def resident_bytes() -> int:
    """Return what is resident now, after what nobody needs was given back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _field("VmRSS")


def forget_peak() -> None:
    """Count the peak anew from here."""
    _CLEAR.write_text("5")


def peak_bytes() -> int:
    """Return the most that was resident since `forget_peak`."""
    return _field("VmHWM")


def _field(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"{_STATUS} has no {name}")
