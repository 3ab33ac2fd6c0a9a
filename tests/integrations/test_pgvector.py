"""Galleries in a PostgreSQL with pgvector, which a package brings."""

import numpy as np
import pytest

from hypjax.errors import UserError
from hypjax.galleries.embeddings import find_export, open_gallery
from hypjax.geometry import Lorentz, PoincareBall, Sphere
from hypjax.retrieval import euclidean, nearest_neighbors
from tests.helpers import galleries
from tests.helpers.galleries import check_neighbours, clusters, embeddings, found_in

psycopg = pytest.importorskip("psycopg", reason="needs psycopg")
from hypjax.integrations import servers  # noqa: E402

BALL = PoincareBall(1.0, None)


@pytest.fixture
def url(postgres):
    """The URL of a gallery in an empty database."""
    with psycopg.connect(postgres.get_uri(), autocommit=True) as db:
        db.execute("DROP DATABASE IF EXISTS photos WITH (FORCE)")
        db.execute("CREATE DATABASE photos")
    return postgres.get_uri("photos").replace("?", "/Birds?")


@pytest.fixture
def graphs(monkeypatch):
    """Lets PostgreSQL search graphs, where it would scan so few rows."""
    monkeypatch.setenv("PGOPTIONS", "-c enable_seqscan=off -c enable_sort=off")


def export(url, images):
    return find_export(url)(images, None), open_gallery(url)


@pytest.mark.parametrize("space", [Sphere(), BALL, Lorentz(1.0, None)], ids=str)
def test_it_finds_the_neighbours_and_their_distances(url, graphs, space):
    points = clusters(space, 300)
    _, gallery = export(url, embeddings(points, space))
    check_neighbours(found_in(gallery, points[:25], 10), points[:25], points, space, 0.99)
    check_neighbours(found_in(gallery, points[:25], 300), points[:25], points, space, 0.99)


def test_a_tree_is_searched_by_shells_up_to_the_boundary(url, graphs):
    points = galleries.tree(1.0, 8, levels=8)
    said, gallery = export(url, embeddings(points, BALL))
    assert gallery.by_shell and len(gallery.shells) > 4 and gallery._kinds() == {True}
    assert float(said.split("finds ")[1].split("%")[0]) > 98
    queries = np.random.default_rng(0).choice(points, 100)
    check_neighbours(found_in(gallery, queries, 10), queries, points, BALL, 0.98)


def test_held_out_queries_choose_one_index_where_shells_need_more_candidates(url, graphs):
    points = clusters(BALL, 300, dim=8)
    assert len(set(euclidean.shells_of(points, BALL).tolist())) > 1
    _, gallery = export(url, embeddings(points[:200], BALL))
    assert not gallery.by_shell and gallery._kinds() == {False}
    said, gallery = export(url, embeddings(points, BALL))
    assert not gallery.by_shell and gallery._kinds() == {False} and "holds 300 images" in said
    check_neighbours(found_in(gallery, points[:25], 10), points[:25], points, BALL, 0.98)


def test_images_are_added_read_replaced_and_removed(url, graphs):
    points = galleries.tree(1.0, 4, levels=6)
    export(url, embeddings(points[:30], BALL))  # Only shells near the centre.
    _, gallery = export(url, embeddings(points[25:], BALL, first=25))
    assert len(gallery) == len(points)
    gallery.remove([f"{i}.png" for i in range(100, 140)])  # Their places in the graphs stay.
    left = np.setdiff1d(np.arange(len(points)), np.arange(100, 140))
    for opened in (gallery, open_gallery(url)):
        items = found_in(opened, points[left], 1)[1][:, 0]
        np.testing.assert_allclose(points[items], points[left], atol=1e-3)
        found = found_in(opened, points[100:140], 10)[1]
        assert len(opened) == len(left) == len(points) - 40 and np.isin(found, left).all()
    assert gallery.classes() == ["even", "odd"] and gallery.has_class("odd")
    assert not gallery.has_class("none") and len(gallery.sample(3)) == 3
    (hits,) = gallery.nearest(points[7:8], 3, ["7.png"])
    assert "7.png" not in hits.ids
    (item,) = gallery.read(["x", gallery.nearest(points[7:8], 1)[0].keys[0]])
    assert item.path == "7.png" and item.label == "even"
    np.testing.assert_allclose(item.point, points[7], rtol=1e-6)
    galleries.check_wrong_points_are_refused(gallery, points, BALL)


