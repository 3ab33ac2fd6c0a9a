"""Other programs, which are optional: tests without theirs are skipped."""

import shutil

import pytest

from benchmarks import peers  # noqa: F401  Lets a CPU build of torch import timm.


@pytest.fixture(scope="module")
def browser():
    """Chromium."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    pytest.importorskip("axe_playwright_python", reason="needs axe")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("needs chromium")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()
