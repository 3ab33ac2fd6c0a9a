"""The hierarchies of runs: by the command, and what they are made of."""

import itertools
import json
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from hypjax.analysis.hierarchy import find_hierarchy
from hypjax.analysis.run_embeddings import ChosenImages
from hypjax.analysis.trees import ancestor_tree, ancestors, purity
from hypjax.config import load_config
from hypjax.data.groupings import base_letter, groupings
from hypjax.geometry import PoincareBall, Sphere
from tests.helpers import commands, small_runs
from tests.helpers.pictures import dataset_without_images, write_table

BALL = PoincareBall(0.1, 2.3)


def distances(x, y):
    """Distances in the ball of curvature −0.1."""
    x, y = x.astype(float), y.astype(float)
    squares = np.sum((x[:, None] - y) ** 2, axis=-1)
    scales = np.outer(1 - 0.1 * np.sum(x**2, axis=1), 1 - 0.1 * np.sum(y**2, axis=1))
    return np.arccosh(1 + 0.2 * squares / scales) / 0.1**0.5


def images_of(labels, most=100, seed=0, name="cub200", **fields):
    method = SimpleNamespace(fields={"data.name": name})
    names = [f"image {i}" for i in range(len(labels))]
    splits = SimpleNamespace(test=dataset_without_images(labels, names=names, **fields))
    return ChosenImages.of(SimpleNamespace(method=method, splits=splits), most, seed)


LABELS = [0, 0, 1, 1, 1, 2, 2, 3, 3, 3]
NAMED = np.array(
    [f"{i:03}.{'Red' if i % 2 else 'Blue_footed'}_{'Gull' if i < 2 else 'Wren'}" for i in LABELS]
)


def test_whole_classes_are_chosen_while_they_fit():
    labels = np.repeat(np.arange(20), np.arange(1, 21))
    chosen = images_of(labels)
    classes, counts = np.unique(labels[chosen.indices], return_counts=True)
    assert 80 < counts.sum() <= 100 and counts.tolist() == (classes + 1).tolist()
    large = images_of(np.repeat([0, 1], 50), 20)
    assert len(large.indices) == 20 and large.dataset.num_classes == 2


