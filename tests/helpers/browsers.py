"""Pages in Chromium, and the accessibility checks of axe."""

import contextlib

_RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}


@contextlib.contextmanager
def opening(browser, own_urls, missing="no such image"):
    """Yields a function that opens a page.

    Afterwards nothing was logged as an error, but for a missing image, and no other URL was asked.
    """
    faults, contexts = [], []

    def open_page(url, width, **options):
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, **options))
        page = contexts[-1].new_page()

        def log(message):
            if message.type in ("error", "warning") and missing not in message.location["url"]:
                faults.append(message.text)

        page.on("console", log)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda r: r.url.startswith(own_urls) or faults.append(r.url))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


def check_accessible(page):
    """Checks that axe finds nothing wrong in a page."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, options=_RULES).response["violations"]
    shown = [(each["id"], [node["html"][:200] for node in each["nodes"][:3]]) for each in found]
    assert (page.url, shown) == (page.url, [])
