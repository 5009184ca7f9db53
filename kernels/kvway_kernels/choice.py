"""Which implementation attends, and why."""

from __future__ import annotations

import torch

IMPLEMENTATIONS = ("reference", "sdpa", "compiled", "triton")
"""By name: the specification, torch's own operations, torch.compile, kernels for a GPU."""


def chosen(implementation: str, *, device: torch.device | str = "cpu") -> tuple[str, str]:
    """Return the implementation that a name means on a device, and why, in a few words.

    Args:
        implementation: one of `IMPLEMENTATIONS`, or `auto`.
        device: where the caches are.

    Raises:
        ValueError: the name is unknown, or what it names cannot run there; the message says what
            is missing.
    """
    device = torch.device(device)
    if implementation not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(
            f"implementation {implementation!r} is not one of auto, {', '.join(IMPLEMENTATIONS)}"
        )
    if implementation == "auto":
        return "sdpa", "the default"
    if implementation in ("compiled", "triton"):
        raise ValueError(
            f"implementation {implementation!r} cannot run on {device}: not yet there"
        )
    return implementation, "asked for"