def test_a_search_in_a_class_is_exact_and_copies_are_found(url, graphs):
    points = np.repeat(galleries.tree(1.0, 4, levels=5), 4, axis=0)  # Copies.
    images = embeddings(points, BALL)
    images.labels[:] = np.where(np.arange(len(points)) % 97 == 0, "rare", "common")
    _, gallery = export(url, images)
    rare = np.flatnonzero(images.labels == "rare")
    expected = nearest_neighbors(points[:9], points[rare], k=5, space=BALL)[0]
    hits = gallery.nearest(points[:9], 5, label="rare")
    np.testing.assert_allclose([x.distances for x in hits], expected, rtol=1e-5, atol=1e-5)
    assert {label for x in hits for label in x.labels} == {"rare"}
    distances, _ = found_in(gallery, points[::4], 4)
    assert (distances < 1e-5).mean() > 0.98  # Each of the copies.


def test_a_failed_export_adds_nothing_and_others_tables_are_refused(url, monkeypatch):
    points = clusters(BALL, 40)
    _, gallery = export(url, embeddings(points[:30], BALL))
    many = embeddings(points[30:], BALL, first=30)
    many.ids[-1] = "a\0b"  # Refused after the others.
    monkeypatch.setattr(servers, "_UPLOAD_BATCH", 4)
    with pytest.raises(UserError, match="NUL"):
        export(url, many)
    assert len(open_gallery(url)) == len(gallery) == 30
    with pytest.raises(UserError, match="another model"):
        export(url, embeddings(points, BALL, fingerprint="other"))
    with pytest.raises(UserError, match="there is no gallery"):
        open_gallery(url.replace("Birds", "birds"))
    gallery._ask("COMMENT ON TABLE {table} IS 'mine'")
    with pytest.raises(UserError, match="not written by"):
        open_gallery(url)


def test_a_gallery_that_grows_towards_the_boundary_changes_its_index(url, graphs, monkeypatch):
    """Indexes of users stay, and galleries written before texts had a name open."""
    monkeypatch.setattr(servers, "_REPEATED", (10,))
    monkeypatch.setattr(euclidean, "TARGET_RECALL", 1.01)  # As if these candidates were too few.
    points = galleries.tree(1.0, 8, levels=8)
    points = points[np.argsort(euclidean.shells_of(points, BALL), kind="stable")]
    inner = points[euclidean.shells_of(points, BALL) == euclidean.shells_of(points[:1], BALL)]
    _, gallery = export(url, embeddings(inner, BALL))
    assert gallery._kinds() == {False}
    gallery._ask("CREATE INDEX mine ON {table} USING hnsw (point vector_cosine_ops)")
    facts = gallery._load_facts()
    assert facts.count('"noun": "image", ') == 1
    gallery._save_facts(facts.replace('"noun": "image", ', ""))
    said, gallery = export(url, embeddings(points, BALL))
    assert gallery.by_shell and gallery._kinds() == {True} and gallery.noun == "image"
    assert float(said.split("finds ")[1].split("%")[0]) > 98
    gallery._ask("DROP INDEX mine")


@pytest.mark.parametrize("wrong", ["postgresql://localhost/birds", "postgresql://localhost"])
def test_urls_without_a_table_are_refused(wrong):
    with pytest.raises(UserError, match="names no database and table"):
        open_gallery(wrong)


def test_a_server_that_is_away_is_refused():
    with pytest.raises(UserError, match="does not answer .*refused"):
        open_gallery("postgresql://localhost:1/photos/birds")
