"""Memory of a cache: zero, and taken from the machine only where it is written."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor


def zeros(num_bytes: int, device: torch.device | str = "cpu") -> Tensor:
    """Return zeros, uint8 [num_bytes].

    On a CPU they are pages of their own: one that was never written takes no memory, and all are
    given back when the tensor goes. Torch's own zeros are written, each of them.

    Args:
        num_bytes: at least 1.
        device: where they are.

    Raises:
        RuntimeError: the machine or device has no such memory.
    """
    device = torch.device(device)
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise RuntimeError(f"no memory for {num_bytes} bytes: {error}") from error
    return torch.frombuffer(pages, dtype=torch.uint8)  # which keeps the pages
