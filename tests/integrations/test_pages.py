"""Reports and interactive disks in a browser: Chromium, with the accessibility checks of axe."""

import pathlib

import pytest

from hypjax.training import train
from tests.helpers import commands, small_runs
from tests.helpers.browsers import check_accessible, opening

pytest.importorskip("bokeh", reason="needs the viz extra: bokeh")


@pytest.fixture(scope="module")
def pages(photos_folder, tmp_path_factory) -> dict[str, pathlib.Path]:
    """A report of two runs, and an interactive disk."""
    root = tmp_path_factory.mktemp("pages")
    for space in ("poincare", "sphere"):
        train.train_and_evaluate(
            small_runs.load(photos_folder, f"objective.space={space}"), root / space
        )
    runs = [f"--workdir={root / space}" for space in ("poincare", "sphere")]
    found = {name: root / f"{name}.html" for name in ("report", "disk")}
    commands.call("report", *runs, "--queries=12", f"--output={found['report']}")
    commands.call("plot", "disk", runs[0], "--parts=train,test", f"--output={found['disk']}")
    return found


@pytest.fixture
def opened(browser, pages):
    """Opens a page; nothing is fetched."""
    with opening(browser, ("file:", "data:", "blob:")) as open_page:

        def opened_page(name, width):
            page = open_page(pages[name].as_uri(), width)
            page.wait_for_load_state("networkidle")
            return page

        yield opened_page


@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("name", ["report", "disk"])
def test_a_page_fits_its_window_and_is_accessible(opened, name, width):
    page = opened(name, width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("main, .bk-Column").first.bounding_box()["width"] > 0.8 * width
    check_accessible(page)


def test_the_keyboard_reaches_every_query(opened):
    page, reached = opened("report", 800), set()
    assert page.locator("#searches li:visible").count() == 6
    index = "[...document.querySelectorAll('#searches li')].indexOf(document.activeElement)"
    for _ in range(44):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent.endsWith('more queries')"):
            page.keyboard.press("Enter")
        reached.add(page.evaluate(index))
    assert reached >= set(range(12))
