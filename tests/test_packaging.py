"""What is installed is what is in the repository, under `cam_jax` alone."""

import importlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"cam_jax": "cam_jax", "models": "cam_jax/models", "conversion": "cam_jax/conversion"}
IGNORED = shutil.ignore_patterns("__pycache__")


def files(folder: Path) -> set[Path]:
    return {
        path.relative_to(folder)
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Built from a copy, since setuptools leaves its work beside the sources."""
    copy = tmp_path_factory.mktemp("source")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=IGNORED)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=copy, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(copy / done.stdout.splitlines()[-1])


def test_the_wheel_holds_every_file_and_no_other(wheel):
    expected = {
        f"{target}/{path.as_posix()}"
        for folder, target in FOLDERS.items()
        for path in files(ROOT / folder)
    }
    found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == expected


def test_the_wheel_claims_no_name_but_its_own(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"cam_jax"}


def test_the_wheel_carries_command_and_licence(wheel):
    info = next(name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name)
    entry_points = wheel.read(f"{info}/entry_points.txt").decode()
    assert "cam-jax = cam_jax.cli.main:main" in entry_points
    assert b"Apache License" in wheel.read(f"{info}/licenses/LICENSE")


@pytest.mark.parametrize("folder", [*FOLDERS, "tests"])
def test_every_folder_with_modules_is_a_package(folder):
    """Without __init__.py a folder is left out of the wheel; tests of equal names would collide."""
    holders = {path.parent for path in (ROOT / folder).rglob("*.py")}
    assert [str(h) for h in holders if not (h / "__init__.py").exists()] == []


@pytest.mark.parametrize("name", ["cam_jax.errors", "cam_jax.models.config"])
def test_annotations_are_checked_throughout(name):
    """The import hook of conftest.py reaches the folders that are mapped into the package."""
    module = importlib.import_module(name)
    assert "Jaxtyping" in type(module.__loader__).__name__


def test_the_tests_see_eight_devices(devices):
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    x = jax.device_put(np.arange(8.0), NamedSharding(mesh, PartitionSpec(("data", "expert"))))
    assert {shard.device for shard in x.addressable_shards} == set(devices)
    assert jnp.sum(x) == 28
