"""Every engine on real images: letters, and handwritten characters of Omniglot."""

import functools
import io
import pathlib
import zipfile

import numpy as np
import pytest
from PIL import Image

from hypjax.data.preparation import fonts, glyphs
from hypjax.engines import euclidean
from hypjax.engines.exports import find_export, open_gallery
from hypjax.geometry import PoincareBall
from hypjax.retrieval.neighbors import search
from tests.helpers.galleries import check_neighbours, embeddings

OMNIGLOT = pathlib.Path(__file__).parents[3] / "shared/data/omniglot/images_background_small1.zip"
COUNT, QUERIES, NEAREST, SIZE, DIM = 2000, 100, 10, 16, 64


def letters():
    faces = [glyph for letter in fonts.glyph_classes()[::9] for glyph in letter.glyphs]
    return [Image.fromarray(glyphs.render(glyph)) for glyph in faces[:COUNT]]


def omniglot():
    if not OMNIGLOT.exists():
        pytest.skip("needs the small background set of Omniglot")
    with zipfile.ZipFile(OMNIGLOT) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".png"))[:COUNT]
        return [Image.open(io.BytesIO(archive.read(name))).convert("L") for name in names]


@functools.cache
def features(source):
    """Random projections of the images' pixels, with norms of 2 on average."""
    pixels = np.stack([np.asarray(image.resize((SIZE, SIZE)), np.float32) for image in source()])
    pixels = pixels.reshape(len(pixels), -1)
    found = (pixels - pixels.mean(axis=0)) @ np.random.default_rng(0).normal(size=(SIZE**2, DIM))
    return (2 * found / np.linalg.norm(found, axis=1).mean()).astype(np.float32)


def in_faiss(path, points, space):
    import faiss

    index = faiss.read_index(str(path))
    if not hasattr(index, "hnsw"):
        queries = embeddings(points[:QUERIES], space).search_vectors("query")
        return index.search(queries, NEAREST)[1]
    near = lambda queries, m: index.search(queries, m)[1]  # noqa: E731
    how = {"k": NEAREST, "space": space, "candidates": index.hnsw.efSearch}
    return euclidean.nearest(near, points, points[:QUERIES], **how)[1]


@pytest.mark.parametrize(
    ("source", "space"),
    [
        (letters, PoincareBall(1.0, None)),
        (omniglot, PoincareBall(0.1, 2.3)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.parametrize(
    ("export", "module", "least"),
    [
        *(("faiss", "faiss", 0.999), ("faiss:hnsw", "faiss", 0.97)),
        *(("usearch", "usearch", 0.97), ("qdrant", "qdrant_edge", 0.97)),
    ],
)
def test_it_finds_the_neighbours_of_images(source, export, module, least, space, tmp_path):
    pytest.importorskip(module, reason=f"needs {module}")
    points = np.asarray(space.embed(features(source)))
    path = tmp_path / f"gallery.{export.partition(':')[0]}"
    find_export(export).write(embeddings(points, space), path)
    queries = points[:QUERIES]
    if module == "faiss":
        _, exact = search(queries, None, points, k=NEAREST, space=space)
        found = in_faiss(path, points, space)
        assert (exact[:, :, None] == found[:, None]).any(axis=2).mean() >= least
        return
    found = open_gallery(path).nearest(queries, NEAREST)
    if module == "qdrant_edge":
        items = [[int(name.removesuffix(".png")) for name in hits.ids] for hits in found]
        found = np.array([hits.distances for hits in found]), np.array(items)
    check_neighbours(found, queries, points, space, least)
