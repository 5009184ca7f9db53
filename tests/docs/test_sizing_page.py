"""docs/sizing.md shows what `kvway size` prints, and its numbers are those of the code.

`pytest --update-golden` writes what is printed into the page anew.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from kvway_core.model_shapes import shape_of
from kvway_core.size import SizeOptions, run
from tests.core.test_sizing import LLAMA_70B
from tests.docs.test_prefix_cache_page import LINK

PAGE = Path(__file__).parents[2] / "docs" / "sizing.md"
SHOWN = re.compile(
    r"(^```\n\$ kvway size (?P<argv>.+)\n)(?P<printed>(?:.*\n)*?)(?=```$)", re.MULTILINE
)
SMOLLM2 = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "intermediate_size": 1536,
}


@pytest.mark.model
def test_what_the_page_shows_is_what_is_printed(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(match: re.Match[str]) -> str:
        run(shlex.split(match["argv"]))
        return match[1] + capsys.readouterr().out

    text = PAGE.read_text(encoding="utf-8")
    assert len(SHOWN.findall(text)) == 3
    fresh = SHOWN.sub(printed, text)
    if request.config.getoption("--update-golden"):
        PAGE.write_text(fresh, encoding="utf-8")
    assert fresh == PAGE.read_text(encoding="utf-8")


def test_numbers_of_the_text_are_those_of_the_code() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    small, large = shape_of(SMOLLM2).work, shape_of(LLAMA_70B).work
    assert small is not None
    assert large is not None
    tokens = (
        f"A is {small.attention_tokens:,.0f} for SmolLM2-135M and {large.attention_tokens:,.0f}"
    )
    assert tokens in text
    falls = [work.prefill(1600, 0) / work.prefill(100, 1500) for work in (small, large)]
    assert f"falls {falls[0]:.2f} and {falls[1]:.2f} times" in text


def test_options_and_links_of_the_page_are_there() -> None:
    text = PAGE.read_text(encoding="utf-8")
    known = {"--" + name.replace("_", "-") for name in SizeOptions.__dataclass_fields__}
    asked = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - {"--num-blocks", "--pin-quota"}
    assert asked <= known
    paths = [match["path"] for match in LINK.finditer(text)]
    assert paths
    assert not [path for path in paths if not (PAGE.parent / path).exists()]
