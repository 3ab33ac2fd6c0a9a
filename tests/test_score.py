"""The command that scores embeddings, against float64 brute force."""

import dataclasses
import json
import pathlib
import pickle

import numpy as np
import pytest

from hypjax.data.dataset import table_of_names
from hypjax.errors import UserError
from hypjax.geometry import PoincareBall, Sphere
from hypjax.inference.hits import Match, find_hits
from hypjax.inference.scoring import task_of, task_scores
from hypjax.retrieval import query_scores
from hypjax.retrieval.embeddings import Embeddings
from hypjax.retrieval.postprocessing import Postprocessing
from tests.helpers import commands
from tests.helpers.galleries import labelled
from tests.retrieval.test_metrics import NAMES, by_definition

SPHERE = Sphere()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, draw = tmp_path_factory.mktemp("score"), np.random.default_rng(0)
    features = draw.normal(size=(90, 6)) + np.repeat(draw.normal(size=(9, 6)), 10, axis=0)
    labels = np.repeat(np.arange(9), 10)
    np.savez(folder / "f.npz", features=features.astype(np.float32), labels=labels)
    splits = np.where(np.arange(90) % 10 < 3, "query", "gallery")
    splits[labels < 4] = "train"
    np.savez(
        folder / "split.npz", features=features.astype(np.float32), labels=labels, splits=splits
    )
    np.savez(folder / "q.npz", features=features[::10].astype(np.float32))
    np.save(folder / "q.npy", np.arange(9))
    for name in "ab":
        made = Embeddings.from_arrays(features, labels)
        dataclasses.replace(made, fingerprint=name).save(folder / f"{name}.npz")
    return folder


def brute_force(features, labels):
    """Recall@1, MAP@R and R-precision by cosine, from their definitions."""
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    similarities = unit @ unit.T
    np.fill_diagonal(similarities, -np.inf)
    order = np.argsort(-similarities, axis=1, kind="stable")[:, :-1]
    hits = labels[order] == labels[:, None]
    r = hits.sum(axis=1)[0]
    precision = np.cumsum(hits[:, :r], axis=1) / np.arange(1, r + 1)
    return {
        "recall@1": hits[:, 0].mean(),
        "map@r": (precision * hits[:, :r]).sum(axis=1).mean() / r,
        "r_precision": hits[:, :r].mean(),
    }


def test_scores_are_those_of_their_definitions(files, tmp_path, capsys):
    output = tmp_path / "scores.json"
    commands.call("score", f"--embeddings={files}/f.npz", "--ks=1", f"--output={output}")
    table, scores = capsys.readouterr().out.splitlines(), json.loads(output.read_text())
    assert table[0] == "90 queries of 9 classes among themselves, in the sphere:"
    given = np.load(files / "f.npz")
    for name, value in brute_force(given["features"].astype(float), given["labels"]).items():
        assert scores[name] == pytest.approx(value, abs=1e-12)
        low, high = scores["intervals"][name]
        assert low < value < high
        assert any(line.split()[:2] == [name, f"{value:.4f}"] for line in table)
    assert (scores["queries"], scores["items"], scores["space"]) == (90, 90, {"name": "sphere"})


@pytest.mark.slow
def test_spaces_queries_and_splits(files, tmp_path, capsys):
    output = tmp_path / "scores.json"
    given = np.load(files / "split.npz")
    points = np.asarray(PoincareBall(0.5, 1.5).embed(given["features"][:, :3]))
    asked, items = given["splits"] == "query", given["splits"] == "gallery"
    labels = given["labels"]
    expected = query_scores(
        *(points[asked], labels[asked], points[items], labels[items]),
        metrics=["recall@2", "map"],
        space=PoincareBall(0.5, 1.5),
    )
    ball = "--space=ball", "--c=0.5", "--clip_radius=1.5"
    what = "--ks=2", "--metrics=recall,map", "--prefix=3", f"--output={output}"
    commands.call("score", f"--embeddings={files}/split.npz", *ball, *what)
    assert "15 queries of 5 classes among 35, in the ball of c = 0.5:" in capsys.readouterr().out
    scores = json.loads(output.read_text())
    assert {name: scores[name] for name in expected} == {
        name: values.mean() for name, values in expected.items()
    }


