"""The command that scores embeddings, against float64 brute force."""

import dataclasses
import json
import pathlib
import pickle
import unicodedata

import numpy as np
import pytest

from hypjax.analysis import hit_grid
from hypjax.data.dataset import table_of_names
from hypjax.data.photos import find_images
from hypjax.errors import UserError
from hypjax.experiment.scoring import task_of, task_scores
from hypjax.galleries.embeddings import Embeddings
from hypjax.geometry import PoincareBall, Sphere
from hypjax.inference.hits import find_hits
from hypjax.retrieval import graded_scores, metrics, query_scores
from hypjax.retrieval.postprocessing import Postprocessing, Reranking
from tests.helpers import commands
from tests.helpers.galleries import labelled
from tests.retrieval.test_metrics import NAMES, by_definition

SPHERE = Sphere()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, draw = tmp_path_factory.mktemp("score"), np.random.default_rng(0)
    features = draw.normal(size=(90, 6)) + np.repeat(draw.normal(size=(9, 6)), 10, axis=0)
    features, labels = features.astype(np.float32), np.repeat(np.arange(9), 10)
    np.savez(folder / "f.npz", features=features, labels=labels)
    splits = np.where(np.arange(90) % 10 < 3, "query", "gallery")
    splits[labels < 4] = "train"
    np.savez(folder / "split.npz", features=features, labels=labels, splits=splits)
    np.savez(folder / "q.npz", features=features[::10])
    np.save(folder / "q.npy", np.arange(9))
    for name in "ab":
        made = Embeddings.from_arrays(features, labels)
        dataclasses.replace(made, fingerprint=name).save(folder / f"{name}.npz")
    return folder


def test_scores_are_those_of_the_searches_with_intervals(files, tmp_path, capsys):
    saved, space = np.load(files / "split.npz"), PoincareBall(0.5, 1.5)
    points, labels = np.asarray(space.embed(saved["features"])), saved["labels"]
    q, g = saved["splits"] == "query", saved["splits"] == "gallery"
    embeddings = points[q], labels[q], points[g], labels[g]
    expected = query_scores(*embeddings, metrics=["recall@2", "map"], space=space)
    flags = "--space=ball", "--c=0.5", "--clip_radius=1.5", "--ks=2", "--metrics=recall,map"
    commands.call("score", f"--embeddings={files}/split.npz", *flags, f"--output={tmp_path}/s.json")
    title, *table = capsys.readouterr().out.splitlines()
    assert title == "15 queries of 5 classes among 35, in the ball of c = 0.5:"
    scores = json.loads((tmp_path / "s.json").read_text())
    assert (scores["queries"], scores["items"], scores["space"]["c"]) == (15, 35, 0.5)
    for name, values in expected.items():
        low, high = scores["intervals"][name]
        assert low < scores[name] == values.mean() < high
        assert any(line.split()[:2] == [name, f"{values.mean():.4f}"] for line in table)


def test_a_ground_truth_says_what_is_to_be_found(files, tmp_path, capsys):
    truth = [{"easy": [10 * i], "hard": [10 * i + 1], "junk": [10 * i + 2]} for i in range(9)]
    truth = [{"bbx": [0, 0, 1, 1], **of_query} for of_query in truth]
    names = {"qimlist": [f"q{i}" for i in range(9)], "imlist": [f"x{i}" for i in range(90)]}
    (tmp_path / "gnd.pkl").write_bytes(pickle.dumps({"gnd": truth, **names}))
    flags = f"--embeddings={files}/f.npz", f"--ground_truth={tmp_path}/gnd.pkl"
    commands.call("score", *flags, f"--queries={files}/q.npz", f"--output={tmp_path}/s.json")
    scores = json.loads((tmp_path / "s.json").read_text())
    # Each query is its own easy image.
    assert scores["easy/map"] == 1.0 and 0.5 <= scores["medium/map"] < 1.0
    with pytest.raises(UserError, match="asi needs labels, but"):
        commands.call("score", *flags, f"--queries={files}/q.npz", "--metrics=asi")
    with pytest.raises(UserError, match="has 9 queries, such as q0, which is not among the 90"):
        commands.call("score", *flags, f"--queries={files}/f.npz")
    features = np.load(files / "f.npz")["features"]
    paths = np.array([f"{i % 2}/x{i // 2}.jpg" for i in range(90)])
    np.savez(tmp_path / "f.npz", features=features, labels=np.arange(90), ids=paths)
    names["imlist"] = names["imlist"][:45]
    truth = [{**of_query, "easy": [0], "hard": [], "junk": []} for of_query in truth]
    (tmp_path / "gnd.pkl").write_bytes(pickle.dumps({"gnd": truth, **names}))
    with pytest.raises(UserError, match="2 embeddings are of files named x0, which a ground"):
        ids = np.array(names["qimlist"])
        np.savez(tmp_path / "q.npz", features=features[:9], labels=np.arange(9), ids=ids)
        files = f"--embeddings={tmp_path}/f.npz", f"--queries={tmp_path}/q.npz"
        commands.call("score", *files, flags[1])


