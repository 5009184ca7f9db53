"""Where a model's files are on this machine: one rule for every program that names a model.

A model is named by a folder or by a hub id (``owner/name``). Fetched models live under
``$KVWAY_HOME/models`` (``~/.cache/kvway/models`` when the variable is unset or empty), one folder
per id, with each ``/`` of the id written as ``--``::

    ./my-model                  ->  ./my-model
    HuggingFaceTB/SmolLM2-135M  ->  $KVWAY_HOME/models/HuggingFaceTB--SmolLM2-135M
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from kvway_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_MODEL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


def models_home(env: Mapping[str, str]) -> Path:
    """Return the folder that holds fetched models; it may not exist yet."""
    return kvway_home(env) / "models"


def kvway_home(env: Mapping[str, str]) -> Path:
    """Return the folder for what kvway keeps between starts; it may not exist yet."""
    return Path(env.get("KVWAY_HOME") or "~/.cache/kvway").expanduser()


def model_dir(spec: str, env: Mapping[str, str]) -> Path:
    """Return the folder that `spec` names, whether or not it exists.

    A folder that exists wins over an id of the same spelling, so that ``owner/name`` beside the
    caller is used as it stands.

    Args:
        spec: A folder, or a hub id.
        env: The environment, for ``KVWAY_HOME`` alone.

    Raises:
        ConfigError: `spec` is empty, or is neither a folder nor spelt like an id.
    """
    if not spec:
        raise ConfigError(["the model is empty: give a folder or an id such as owner/name"])
    path = Path(spec).expanduser()
    if path.is_dir():
        return path
    if not is_model_id(spec):
        raise ConfigError([f"no such model folder: {spec}"])
    return models_home(env) / spec.replace("/", "--")


def find_model(spec: str, env: Mapping[str, str]) -> Path:
    """Return the folder of a model that is on disk.

    Raises:
        ConfigError: Nothing is there. The message says which command fetches it.
    """
    folder = model_dir(spec, env)
    if not (folder / "config.json").is_file():
        if folder == Path(spec).expanduser():
            raise ConfigError([f"not a model folder (it has no config.json): {spec}"])
        raise ConfigError([f"model {spec} is not on this machine: run `kvway fetch {spec}` first"])
    return folder


def served_model_name(spec: str) -> str:
    """Return the name clients use for `spec`: an id as it is, a folder by its own name.

    A spec that names a folder which exists is a folder, whatever it looks like.
    """
    path = Path(spec).expanduser()
    if is_model_id(spec) and not path.is_dir():
        return spec
    return path.resolve().name


def is_model_id(spec: str) -> bool:
    """Tell whether `spec` is spelt like a hub id: ``name`` or ``owner/name``."""
    return _MODEL_ID.fullmatch(spec) is not None and ".." not in spec and "--" not in spec
