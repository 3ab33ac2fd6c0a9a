"""What the viz extra adds: layouts by UMAP, and interactive pages."""

import re

import numpy as np
import pytest
from PIL import Image

from hypjax.analysis.disk import Drawing, Panel, Proxies, write_disk_page
from hypjax.geometry import PoincareBall, layout

pytest.importorskip("bokeh", reason="needs the viz extra: bokeh")
pytest.importorskip("umap", reason="needs the viz extra: umap-learn")


@pytest.mark.slow
def test_neighbours_stay_together_inside_the_disk():
    ball, rng = PoincareBall(c=0.1, clip_radius=2.3), np.random.default_rng(0)
    labels = np.repeat(np.arange(10), 20)
    features = 2 * rng.normal(size=(10, 16))[labels] + 0.3 * rng.normal(size=(200, 16))
    points = np.asarray(ball.embed(features.astype(np.float32)))
    places = layout.lay_out_by_umap(points, ball)
    assert (np.abs(places) < 1).all()
    distances = np.abs((places[:, None] - places) / (1 - places[:, None].conj() * places))
    np.fill_diagonal(distances, np.inf)
    assert np.mean(labels[distances.argmin(axis=1)] == labels) > 0.95
    assert np.array_equal(places, layout.lay_out_by_umap(points, ball))


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
