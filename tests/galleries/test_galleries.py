"""Galleries whose images are arrays, against brute force, and queries' own images in them."""

import dataclasses
import os

import jax
import numpy as np
import pytest

from hypjax.errors import UserError
from hypjax.galleries.own_images import OwnImages, copies
from hypjax.galleries.search import require_model
from hypjax.geometry import PoincareBall
from tests.helpers.galleries import clusters, embeddings

SPACE = PoincareBall(0.1, 2.3)


@pytest.mark.parametrize("label", [None, "even"])
def test_all_but_the_query_are_found_in_order(label, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    points = clusters(SPACE, 30).copy()
    points[7] = points[3]
    gallery = embeddings(points, SPACE)
    (tmp_path / "link.png").symlink_to(tmp_path / "3.png")
    paths = [os.path.realpath("link.png"), "", str(tmp_path / "other.png")]
    with jax.enable_x64(True):
        distances = np.array(
            jax.jit(SPACE.distance)(np.float64(points[[3, 3, 5], None]), np.float64(points))
        )
    distances[0, 3] = np.inf
    if label:
        distances[:, gallery.labels != label] = np.inf
    for k in (4, 99):
        for row, actual in enumerate(gallery.nearest(points[[3, 3, 5]], k, paths, label)):
            expected = np.argsort(distances[row], kind="stable")
            expected = expected[np.isfinite(distances[row][expected])][:k]
            assert actual.ids == gallery.ids[expected].tolist()
            assert actual.labels == gallery.labels[expected].tolist()
            assert actual.keys == [str(i) for i in expected]
            np.testing.assert_allclose(actual.distances, distances[row][expected], atol=1e-5)
            assert actual.own_label == (gallery.labels[3] if row == 0 else "")
    assert gallery.nearest(points[:1], 3, None, "wren")[0].ids == []


def test_images_are_read_by_key_and_sampled_always_alike():
    gallery = embeddings(clusters(SPACE, 30), SPACE)
    assert gallery.classes() == ["even", "odd"]
    (item,) = gallery.read(["30", "-1", "x", "9" * 50, "4"])
    assert (item.key, item.path, item.label) == ("4", "4.png", "odd")
    np.testing.assert_array_equal(item.point, gallery.vectors[4])
    keys = [item.key for item in gallery.sample(10)]
    assert len(set(keys)) == 10 and keys == [item.key for item in gallery.sample(10)]
    require_model(gallery, "model")
    with pytest.raises(UserError, match="embedded by another run, not by runs/b"):
        require_model(gallery, "other", "runs/b")
    of_encoder = dataclasses.replace(gallery, model="runs/b (encoder)")
    with pytest.raises(UserError, match="not by runs/b .head.; add --embedding=encoder"):
        require_model(of_encoder, "other", "runs/b (head)")


@pytest.mark.parametrize(
    ("queries", "gallery", "one_table", "expected"),
    [  # Ids of queries and gallery, and the coordinate of each one's point.
        ("/b.jpg=0 /d.jpg=1", "/a.jpg=0 /b.jpg=2 /b.jpg=3", False, [[1, 2], []]),
        ("b=0 d=1", "a=0 b=2", False, [[1], []]),
        ("48213=0 7=1", "7=2 48213=3 9=0", False, [[1], [0]]),
        ("front=0 side=1 front=2", "front=1 side=1 side=3 front=2", False, [[], [1], [3]]),
        ("red=0", "red=0 red=0 blue=0", False, [[0, 1]]),
        ("0=5 1=6 2=7", "0=9 1=6 2=6 3=5", False, [[3], [1], []]),
        ("0=5", "x=9 y=5 z=5", False, [[1]]),
        ("0=5 1=6", "2=5 3=6", True, [[], []]),
        ("/e\u0301.jpg=0 u\u0308=0", "ü=1 /é.jpg=1", False, [[1], [0]]),  # In two Unicode forms.
    ],
)
def test_ids_are_files_or_names_and_points_decide_where_they_are_neither(
    queries, gallery, one_table, expected
):
    (ids, points), (items, vectors) = (
        zip(*(x.split("=") for x in table.split()), strict=True) for table in (queries, gallery)
    )
    points, vectors = (np.array(x, np.float32)[:, None] for x in (points, vectors))
    images = OwnImages(items, vectors)
    for _ in range(2):
        assert [*images.rows(ids, points, one_table=one_table)] == expected


def test_links_lead_to_one_image(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jpg").touch()
    (tmp_path / "link.jpg").symlink_to("a.jpg")
    names = ["a.jpg", "b.jpg", str(tmp_path / "link.jpg"), "b.jpg", "b.jpg"]
    assert copies(names) == [[0, 2], [1], [0, 2], [3], [4]]
    assert copies(["a", "a", "b"]) == copies(["a.jpg", "b.jpg"]) == ()
    assert OwnImages(names).rows(["link.jpg", ""]) == [[0, 2], []]