def test_coarse_labels_of_another_file_give_graded_scores(files, tmp_path):
    saved, rows = np.load(files / "f.npz"), range(90)
    coarse = [("AB"[i // 50], "AB"[i // 50] + f"/{i // 20}") for i in rows]
    np.save(tmp_path / "x.npy", saved["features"])
    np.save(tmp_path / "y.npy", saved["labels"])
    (tmp_path / "c.txt").write_text("\n".join(name for _, name in coarse))
    levels = [saved["labels"].astype(str), *np.array(coarse).T[::-1]]
    expected = graded_scores(SPHERE.embed(saved["features"]), levels, space=SPHERE)
    flags = f"--embeddings={tmp_path}/x.npy", f"--labels={tmp_path}/y.npy"
    flags += f"--coarse_labels={tmp_path}/c.txt", f"--output={tmp_path}/s.json"
    commands.call("score", *flags, "--ks=1")
    scores = json.loads((tmp_path / "s.json").read_text())
    assert list(scores)[:6] == ["recall@1", "map@r", "r_precision", "h_ap", "ndcg", "asi"]
    for name, values in expected.items():
        low, high = scores["intervals"][name]
        assert low < scores[name] < high and scores[name] == values.mean()
    queries = f"--queries={files}/q.npz", f"--query_labels={files}/q.npy"
    with pytest.raises(UserError, match="some rows have coarse labels and others have none"):
        commands.call("score", *flags, *queries, "--metrics=h_ap")
    commands.call("score", *flags[:2], flags[-1], "--metrics=asi")  # One level.
    assert 0 < json.loads((tmp_path / "s.json").read_text())["asi"] < 1


def test_a_query_that_is_in_the_gallery_does_not_find_itself(files, tmp_path, capsys):
    gallery, rows = np.load(files / "f.npz"), np.arange(0, 90, 2)
    queries = {name: gallery[name][rows] for name in ("features", "labels")}
    np.savez(tmp_path / "q.npz", **queries)
    points = np.asarray(Sphere().embed(gallery["features"]))
    recalls = query_scores(points, gallery["labels"], metrics=["recall@1"], space=Sphere())
    recalls = recalls["recall@1"]

    def recall(queries, *flags):
        where = f"--embeddings={files}/f.npz", f"--queries={queries}"
        commands.call("score", *where, *flags, f"--output={tmp_path}/s.json")
        scores = json.loads((tmp_path / "s.json").read_text())
        assert "recall@90" not in scores
        return scores["recall@1"]

    assert recall(tmp_path / "q.npz", "--ks=1,90") == pytest.approx(recalls[rows].mean())
    printed = capsys.readouterr().err
    assert "find themselves: 45 of 45" in printed and "no scores at K of 90" in printed
    assert recall(tmp_path / "q.npz", "--ks=1", "--keep_self") == 1.0
    assert recall(files / "f.npz") == recalls.mean()


def test_a_query_finds_no_copy_of_its_file():
    """Some rows of the gallery are copies, of a query's class or another one."""
    x, labels = labelled(SPHERE, 90, 6)
    rows = np.array([*range(60), 0, 0, 5, 7])
    classes = np.array([*labels[:60], labels[0], labels[1] + 1, labels[5], labels[7]]).astype(str)
    names = np.array([f"/{i}.jpg" for i in range(90)])
    gallery = Embeddings(x[rows], names[rows], classes, SPHERE)
    queries = Embeddings(x[::3], names[::3], labels[::3].astype(str), SPHERE)
    task = task_of(gallery, queries)
    assert task.own_rows[0] == [0, 60, 61] and task.own_rows[29] == [] and task.num_items == 61
    scores = task_scores(task, queries.vectors, gallery.vectors, metrics=NAMES, space=SPHERE)
    distances = np.asarray(SPHERE.distance_matrix(queries.vectors, gallery.vectors), np.float64)
    for i, row in enumerate(distances):
        order = np.argsort(row, kind="stable")
        hits = classes[order[gallery.ids[order] != queries.ids[i]]] == queries.labels[i]
        for name in NAMES:
            expected = by_definition(name, hits, hits.sum())
            assert scores[name][i] == pytest.approx(expected, abs=1e-12), (name, i)
    images = table_of_names(names[::3], names[::3], [""] * 30, file_versions=names[::3])
    for postprocessing in (Postprocessing(), Postprocessing(expansion=2)):
        searches = find_hits(queries, images, gallery, 60, postprocessing)
        assert all(hits.query not in hits.paths for hits in searches)


def test_classes_of_two_files_are_compared_in_one_unicode_form(capsys):
    x, labels = labelled(SPHERE, 60, 3)
    names = np.array(["Café", "Müsli", "CAFÉ"])[labels]
    written = np.array([unicodedata.normalize("NFD", name) for name in names])
    gallery = Embeddings.from_arrays(x, names)
    task = task_of(gallery, Embeddings.from_arrays(x, written), keep_self=True)
    metrics = {"metrics": ["map@r", "recall@1"], "space": SPHERE}
    scores = task_scores(task, x, x, **metrics)
    expected = query_scores(x, labels, x, labels, **metrics)
    np.testing.assert_array_equal(scores["map@r"], expected["map@r"])
    said = unicodedata.normalize("NFC", capsys.readouterr().err)
    assert "case: 1, such as CAFÉ and Café" in said
    images = table_of_names(written, written, written)
    (hits, *_) = find_hits(task.queries, images, gallery, 1)
    assert hits.mark(0) == "right" and hits.label == written[0]
    assert gallery.has_class(written[0]) and gallery.classes() == sorted({*names})
    assert {*gallery.nearest(x[:1], 5, label=written[0])[0].labels} == {names[0]}


@pytest.mark.parametrize("options", [{}, {"expansion": 9}, {"reranking": Reranking()}])
@pytest.mark.parametrize("size", [1, 3])
def test_a_small_gallery_returns_all_of_its_images(size, options, tmp_path, figures):
    """A query that is in the gallery finds one image less than another query."""
    x, names = labelled(SPHERE, 4, 2)[0], np.array(["a.jpg", "b.jpg", "c.jpg", "new.jpg"])
    gallery = Embeddings(x[:size], names[:size], np.full(size, "x"), SPHERE)
    queries = Embeddings(x[::3], names[::3], np.full(2, ""), SPHERE)
    images = table_of_names(names[::3], names[::3], [""] * 2, file_versions=names[::3])
    searches = find_hits(queries, images, gallery, 10, Postprocessing(**options))
    found = [sorted(hits.paths) for hits in searches]
    assert found == [names[1:size].tolist(), names[:size].tolist()]
    hit_grid.draw(searches, tmp_path / "hits.png")
    shown = [bool(axis.axison) for axis in figures[0].axes]
    assert shown == [True] * size + [False] + [True] * (size + 1)


def test_rows_of_one_file_are_images_of_their_own(tmp_path):
    """The gallery holds an image that equals a query, and has the query's class."""
    x, labels = labelled(SPHERE, 40, 5)
    x[30], labels[30] = x[0], labels[0]
    splits = np.where(np.arange(40) < 20, "query", "gallery")
    np.savez(tmp_path / "f.npz", features=x, labels=labels, splits=splits)
    task = task_of(Embeddings.load(tmp_path / "f.npz"))
    assert not any(task.own_rows)
    scores = task_scores(
        task, task.queries.vectors, task.gallery.vectors, metrics=["recall@1"], space=SPHERE
    )
    assert scores["recall@1"][0] == 1.0


def test_images_that_search_each_other_do_not_find_links_to_their_files(tmp_path, capsys):
    x, labels = labelled(SPHERE, 30, 3, noise=2.0)
    names = [str(tmp_path / f"{i}.jpg") for i in range(30)]
    for name in names:
        pathlib.Path(name).touch()
    links = [str(tmp_path / f"link-{i}.jpg") for i in range(30)]
    for link, name in zip(links, names, strict=True):
        pathlib.Path(link).symlink_to(name)
    doubled = Embeddings(*map(np.concatenate, ([x, x], [names, links], [labels, labels])), SPHERE)
    doubled = dataclasses.replace(doubled, labels=doubled.labels.astype(str))
    task = task_of(doubled)
    assert "do not find each other: 60 of 60" in capsys.readouterr().err
    assert task.num_items == 58 and task_of(doubled, keep_self=True).num_items == 59
    found = task_scores(task, doubled.vectors, None, metrics=["recall@1"], space=SPHERE)
    expected = query_scores(x, labels, metrics=["recall@1"], space=SPHERE)
    np.testing.assert_array_equal(found["recall@1"], np.tile(expected["recall@1"], 2))


@pytest.mark.parametrize("options", [{}, {"expansion": 3}, {"reranking": Reranking(6, 3)}])
def test_queries_of_the_gallery_are_scored_as_if_it_searched_itself(options, monkeypatch):
    """In another order, so that the rows must be found; without ranking all matches."""
    x, labels = labelled(SPHERE, 80, 6)
    gallery = Embeddings(x, np.array([f"{i + 7}" for i in range(80)]), labels.astype(str), SPHERE)
    order = np.random.default_rng(0).permutation(80)
    queries = gallery.take(order)
    options = {"space": SPHERE, "postprocessing": Postprocessing(**options)}
    expected = query_scores(x, labels, metrics=NAMES, **options)
    quick = [name for name in NAMES if name != "map"]
    for metrics_of, how in ((NAMES, None), (quick, "_scores_of_all")):
        with monkeypatch.context() as patch:
            if how:
                patch.setattr(metrics, how, None)
            task = task_of(gallery, queries)
            found = task_scores(task, queries.vectors, x, metrics=metrics_of, **options)
        for name in metrics_of:
            np.testing.assert_allclose(found[name], expected[name][order], rtol=1e-12)


def test_features_without_ids_do_not_find_themselves(files, capsys):
    gallery, images = Embeddings.load(files / "f.npz"), find_images(str(files / "f.npz"))
    queries = Embeddings.from_arrays(images.vectors)
    named = dataclasses.replace(images, class_names=np.full(90, "x", object))
    find_hits(queries, named, gallery, 1)
    assert "no query's class is in the gallery" in capsys.readouterr().err
    for keep_self, nearest in ((False, None), (True, [str(i) for i in range(90)])):
        hits = find_hits(queries, images, gallery, 1, keep_self=keep_self)
        rows = [found.paths[0] for found in hits]
        assert rows == nearest or not any(row == str(i) for i, row in enumerate(rows))
        assert (rows == nearest) == keep_self


@pytest.mark.parametrize(
    ("labels", "flags", "line"),
    [
        ([*"aabb", "nan", "nan"], [], "classes named 'nan' (2 rows)"),
        (["1"] * 6, [], "all images are of one class"),
        (np.arange(6) % 3 + 7, [], "a column of features of "),
        (list("aabbbb"), ["--space=ball"], "they rank as on the sphere"),
    ],
)
def test_what_makes_scores_doubtful_is_said(tmp_path, capsys, labels, flags, line):
    features = np.stack([np.arange(6) + 4.5, np.arange(6) % 3 + 7], axis=1)
    np.savez(tmp_path / "f.npz", features=features, labels=labels)
    commands.call("score", f"--embeddings={tmp_path}/f.npz", *flags)
    printed = capsys.readouterr()
    assert line in printed.err and "among themselves, " in printed.out


def test_mistakes_are_one_sentence(files, monkeypatch):
    monkeypatch.chdir(files)
    for flags, message in (
        ("--embeddings=a.npz --queries=b.npz", "were embedded by different models"),
        ("--embeddings=q.npz", r"the classes of 9 of 9 rows are unknown.*\?label="),
        ("--embeddings=f.npz --ks=90,100", "smallest of --ks is 90, .* only 89 images"),
        ("--embeddings=f.npz --metrics=accuracy", "unknown metric 'accuracy'"),
        ("--embeddings=f.npz --labels=q.npy", r"labels .* the shape \[9\] instead of \[90\]"),
    ):
        with pytest.raises(UserError, match=message):
            commands.call("score", *flags.split())
