"""Fixtures that several test files share."""

import pathlib

import jax
import pytest


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
    """A data folder in which glyphs is prepared."""
    from hypjax.data.glyphs import Glyphs

    directory = tmp_path_factory.mktemp("datasets")
    Glyphs(data_dir=directory).download_and_prepare()
    return directory
