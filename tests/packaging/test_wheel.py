"""The wheel, as someone gets it who never saw this tree."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kvway_core", "kvway_kernels", "kvway_router", "kvway_worker")
FOLDERS = ("core", "kernels", "router", "worker")
ROUTER_LIMIT_BYTES = 200_000_000
NOT_OURS = {"pip", "setuptools", "pkg_resources"}
"""What every new environment has."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from the tree."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True)
    (built,) = folder.glob("kvway-*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel with the router's extra into a new environment; return its folder."""
    folder = tmp_path_factory.mktemp("site") / "venv"
    venv.create(folder, with_pip=True)
    constraints = ["-c", str(ROOT / "constraints.txt")]
    install = [str(folder / "bin" / "pip"), "install", "--quiet", *constraints]
    subprocess.run(
        [*install, f"kvway[router] @ {wheel.as_uri()}"], check=True, cwd=folder, env=clean_env()
    )
    return folder


def clean_env() -> dict[str, str]:
    """Return our environment without what could lead Python back into the tree."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def run(site: Path, *command: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command of the new environment, outside the tree."""
    program = str(site / "bin" / command[0])
    done = subprocess.run(
        [program, *command[1:]],
        capture_output=True,
        text=True,
        check=False,
        cwd=site,
        env=clean_env(),
    )
    assert done.returncode == code, done.stderr
    return done


def test_the_wheel_holds_every_file_of_the_packages_and_nothing_else(wheel: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", *FOLDERS], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    wanted = {name.partition("/")[2] for name in tracked if name.split("/")[1] in PACKAGES}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert wanted <= held
    assert {name.partition("/")[0] for name in held} <= set(PACKAGES)
    assert not [name for name in held if "test_" in name or name.endswith(".pyc")]
    assert any(name.startswith("kvway_router/ui/") for name in held)


def test_the_wheel_carries_its_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (licence,) = (name for name in archive.namelist() if name.endswith("/LICENSE"))
        assert b"Apache License" in archive.read(licence)


def test_the_command_knows_its_version(site: Path, wheel: Path) -> None:
    assert run(site, "kvway", "--version").stdout == f"kvway {wheel.name.split('-')[1]}\n"


@pytest.mark.parametrize("command", ["router", "up", "size", "explain", "top"])
def test_a_command_explains_itself(site: Path, command: str) -> None:
    assert run(site, "kvway", command, "--help").stdout.startswith(f"usage: kvway {command}")


def test_a_router_starts_as_far_as_its_configuration(site: Path) -> None:
    refusal = run(
        site, "kvway", "router", "--model", "/nowhere", "--replica", "http://h:1", code=2
    )
    assert "/nowhere" in refusal.stderr


def test_the_router_needs_no_torch(site: Path) -> None:
    installed = run(site, "pip", "list", "--format=freeze").stdout.lower()
    assert "kvway==" in installed
    for heavy in ("torch", "transformers", "safetensors"):
        assert f"{heavy}==" not in installed


def test_the_router_is_small(site: Path) -> None:
    (packages,) = site.glob("lib/python3*/site-packages")
    size = sum(
        file.lstat().st_size
        for file in packages.rglob("*")
        if file.is_file() and file.relative_to(packages).parts[0] not in NOT_OURS
    )
    assert size < ROUTER_LIMIT_BYTES
