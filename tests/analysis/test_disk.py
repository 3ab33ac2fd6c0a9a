"""Pictures of the Poincaré disk, and images on a grid."""

import itertools

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.offsetbox import AnnotationBbox
from PIL import Image

from hypjax.analysis.disk import Drawing, Panel, Proxies, draw_disks


def colour(i):
    return Image.new("RGB", (20, 14), (10 * (i % 20), 80, 200))


@pytest.fixture
def panel():
    rng = np.random.default_rng(0)
    radii, angles = np.tanh(rng.uniform(0, 1.5, 200)), rng.uniform(0, 2 * np.pi, 200)
    labels = np.minimum(rng.geometric(0.3, 200) - 1, 9)
    captions = [f"<b>class {label}</b>, {i}.png" for i, label in enumerate(labels)]
    return Panel("test: 200 images", radii * np.exp(1j * angles), labels, captions, colour)


NAMES = [f"group {i} of $x^2$" for i in range(10)]


def test_draws_points_thumbnails_proxies_and_their_tree(panel, figures, tmp_path):
    proxies = Proxies(np.array([0.1, 0.4j, 0.5]), np.array([-1, 0, 0]))
    drawing = Drawing([panel, panel], NAMES, "group", proxies, "a note")
    draw_disks(drawing, tmp_path / "disk.svg", thumbnails=True)
    figure = figures[0]
    for axes in figure.axes:
        pictures = [a for a in axes.get_children() if isinstance(a, AnnotationBbox)]
        placed = [picture.get_window_extent() for picture in pictures]
        assert len(pictures) > 30
        assert not any(a.overlaps(b) for a, b in itertools.combinations(placed, 2))
        points = [c for c in axes.collections if not isinstance(c, LineCollection)]
        assert sum(len(c.get_offsets()) for c in points) == 200 + 3
        grid, edges = (c for c in axes.collections if isinstance(c, LineCollection))
        assert len(grid.get_segments()) == 18 and len(edges.get_segments()) == 2
    legend = figure.legends[0]
    texts, handles = [text.get_text() for text in legend.get_texts()], legend.legend_handles[:-2]
    assert len(texts) == 9 and texts[-2:] == ["3 others", "proxy"]
    assert len({tuple(handle.get_facecolor()[0]) for handle in handles}) == len(handles) == 7
    assert len({handle.get_paths()[0].vertices.tobytes() for handle in handles}) == 7
