"""The engine that docs/extending.md shows."""

import numpy as np

from hypjax.geometry import PoincareBall
from hypjax.integrations import exports
from hypjax.retrieval.neighbors import search
from tests.helpers.galleries import clusters, embeddings
from tests.helpers.shown_objective import blocks


def test_one_file_and_one_line_are_an_engine(tmp_path, monkeypatch):
    code, line = blocks("An engine")
    names = {"Export": exports.Export}
    exec(code, names)
    for name, export in eval("{" + line + "}", names).items():
        monkeypatch.setitem(exports.EXPORTS, name, export)
    space = PoincareBall(1.0, 2.3)
    points = clusters(space, 300)
    gallery = embeddings(points, space)
    path = tmp_path / "gallery.kdtree"
    assert exports.find_export("kdtree").write(gallery, path) == str(path)
    assert exports.is_gallery(path)
    opened = exports.open_gallery(path)
    own = np.arange(5)
    found = opened.nearest(points[:5], 10, gallery.ids[:5])
    distances, items = search(points[:5], own, points, k=10, space=space)
    assert [hits.ids for hits in found] == gallery.ids[items].tolist()
    np.testing.assert_allclose([hits.distances for hits in found], distances, rtol=1e-4)
    assert opened.has_class("odd") and not opened.has_class("wren")