def test_a_ground_truth_says_what_is_to_be_found(files, tmp_path, capsys):
    judged = [
        {"bbx": [0, 0, 1, 1], "easy": [10 * i], "hard": [10 * i + 1], "junk": [10 * i + 2]}
        for i in range(9)
    ]
    names = {"qimlist": [f"q{i}" for i in range(9)], "imlist": [f"x{i}" for i in range(90)]}
    (tmp_path / "gnd.pkl").write_bytes(pickle.dumps({"gnd": judged, **names}))
    files_of = f"--embeddings={files}/f.npz", f"--queries={files}/q.npz"
    truth = f"--ground_truth={tmp_path}/gnd.pkl"
    commands.call("score", *files_of, truth, f"--output={tmp_path}/s.json")
    scores = json.loads((tmp_path / "s.json").read_text())
    # Each query is its own easy image.
    assert scores["easy/map"] == 1.0 and 0.5 <= scores["medium/map"] < 1.0
    with pytest.raises(UserError, match="has 9 queries, such as q0, which is not among the 90"):
        commands.call("score", files_of[0], f"--queries={files}/f.npz", truth)


@pytest.mark.parametrize("ids", ["rows", "counts", "paths", "links"])
def test_a_query_that_is_in_the_gallery_does_not_find_itself(files, ids, tmp_path, capsys):
    gallery, rows = np.load(files / "f.npz"), np.arange(0, 90, 2)
    names = np.array([f"{tmp_path}/{i}.jpg" for i in range(90)])
    (tmp_path / "links").mkdir()
    for i, name in enumerate(names):
        pathlib.Path(name).touch()
        (tmp_path / f"links/{i}.jpg").symlink_to(name)
    columns = {name: gallery[name][rows] for name in ("features", "labels")}
    counts = [[f"image {i}" for i in range(count)] for count in (90, 45)]
    links = [f"{tmp_path}/links/{i}.jpg" for i in rows]
    named = {"counts": counts, "paths": (names, names[rows]), "links": (names, links)}.get(ids)
    np.savez(tmp_path / "g.npz", **gallery, **({"ids": named[0]} if named else {}))
    np.savez(tmp_path / "q.npz", **columns, **({"ids": named[1]} if named else {}))
    points = np.asarray(Sphere().embed(gallery["features"]))
    expected = query_scores(points, gallery["labels"], metrics=["recall@1"], space=Sphere())
    where = f"--embeddings={tmp_path}/g.npz", f"--queries={tmp_path}/q.npz"
    output = tmp_path / "s.json"
    commands.call("score", *where, "--ks=1,90", f"--output={output}")
    printed = capsys.readouterr().err
    assert "45 of 45 queries are in the gallery" in printed and "K of 90 is left out" in printed
    scores = json.loads(output.read_text())
    assert scores["recall@1"] == pytest.approx(expected["recall@1"][rows].mean())
    assert "recall@90" not in scores
    commands.call("score", *where, "--ks=1", "--keep_self", f"--output={output}")
    assert json.loads(output.read_text())["recall@1"] == 1.0
    commands.call("score", where[0], f"--queries={tmp_path}/g.npz", f"--output={output}")
    assert json.loads(output.read_text())["recall@1"] == expected["recall@1"].mean()


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
    for postprocessing in (None, Postprocessing(expansion=2)):
        images = table_of_names(names[::3], names[::3], [""] * 30, file_versions=names[::3])
        found = find_hits(queries, images, gallery, 60, postprocessing)
        assert all(hits.query not in hits.paths for hits in found)
    far = find_hits(queries, images, gallery, 5, match=Match(0.0, "validation"))
    remarked = {hits.mark(0): bool(hits.remark) for hits in far}
    assert remarked == {"right": False, "wrong": True, "": True}
    for hits in far:
        if hits.remark:
            assert str(hits).splitlines()[-1] == f"{hits.query}: {hits.remark}"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--embeddings=a.npz --queries=b.npz", "were embedded by different models"),
        ("--embeddings=q.npz", "the classes of 9 of 9 rows are unknown"),
        ("--embeddings=f.npz --ks=90,100", "there are 89 images to find"),
        ("--embeddings=f.npz --metrics=accuracy", "unknown metric 'accuracy'"),
        ("--embeddings=f.npz --labels=q.npy", r"labels .* of shape \[9\]"),
    ],
)
def test_mistakes_are_one_sentence(files, flags, message, monkeypatch):
    monkeypatch.chdir(files)
    with pytest.raises(UserError, match=message):
        commands.call("score", *flags.split())
