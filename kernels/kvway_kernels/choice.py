"""Which implementation attends, and why."""

from __future__ import annotations

import functools
import importlib.util
import sysconfig
from pathlib import Path
from typing import Final

import torch

IMPLEMENTATIONS = ("reference", "sdpa", "compiled", "triton")
"""By name: the specification, torch's own operations, torch.compile, kernels for a GPU."""

HEAD_STEP: Final = 16
"""Sizes of heads that the C++ of `compiled` is for are a multiple of it: a vector of 64 bytes."""

_LARGEST_HEAD: Final = 1024


def is_native(
    dtype: torch.dtype,
    *,
    device: torch.device | str = "cpu",
    is_quantised: bool = False,
    head_dim: int = HEAD_STEP,
) -> bool:
    """Return whether `compiled` attends in C++ there (see native.py), and not in torch's graph.

    bfloat16 is left to the graph where a matrix unit multiplies it faster than vectors multiply
    float32, unless blocks are quantised: only the C++ reads these.

    Args:
        dtype: of the queries.
        device: where the caches are.
        is_quantised: whether they are quantised.
        head_dim: size of the heads.
    """
    if torch.device(device).type != "cpu" or head_dim % HEAD_STEP:
        return False
    if not 0 < head_dim <= _LARGEST_HEAD:
        return False
    if dtype == torch.bfloat16 and not is_quantised:
        return not torch.cpu._is_amx_tile_supported()  # noqa: SLF001 (no public name)
    return dtype in (torch.float32, torch.bfloat16)


def chosen(
    implementation: str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    is_quantised: bool = False,
    head_dim: int = HEAD_STEP,
) -> tuple[str, str]:
    """Return the implementation that a name means on a device, and why, in a few words.

    Args:
        implementation: one of `IMPLEMENTATIONS`, or `auto`.
        device: where the caches are.
        dtype: of the queries.
        is_quantised: whether the caches are quantised, which `compiled` reads in C++ alone.
        head_dim: size of the heads.

    Raises:
        ValueError: the name is unknown, or what it names cannot run there; the message says what
            is missing.
    """
    device = torch.device(device)
    native = is_native(dtype, device=device, is_quantised=is_quantised, head_dim=head_dim)
    form = "in C++" if native else "as a graph of torch"
    if is_quantised and not native:
        if implementation == "auto":
            return "sdpa", "quantised blocks"
        if implementation == "compiled":
            raise ValueError(
                f"'compiled' does not read quantised blocks with heads of {head_dim} and queries "
                f"of {dtype} on {device.type}, but those with a multiple of {HEAD_STEP} and of "
                "float32 or bfloat16 on a CPU: take sdpa, or auto"
            )
    if implementation == "auto":
        missing = _missing("compiled", device.type)
        return ("sdpa", missing) if missing else ("compiled", f"the fastest here, {form}")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation {implementation!r} is not one of auto, {', '.join(IMPLEMENTATIONS)}"
        )
    missing = _missing(implementation, device.type)
    if missing:
        raise ValueError(f"implementation {implementation!r} cannot run on {device}: {missing}")
    return implementation, f"asked for, {form}" if implementation == "compiled" else "asked for"


@functools.cache
def _missing(implementation: str, device_type: str) -> str:
    """Return what an implementation lacks on a kind of device; empty: nothing."""
    if implementation not in ("compiled", "triton"):
        return ""
    if device_type == "cpu":
        is_compiled = implementation == "compiled"
        return _missing_to_compile() if is_compiled else "it needs a CUDA device"
    has_triton = importlib.util.find_spec("triton") is not None
    return "" if has_triton else "no triton: install the package of that name"


def _missing_to_compile() -> str:
    """Return what torch lacks to compile for the CPU."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # takes a second to import
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "no C++ compiler: install g++, or name one in the environment variable CXX"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "no headers of Python: install python3-dev, or what has Python.h here"
    return ""
