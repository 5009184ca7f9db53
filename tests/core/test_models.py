"""One rule for where a model's files are."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvway_core.errors import ConfigError
from kvway_core.models import find_model, is_model_id, model_dir, served_model_name


def test_an_id_is_one_folder_under_the_home(tmp_path: Path) -> None:
    env = {"KVWAY_HOME": str(tmp_path)}
    assert model_dir("owner/name-1.5B", env) == tmp_path / "models" / "owner--name-1.5B"


@pytest.mark.parametrize("env", [{}, {"KVWAY_HOME": ""}])
def test_without_a_home_the_cache_folder_is_used(env: dict[str, str]) -> None:
    assert model_dir("name", env) == Path.home() / ".cache" / "kvway" / "models" / "name"


def test_a_folder_that_is_there_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert model_dir("owner/name", {"KVWAY_HOME": "/elsewhere"}) == Path("owner/name")


@pytest.mark.parametrize("spec", ["", "../up", "/no/such", "a/b/c", "a--b", "a/..", "a b", "a/-b"])
def test_what_is_neither_folder_nor_id_is_refused(spec: str) -> None:
    assert not is_model_id(spec)
    with pytest.raises(ConfigError):
        model_dir(spec, {})


def test_a_model_that_is_not_there_says_how_to_fetch_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kvway fetch owner/name"):
        find_model("owner/name", {"KVWAY_HOME": str(tmp_path)})


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        find_model(str(tmp_path), {})


def test_a_model_that_is_there_is_found(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert find_model(str(tmp_path), {}) == tmp_path


def test_served_names(tmp_path: Path) -> None:
    assert served_model_name("owner/name") == "owner/name"
    assert served_model_name(str(tmp_path / "tiny") + "/") == "tiny"
