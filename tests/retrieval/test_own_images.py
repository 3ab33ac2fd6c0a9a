"""Which rows of a gallery are a query's own image."""

import numpy as np
import pytest

from hypjax.retrieval.own_images import OwnImages, copies


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
