"""The partial kernel compiled ahead of time for Hopper (sm_90), which needs no GPU.

A program that spills registers, or that loads without cp.async, is right and several times slower:
a changed line or a stride that is no multiple of 16 is enough.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

pytestmark = [
    pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="kernels are interpreted here"),
    pytest.mark.timeout(240),  # a compilation takes a second or two of a core that is not shared
]

NAMES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
}


def ptxas() -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    if not tool.is_file():
        pytest.skip("this build of triton brings no ptxas")
    return str(tool)


@pytest.mark.parametrize(
    ("num_pairs", "head_dim", "dtype", "cache_dtype"),
    [
        (16, 64, torch.bfloat16, torch.bfloat16),
        (64, 64, torch.bfloat16, torch.bfloat16),
        (16, 128, torch.bfloat16, torch.bfloat16),
        (64, 128, torch.float16, torch.float16),
        (64, 256, torch.bfloat16, torch.bfloat16),
        (16, 128, torch.bfloat16, torch.int8),
        (64, 128, torch.bfloat16, torch.float8_e4m3fn),
        (16, 128, torch.float32, torch.float32),
    ],
    ids=str,
)
def test_spills_no_register_and_loads_asynchronously(
    num_pairs: int,
    head_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvway_kernels.triton import kernels
    from kvway_kernels.triton.attention import constants, tile

    tool = ptxas()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shape = tile(num_pairs, dtype, head_dim)
    is_quantised = dtype != cache_dtype
    constant: dict[str, object] = dict(
        constants(
            shape,
            dtype,
            num_heads=32,
            num_kv_heads=8,
            head_dim=head_dim,
            block_size=16,
            has_softcap=False,
            is_quantised=is_quantised,
        )
    )
    if not is_quantised:
        constant |= {"k_scale": None, "v_scale": None}
    pointers = {
        "q": NAMES[dtype],
        "k_cache": NAMES[cache_dtype],
        "v_cache": NAMES[cache_dtype],
        "k_scale": "*bf16",
        "v_scale": "*bf16",
        "part_out": "*fp32",
        "part_lse": "*fp32",
        "scale": "fp32",
        "softcap": "fp32",
    }
    signature, attributes = {}, {}
    for index, name in enumerate(kernels.partial_attention.arg_names):
        kind = pointers.get(name, "i32" if name.endswith("stride") else "*i32")
        signature[name] = "constexpr" if name in constant else kind
        if signature[name] not in ("constexpr", "fp32") and "scale_" not in name:
            attributes[(index,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(kernels.partial_attention, signature, constant, attributes),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": shape.num_warps, "num_stages": shape.num_stages},
    )
    ptx = tmp_path / "kernel.ptx"
    ptx.write_text(compiled.asm["ptx"])
    report = subprocess.run(
        [tool, "-v", "--gpu-name=sm_90a", ptx, "-o", tmp_path / "kernel.cubin"],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    spills = re.findall(r"(\d+) bytes spill", report)
    assert spills, report
    assert set(spills) == {"0"}
    assert "cp.async" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 227 * 1024, "what a program may have of shared memory"
