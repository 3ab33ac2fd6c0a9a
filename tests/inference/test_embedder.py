"""Embedding and searching a user's images."""

import dataclasses
import itertools
import pathlib
import shutil

import jax
import numpy as np
import pytest

from hypjax.assemble import assemble, saved_experiment
from hypjax.data.photos import find_images, given_images
from hypjax.errors import UserError
from hypjax.experiment.trained import restore, restore_best
from hypjax.galleries.embeddings import Embeddings
from hypjax.geometry import Sphere
from hypjax.inference.model import load
from hypjax.retrieval import query_scores
from hypjax.retrieval.postprocessing import Postprocessing, Reranking, expand_queries, rerank
from hypjax.retrieval.projection import fit
from hypjax.runs.workdir import saved_config
from hypjax.system.array_cache import ArrayCache
from hypjax.system.files import locked
from tests.helpers import commands
from tests.helpers.process_pair import python
from tests.helpers.small_runs import copy_with


@pytest.fixture(scope="module")
def embedder(run):
    return load(run)


@pytest.fixture(scope="module")
def gallery(embedder, photos_folder):
    return embedder.gallery(photos_folder)


def test_embeds_then_finds_then_draws(run, photos_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(photos_folder, "photos")
    pathlib.Path("photos/class1/broken.jpg").write_text("no image")
    where = f"--workdir={run}"
    commands.call("embed", where, "--images=photos", "--output=g.npz", "--export=parquet")
    printed = capsys.readouterr().out
    assert "wrote the embeddings of 60 images to g.npz" in printed
    assert "broken.jpg (not an image)" in printed and pathlib.Path("g.parquet").exists()
    query = "--query=photos/class3/2.png"
    commands.call("search", where, "--gallery=g.npz", query, "--k=5", "--output=hits.png")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    _, distances, marks, paths = zip(*(line[:4] for line in lines[2:7]), strict=True)
    assert "photos/class3/2.png" not in paths and pathlib.Path("hits.png").exists()
    assert [mark == "right" for mark in marks] == ["class3" in path for path in paths]
    assert [*distances] == sorted(distances, key=float) and float(distances[0]) > 0
    commands.call("search", where, "--gallery=g.npz", query, "--k=1", "--keep_self")
    assert capsys.readouterr().out.count("photos/class3/2.png") == 2
    commands.call("search", where, "--gallery=g.npz", "--query=photos/class1/*", "--k=1")
    printed = capsys.readouterr()
    assert printed.out.count("rank") == 6
    assert "broken.jpg (not an image); the other" in printed.err
    with pytest.raises(UserError, match="cannot read .*broken.jpg"):
        commands.call("search", where, "--gallery=g.npz", "--query=photos/class1/broken.jpg")


def test_galleries_of_other_views_or_scales_have_other_fingerprints(run, tmp_path):
    changes = [{}, {"data.test_view": "squash"}, {"eval.scales": [1.0, 0.5]}]
    runs = [copy_with(run, tmp_path / str(i), fields) for i, fields in enumerate(changes)]
    assert len({load(run).fingerprint for run in runs}) == 3


def embed_two_batches(embedder, path, images):
    batches = embedder.batches

    def interrupted(dataset, few):
        yield from itertools.islice(batches(dataset, few=few), 2)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(embedder, "batches", interrupted)
        embedder.embed_to(path, images)


def test_embedding_resumes_after_an_interrupt(embedder, photos_folder, tmp_path, monkeypatch):
    paths = find_images(str(photos_folder)).names.tolist()
    broken = tmp_path / "broken.png"
    broken.write_text("no image")
    images = given_images([*paths[:5], str(broken), *paths[5:]])
    whole = embedder.embed_to(tmp_path / "whole.npz", images)
    batches, seen = embedder.batches, []
    embed_two_batches(embedder, tmp_path / "g.npz", images)
    assert not (tmp_path / "g.npz").exists()
    counting = lambda dataset, few: (seen.append(len(dataset)), batches(dataset))[1]  # noqa: E731
    monkeypatch.setattr(embedder, "batches", counting)
    resumed = embedder.embed_to(tmp_path / "g.npz", images)
    assert seen == [61 - 32]
    np.testing.assert_array_equal(resumed.ids, whole.ids)
    np.testing.assert_allclose(resumed.vectors, whole.vectors, atol=1e-6)
    assert resumed.unreadable == whole.unreadable == {str(broken): "not an image"}
    with locked(tmp_path / "g.npz", beside=True):
        with pytest.raises(UserError, match="in use by process .*--output"):
            embedder.embed_to(tmp_path / "g.npz", images)
    assert {x.name for x in tmp_path.iterdir()} == {"broken.png", "whole.npz", "g.npz"}


def test_a_file_of_other_images_or_another_model_is_neither_replaced_nor_resumed(
    run, embedder, gallery, photos_folder, tmp_path
):
    photos, path = find_images(str(photos_folder)), tmp_path / "g.npz"
    renamed = dataclasses.replace(photos, class_names=np.array(["x", *photos.class_names[1:]]))
    rolled = photos.take(np.roll(np.arange(len(photos)), 1))
    for model, images in ((embedder, renamed), (embedder, rolled), (load(run, "encoder"), photos)):
        gallery.save(path)
        with pytest.raises(UserError, match="exists already"):
            model.embed_to(path, images)
        path.unlink()
        embed_two_batches(embedder, path, photos)
        expected = model.embed_images(images).vectors
        np.testing.assert_array_equal(model.embed_to(path, images).vectors, expected)


def test_a_projection_of_another_model_is_not_used(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    for path in (tmp_path / "run/projections").iterdir():
        fingerprint = path.stem.removeprefix("encoder-")
        path.rename(path.with_stem(f"encoder-{fingerprint[::-1]}"))
    with pytest.raises(UserError, match="holds no projection of the embeddings 'encoder'"):
        load(tmp_path / "run", "encoder")


def test_another_models_gallery_is_refused(run, gallery, photos_folder):
    with pytest.raises(UserError, match=r"embedded by .*run \(head\), not by .*run \(encoder\)"):
        load(run, "encoder").search(gallery, photos_folder / "class1/1.png", 3)


def test_galleries_and_evaluation_compute_the_same_points(run):
    opened, model = saved_experiment(run), load(run, engine="jax")
    images, spaces = opened.splits.test, {"head": model.space}
    expected = opened.embedder.points(model.params, images, spaces)["head"]
    np.testing.assert_array_equal(model.embed_images(images).vectors, expected)


@pytest.mark.slow
def test_each_model_has_its_own_projection(run, photos_folder, tmp_path):
    opened = saved_experiment(run)
    saved = {path.name for path in (run / "projections").iterdir()}
    models = restore(run, opened.method)
    prints = {x: opened.method.fingerprint(y.params, "encoder") for x, y in models.items()}
    assert saved == {f"encoder-{value}.npz" for value in prints.values()}
    encoder = load(run, "encoder")
    photos = find_images(str(photos_folder))
    got = encoder.embed_images(photos, few=True).vectors
    copy_with(run, tmp_path / "plain", {}, removed=["eval.pca.encoder"])
    plain = load(tmp_path / "plain", "encoder")
    assert plain.fingerprint == prints["best"] != encoder.fingerprint
    vectors = plain.embed_images(photos, few=True).vectors
    spaces = {"encoder": Sphere()}
    training = opened.embedder.points(models["best"].params, opened.splits.train, spaces)["encoder"]
    expected = fit(training, space=Sphere(), dim=5).apply(vectors)
    assert got.shape == (60, 5)
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.slow
def test_scores_are_of_postprocessed_searches(run):
    config = saved_config(run)
    config.eval.expansion, config.eval.rerank = 2, True
    opened = assemble(config, parts=["encoder"])
    params = restore_best(run, opened.method).params
    splits, spaces = opened.splits, {"encoder": Sphere()}
    projection = opened.projections(params)["encoder"]
    x = projection.apply(opened.embedder.points(params, splits.test, spaces)["encoder"])
    options = {"space": Sphere(), "postprocessing": Postprocessing(2, 0.0, Reranking())}
    expected = query_scores(x, splits.test.labels, metrics=["recall@1", "recall@2"], **options)
    got = opened.scores(params, splits.task)
    assert got == {"encoder": {name: scores.mean() for name, scores in expected.items()}}


def test_postprocessed_searches_agree_with_the_gallery(embedder, gallery, photos_folder):
    query = photos_folder / "class1/1.png"
    (hits,) = embedder.search(gallery, query, 4, Postprocessing(3, 1.0, Reranking()))
    own = np.array([gallery.ids.tolist().index(str(query))])
    x, space = gallery.vectors, gallery.space
    expanded = expand_queries(x[own], x, k=3, alpha=1.0, space=space, own_ids=own)
    distances, ids = rerank(expanded, x, space=space, own_ids=own)
    assert hits.paths == gallery.ids[ids[0, :4]].tolist()
    np.testing.assert_allclose(hits.distances, distances[0, :4], atol=1e-6)


def test_embeddings_that_are_not_finite_are_not_saved(
    embedder, photos_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(embedder, "_embedders", {})
    last = jax.tree.leaves(embedder.params)[-1]
    params = jax.tree.map(lambda x: x * np.nan if x is last else x, embedder.params)
    monkeypatch.setattr(embedder, "params", params)
    with pytest.raises(UserError, match=r"class0/0.png is not finite: the weights are damaged"):
        embedder.embed_to(tmp_path / "g.npz", find_images(str(photos_folder)))
    assert not list(tmp_path.iterdir())


def test_what_a_disk_damages_before_it_is_saved_is_embedded_again(
    embedder, photos_folder, tmp_path, monkeypatch
):
    images, table, damaged = find_images(str(photos_folder)), ArrayCache.table, []

    def table_of_damaged(cache, dtype):
        if not damaged:
            arrays = bytearray((cache.folder / "arrays").read_bytes())
            arrays[7] ^= 1
            (cache.folder / "arrays").write_bytes(arrays)
            damaged.append(cache.folder)
        return table(cache, dtype)

    monkeypatch.setattr(ArrayCache, "table", table_of_damaged)
    vectors = embedder.embed_to(tmp_path / "g.npz", images).vectors
    assert damaged and [path.name for path in tmp_path.iterdir()] == ["g.npz"]
    np.testing.assert_array_equal(vectors, embedder.embed_images(images).vectors)


@pytest.mark.slow
def test_several_devices_embed_the_same_bit_for_bit(run, photos_folder, tmp_path):
    shutil.copytree(photos_folder, tmp_path / "photos")
    (tmp_path / "photos/class1/broken.jpg").write_text("no image")
    where = f"--images={tmp_path}/photos", f"--workdir={run}"
    commands.call("embed", *where, f"--output={tmp_path}/one.npz")
    three = f"--output={tmp_path}/three.npz"
    python("-m", "hypjax.embed", *where, three, devices=3).check_returncode()
    with np.load(tmp_path / "one.npz") as one, np.load(tmp_path / "three.npz") as three:
        assert all(np.array_equal(one[name], three[name]) for name in one.files)
    assert len(Embeddings.load(tmp_path / "three.npz").unreadable) == 1
