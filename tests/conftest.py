"""Fixtures that several test files share."""

import os
import pathlib
import shutil
import tempfile

import jax
import numpy as np
import pytest
from PIL import Image

_PROGRAMS = "JAX_COMPILATION_CACHE_DIR"
_IS_XDIST_WORKER = "PYTEST_XDIST_WORKER" in os.environ


def pytest_configure(config):
    """Compiles each program once for all tests and the commands they run, since that takes long.

    The folder serves one run of pytest, whose other processes learn of it from the environment.
    """
    del config
    if not _IS_XDIST_WORKER:
        os.environ[_PROGRAMS] = tempfile.mkdtemp(prefix="programs-")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        jax.config.update("jax_compilation_cache_dir", os.environ[_PROGRAMS])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def pytest_unconfigure(config):
    """Removes the programs."""
    del config
    if not _IS_XDIST_WORKER:
        shutil.rmtree(os.environ[_PROGRAMS], ignore_errors=True)


@pytest.fixture
def float64():
    """Lets JAX compute in float64 during a test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def repository() -> pathlib.Path:
    """The folder that holds configs/ and README.md."""
    return pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory) -> pathlib.Path:
    """A data folder in which glyphs is prepared, once for all of pytest's processes."""
    from hypjax.data.preparation.glyphs import Glyphs
    from hypjax.system.locks import claimed

    root = tmp_path_factory.getbasetemp()
    directory = (root.parent if _IS_XDIST_WORKER else root) / "datasets"
    with claimed(directory, "preparing glyphs"):
        Glyphs(data_dir=directory).download_and_prepare()
    return directory


@pytest.fixture(scope="session")
def photos_folder(tmp_path_factory) -> pathlib.Path:
    """A folder of 10 classes with 6 small pictures each, of noise around a colour."""
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for label in range(10):
        (root / f"class{label}").mkdir()
        colour = rng.integers(100, 156, 3)
        for i in range(6):
            height, width = rng.integers(20, 30, 2)
            noise = rng.integers(-90, 90, (height, width, 3))
            picture = np.clip(colour + noise, 0, 255).astype(np.uint8)
            Image.fromarray(picture).save(root / f"class{label}" / f"{i}.png")
    return root


@pytest.fixture
def open_folder():
    """A temporary folder that every user may enter, unlike those of pytest."""
    folder = pathlib.Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session", autouse=True)
def caches(tmp_path_factory):
    """Keeps the user's cache folder out of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
        yield