def test_what_classes_are_grouped_by():
    coarse = np.array(["x", "y"])[np.array(LABELS) // 2]
    paths = np.char.add("A/", coarse)
    images = dataset_without_images(LABELS, class_names=NAMED, coarse_labels=paths)
    birds = groupings("cub200", images)
    names = {name: [group.names[i] for i in group.labels] for name, group in birds.items()}
    genera = [name.split("_")[-1] for name in NAMED]
    levels = {"family": [*coarse], "order": ["A"] * len(coarse)}
    assert names == {"class": [*NAMED], **levels, "genus": genera}
    paths = np.array(["A/x", "A/y", "B/x", "A/y"])
    food = groupings("grocery", dataset_without_images([0, 1, 2, 1], coarse_labels=paths))
    labels = {name: group.labels.tolist() for name, group in food.items()}
    levels = {"coarse class": [0, 1, 2, 1], "department": [0, 0, 1, 0]}
    assert labels == {"class": [0, 1, 2, 1], **levels}
    letters = {"É": "e", "e": "e", "ß": "ss", "ς": "σ", "Ѝ": "и", "ĳ": "ĳ", "ø": "ø"}
    assert {letter: base_letter(f"{letter} NAME") for letter in letters} == letters


@pytest.mark.slow
def test_numbers_are_those_of_loops():
    rng = np.random.default_rng(0)
    points, proxies = (rng.normal(size=(n, 3)).astype("f") for n in (10, 12))
    images = images_of(LABELS, class_names=NAMED)
    hierarchy = find_hierarchy("a", points, BALL, images, proxies)
    near, among = distances(points, proxies), distances(proxies, proxies)
    radius, radii = (distances(x, np.zeros((1, 3)))[:, 0] for x in (points, proxies))
    tree, used = ancestor_tree(ancestors(near, radius, radii), ancestors(among, radii, radii))
    scores, clusters = hierarchy.scores["trees"]
    assert (scores["inner_nodes"], scores["depth"]) == (len(used) + 1, tree.depths[:10].max())
    assert scores["purity"]["class"]["purity"] == pytest.approx(purity(tree, LABELS))
    assert (clusters["tree"], clusters["inner_nodes"]) == ("average linkage", 9)
    nearest = near.argmin(axis=1)
    inside = [radii[p] < np.median(radius[nearest == p]) for p in set(nearest)]
    expected = np.median(radius), np.median(radii[used]), 12, len(used), len(inside)
    expected += np.mean(inside), np.mean([(radii >= r).all() for r in radius])
    assert [*hierarchy.scores["radii"].values()] == pytest.approx(expected)
    in_disk = np.linalg.norm(points, axis=1) * 0.1**0.5
    np.testing.assert_allclose(np.abs(hierarchy.positions[:10]), in_disk)
    for row in hierarchy.leaf_images:
        proxy, size = map(int, re.findall(r"\d+", row[0].title)[:2])
        assert [picture.image for picture in row] == near[:, proxy].argsort().tolist()
        assert sum(picture.colour == "tab:blue" for picture in row) == size
    between = distances(points, points)
    for a, b in itertools.product(range(4), repeat=2):
        of_a, of_b = np.flatnonzero(np.array(LABELS) == a), np.flatnonzero(np.array(LABELS) == b)
        pairs = [between[i, j] for i in of_a for j in of_b if i != j]
        np.testing.assert_allclose(hierarchy.affinity[a, b], np.exp(-np.mean(pairs)), rtol=1e-5)


def test_heights_are_the_lengths_of_paths_in_a_tree_of_clusters():
    points = np.eye(3, dtype="f")[[0, 0, 1, 2]]
    nodes = find_hierarchy("a", points, Sphere(), images_of([0, 0, 1, 2])).nodes
    assert [node.get("height") for node in nodes[4:]] == [0, 2, 2]
    assert [node["length"] for node in nodes[:2]] == [0, 0]
    assert max(node["length"] for node in nodes) == 1


@pytest.mark.slow
def test_shows_the_hierarchies_of_a_run(photos_folder, tmp_path, capsys):
    """A run of HIER with random weights: hierarchies need no training."""
    paths = [(str(path), path.parent.name) for path in sorted(photos_folder.glob("*/*.png"))]
    rows = [{"path": p, "label": name, "coarse_label": int(name[-1]) % 2} for p, name in paths]
    table, folder = write_table(tmp_path / "photos.csv", rows), tmp_path / "found"
    fields = [*small_runs.SMALL, f"data.path={table}", "data.test_classes=6"]
    fields += ["data.validation_classes=0", "objective.name=hier+supcon"]
    fields += ["objective.hier_proxies=6", "objective.hier_neighbors=4", "objective.space=poincare"]
    best = small_runs.save_untrained(load_config(small_runs.CONFIG, fields), tmp_path / "hier")
    run = f"--workdir={tmp_path / 'hier'}"
    commands.call("hierarchy", run, f"--output={folder}", "--images=30")
    assert capsys.readouterr().out.startswith("trees of 30 of 36 test images, 5 of 6 classes:")
    files = {"tree.json", "affinity.png", "disk.png", "leaves.png"}
    assert {path.name for path in folder.rglob("*")} >= files
    (nodes,) = [json.loads(path.read_text()) for path in folder.rglob("tree.json")]
    (run,) = json.loads((folder / "hierarchy.json").read_text(), parse_constant=pytest.fail)["runs"]
    assert set(run["trees"][0]["separation"]) == {"super-class"}
    assert run["known_hierarchy"]["wrong_first_hits"]["queries"] == 30
    proxies = np.asarray(jax.jit(BALL.embed)(best["training"]["objective"]["hierarchy"]))
    radii = distances(proxies, np.zeros((1, 8)))[:, 0]
    for node in nodes[:-1]:
        assert node["radius"] > nodes[node["parent"]]["radius"]
        if node["kind"] == "proxy":
            proxy = int(node["name"].removeprefix("proxy "))
            assert node["radius"] == pytest.approx(radii[proxy], rel=1e-5)
