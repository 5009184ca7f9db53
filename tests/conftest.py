"""Fixtures that every suite may use: golden files, and how hard hypothesis tries.

pytest --update-golden      rewrites the golden files; read the diff before you commit it
HYPOTHESIS_PROFILE=soak     dev (50 examples, the default), ci (300, the same every time),
                            soak (20,000, by hand)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

GOLDEN_DIR = Path(__file__).parent / "golden"

settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile("ci", max_examples=300, deadline=None, derandomize=True)
settings.register_profile("soak", max_examples=20_000, deadline=None)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "dev")
settings.load_profile(PROFILE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives generated cases more time than other tests, and a soak all it takes."""
    limit_s = 0 if PROFILE == "soak" else 300
    for item in items:
        if item.get_closest_marker("property") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(limit_s))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite the files under tests/golden instead of comparing with them",
    )
    parser.addoption(
        "--fault-steps",
        type=int,
        default=500,
        help="steps of the scheduler's long random life; 20000 by hand",
    )
    parser.addoption("--fault-seed", type=int, default=0, help="its seed")
    parser.addoption(
        "--tokenizers",
        default=None,
        metavar="DIR",
        help="folders of models below DIR whose tokenizers are tried in place of small ones",
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str | bytes], None]:
    """Returns `check(name, content)`: fails unless tests/golden/<name> holds exactly that."""
    update = bool(request.config.getoption("--update-golden"))

    def check(name: str, content: str | bytes) -> None:
        path = GOLDEN_DIR / name
        actual = content.encode("utf-8") if isinstance(content, str) else content
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(actual)
            return
        if not path.is_file():
            pytest.fail(f"tests/golden/{name} is not there; run pytest --update-golden")
        expected = path.read_bytes()
        if isinstance(content, str):
            assert content == expected.decode("utf-8"), f"tests/golden/{name} says otherwise"
        else:
            assert actual == expected, f"tests/golden/{name} says otherwise"

    return check


@pytest.fixture
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the byte model: a real tokenizer without a download."""
    from kvway_core.testing.byte_model import write_byte_model

    return write_byte_model(tmp_path_factory.mktemp("byte-model"))
