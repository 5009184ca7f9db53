"""The C++ kernel for processors that have less than this one: compiled so, and run here.

Each set of vectors has lines of its own. Skipped where torch finds no compiler.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._inductor import config
from torch._inductor.cpp_builder import get_cpp_compiler

from kvway_kernels import native
from kvway_kernels.api import chosen
from tests.kernels.trees import TREES, Shape, Tree, lse_error, relative_error

_NAME, _REASON = chosen("auto")

pytestmark = [
    pytest.mark.skipif(_NAME != "compiled", reason=_REASON),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the options are those of x86-64"),
    pytest.mark.timeout(300),  # it compiles
]

LONG = Shape((((0, 1, 2, 3, 4), 0, 20),), ((1, 331), (1, 400), (9, 360), (1, 321), (1, 330)))

VECTORS = {"AVX2": ("-mno-avx512f",), "none": ("-mno-avx",)}
"""Options of the compiler, behind those that torch gives it."""


@pytest.mark.parametrize(
    ("vectors", "kv_dtype"), [("AVX2", None), ("AVX2", torch.int8), ("none", torch.float8_e4m3fn)]
)
def test_with_fewer_vectors_it_is_as_exact(
    vectors: str, kv_dtype: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    real = shutil.which(get_cpp_compiler())
    compiler.write_text(f'#!/bin/sh\nexec {real} "$@" -Wno-psabi {" ".join(VECTORS[vectors])}\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    make: Callable[..., Callable[..., None]] = native._kernel.__wrapped__
    with config.patch({"cpp.cxx": (str(compiler),)}):
        kind = native._KINDS[kv_dtype or torch.float32]
        kernel = make(64, kind, is_bfloat16=False)
    monkeypatch.setattr(native, "_kernel", lambda *_, **__: kernel)
    for shape in (*TREES.values(), LONG):
        for softcap in (None, 3.0):
            case = Tree.of(shape, kv_dtype=kv_dtype, softcap=softcap)
            out, lse = case.run("compiled")
            expected, expected_lse = case.specified()
            assert relative_error(out, expected) < 2e-6
            assert lse_error(lse, expected_lse) < 2e-6
    Tree.of(LONG, kv_dtype=kv_dtype).check_that_nan_shows(lambda tree: tree.run("compiled"))
