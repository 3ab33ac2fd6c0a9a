"""The engine that docs/extending.md shows."""

import sys
import types

import numpy as np

from hypjax.geometry import PoincareBall
from hypjax.retrieval.embeddings import find_export, is_gallery, open_gallery
from hypjax.system import integrations
from tests.helpers.galleries import check_neighbours, clusters, embeddings, found_in
from tests.helpers.shown_objective import blocks


def test_one_file_and_one_line_are_an_engine(tmp_path, monkeypatch):
    code, line = blocks("An engine")
    module = types.ModuleType("hypjax.integrations.kdtree")
    exec(code, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for name, row in eval("{" + line + "}", {"Integration": integrations.Integration}).items():
        monkeypatch.setitem(integrations.INTEGRATIONS, name, row)
    space, path = PoincareBall(1.0, 2.3), tmp_path / "gallery.kdtree"
    points = clusters(space, 300)
    assert find_export("kdtree")(embeddings(points, space), path) == str(path)
    assert is_gallery(path)
    gallery, own = open_gallery(path), np.arange(5)
    found = found_in(gallery, points[:5], 10, own)
    check_neighbours(found, points[:5], points, space, 1.0, own)
    assert gallery.has_class("odd") and not gallery.has_class("wren")
