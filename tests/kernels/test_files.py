"""Files of kernels print their own picture or table: `python -m kvway_kernels.<name>`.

Those that compile (compiled, native, costs) take too long for here.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import kvway_kernels

PRINTED = {
    "merging": "merged  3.06002  3.50284",
    "plan": "read once for requests (0, 1): [7, 2]",
    "quant": "int8                                   3168            51.6%           0.5",
    "reference": "None           0     2   #######",
    "sdpa": " 256  ",
    "triton.attention": "partial results for 42 rows",
}
"""What is in it, by name of the file."""


@pytest.mark.parametrize("name", PRINTED)
def test_a_file_prints_what_it_does(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name.startswith("triton"):
        pytest.importorskip("triton")
    importlib.import_module(f"kvway_kernels.{name}")._main()
    assert PRINTED[name] in capsys.readouterr().out


def test_every_file_that_prints_can_be_run() -> None:
    folder = Path(kvway_kernels.__file__).parent
    texts = [path.read_text(encoding="utf-8") for path in folder.rglob("*.py")]
    printing = [text for text in texts if "\ndef _main() -> None:\n" in text]
    assert len(printing) >= len(PRINTED)
    assert all(text.endswith('\nif __name__ == "__main__":\n    _main()\n') for text in printing)
