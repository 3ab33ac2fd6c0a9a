"""Interactive pages by bokeh, of the viz extra."""

import re

import numpy as np
import pytest
from PIL import Image

from hypjax.analysis.disk import Drawing, Panel, Proxies, write_disk_page

pytest.importorskip("bokeh", reason="needs the viz extra: bokeh")


def test_a_page_holds_all_that_it_shows(tmp_path):
    labels, names = np.arange(30) % 9, [f"group {i}" for i in range(9)]
    places = 0.9 * np.exp(2j * np.pi * np.arange(30) / 30)
    captions = [f"class {i}, <b>{i}.png" for i in range(30)]
    panel = Panel("test: 30", places, labels, captions, lambda i: Image.new("RGB", (99, 50)))
    proxies = Proxies(np.array([0.1, 0.4j]), np.array([-1, 0]))
    drawing = Drawing([panel, panel], names, "group", proxies)
    write_disk_page(drawing, tmp_path / "disk.html")
    page = (tmp_path / "disk.html").read_text()
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=.https?:", page)
    assert page.count("data:image/jpeg;base64,") == 60 and "2 others" in page
    assert '<html lang="en">' in page
