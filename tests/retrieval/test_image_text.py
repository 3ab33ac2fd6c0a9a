"""Scores of images and texts against loops in float64 and against values by hand."""

import itertools

import numpy as np
import pytest
from scipy.stats import kendalltau

from hypjax.errors import UserError
from hypjax.geometry import Lorentz, PoincareBall, Sphere
from hypjax.retrieval import image_text, recall_at_k
from hypjax.retrieval.label_trees import LabelTree, tree_scores
from tests.helpers.exact_order import keys, true_order
from tests.helpers.galleries import points

SPACES = [Sphere(), PoincareBall(0.5, 2.3), Lorentz(2.0, None, 0.7)]
every_space = pytest.mark.parametrize("space", SPACES, ids=str)


def root_of(space, dim=5):
    return points(space, 9, 1, dim)[0] if space.normalized else np.zeros(dim, np.float32)


def radii_of(space, texts):
    """Distances from the root, by the formulas of each space in float64."""
    norms = np.linalg.norm(texts.astype(np.float64), axis=1)
    if space.normalized:
        return np.linalg.norm(texts.astype(np.float64) - root_of(space), axis=1)
    root_c = space.c**0.5
    if isinstance(space, Lorentz):
        return np.arcsinh(root_c * norms) / root_c
    return 2 * np.arctanh(root_c * norms) / root_c


@every_space
def test_zero_shot_accuracy_is_a_mean_over_classes(space):
    images, classes = points(space, 0, 60), points(space, 1, 9)
    classes[7] = classes[3]  # Equally far: the first counts.
    labels = np.array([3, 7, 5, 8, 0])[np.random.default_rng(0).integers(0, 5, 60) ** 2 // 4]
    scores, predicted = image_text.zero_shot_scores(images, labels, classes, space=space)
    order = true_order(space, images, classes)
    np.testing.assert_array_equal(predicted, order[:, 0])
    assert 7 not in predicted
    for k, name in ((1, "accuracy"), (5, "accuracy@5")):
        hits = [label in row[:k] for row, label in zip(order, labels, strict=True)]
        shares = [
            np.mean([h for h, x in zip(hits, labels, strict=True) if x == label])
            for label in {*labels.tolist()}
        ]
        np.testing.assert_allclose(scores[name], np.mean(shares), rtol=1e-12)
    np.testing.assert_allclose(scores["image_accuracy"], np.mean(order[:, 0] == labels))


def test_a_rare_class_counts_as_much_as_a_frequent_one():
    x = np.eye(3, dtype=np.float32)
    images, labels = x[[0, 0, 0, 1, 0]], np.array([0, 0, 0, 1, 2])
    scores, _ = image_text.zero_shot_scores(images, labels, x, space=Sphere())
    assert scores == pytest.approx({"accuracy": 2 / 3, "accuracy@5": 1, "image_accuracy": 0.8})


@every_space
def test_an_image_hits_if_any_of_its_captions_is_found(space):
    images, texts = points(space, 0, 20), points(space, 1, 50)
    texts[30:35], images[5] = texts[:5], images[4]
    image_of_text = np.append(np.random.default_rng(0).permutation(20), np.arange(30) % 20)
    pairs = (images, np.arange(20)), (texts, image_of_text)
    to_texts = recall_at_k(*pairs[0], *pairs[1], ks=(1, 5, 10), space=space)
    to_images = recall_at_k(*pairs[1], *pairs[0], ks=(1, 5, 10), space=space)
    found = image_of_text[true_order(space, images, texts)]
    images_found = true_order(space, texts, images)
    for k in (1, 5, 10):
        to_text = np.mean([i in row[:k] for i, row in enumerate(found)])
        to_image = np.mean([image_of_text[i] in row[:k] for i, row in enumerate(images_found)])
        assert to_texts[k] == pytest.approx(to_text)
        assert to_images[k] == pytest.approx(to_image)


def hierarcaps(images, texts, chains, image_of_chain, radii, separations):
    """Precision, recall and d_corr, transcribed from the paper with sets of texts."""
    precisions, recalls = [], []
    for image in range(len(images)):
        found = set()
        for threshold in np.linspace(radii.min(), radii.max(), 50):
            within = [text for text in range(len(texts)) if radii[text] <= threshold]
            found.add(min(within, key=lambda text: (separations[image][text], text)))
        own = [
            c for c, owner in zip(chains.tolist(), image_of_chain, strict=True) if owner == image
        ]
        precisions.append(len(found & {*itertools.chain(*own)}) / len(found))
        levels = zip(*own, strict=True)
        recalls.append(np.mean([not found.isdisjoint(texts) for texts in levels]))
    d_corr = np.mean([kendalltau(radii[chain], (1, 2, 3, 4))[0] for chain in chains])
    return {"precision": np.mean(precisions), "recall": np.mean(recalls), "d_corr": d_corr}


@every_space
def test_hierarchical_retrieval_is_that_of_its_definition(space):
    rng = np.random.default_rng(0)
    images, texts = points(space, 0, 12), points(space, 1, 40)
    # Texts near an image's, so that some are found; general texts belong to several images.
    chains = np.concatenate([rng.integers(0, 8, (14, 1)), rng.integers(8, 40, (14, 3))], axis=1)
    image_of_chain = np.append(np.arange(12), [3, 3])
    images[:6] = texts[chains[:6, 3]]
    actual = image_text.hierarcaps_scores(
        images, texts, chains, image_of_chain, root_of(space), space=space
    )
    separations = [keys(space, image, texts) for image in images]
    expected = hierarcaps(
        images, texts, chains, image_of_chain, radii_of(space, texts), separations
    )
    assert actual == pytest.approx(expected)
    assert 0 < actual["precision"] < 1 and 0 < actual["recall"] < 1


def test_a_perfect_hierarchy_has_full_scores():
    """Chains on rays from the origin, each image at its end: the walk finds all of them."""
    directions = np.eye(3, dtype=np.float32)
    texts = np.concatenate([radius * directions for radius in (0.1, 1, 2, 4)])
    chains = np.arange(12).reshape(4, 3).T
    arguments = 5 * directions, texts, chains, np.arange(3), np.zeros(3, np.float32)
    scores = image_text.hierarcaps_scores(*arguments, space=Lorentz(1.0, None))
    assert scores == {"precision": 1, "recall": 1, "d_corr": 1}
    reverse = image_text.hierarcaps_scores(
        texts[:3], texts, chains[:, ::-1], *arguments[3:], space=Lorentz(1.0, None)
    )
    assert reverse["d_corr"] == -1 and reverse["recall"] == 0.25


def traversal(image, texts, c):
    """MERU's walk on the hyperboloid, by the paper's formulas in float64."""
    image, texts = np.float64(image), np.vstack([texts, 0 * image]).astype(np.float64)

    def time(x):
        return np.sqrt(1 / c + np.sum(x * x, axis=-1))

    norm = np.linalg.norm(image)
    tangent = np.arcsinh(c**0.5 * norm) / c**0.5 * image / norm
    found = []
    for weight in np.linspace(1, 0, 50):
        r = c**0.5 * np.linalg.norm(weight * tangent)
        y = np.sinh(r) / max(r, 1e-8) * weight * tangent
        inner = texts @ y - time(texts) * time(y)
        size = np.maximum(np.linalg.norm(texts, axis=1), 1e-9)
        aperture = np.arcsin(np.minimum(2 * 0.1 / (c**0.5 * size), 1))
        cosine = (time(y) + c * inner * time(texts)) / size / np.sqrt((c * inner) ** 2 - 1 + 1e-15)
        holds = np.arccos(np.clip(cosine, -1, 1)) <= aperture
        holds[-1] = True
        found.append(np.argmax(np.where(holds, inner, -1e12)))
    return np.where(np.array(found) == len(texts) - 1, image_text.ROOT, found)


def on_the_way(space, dim=4):
    """An image, and texts around the way to it."""
    rng = np.random.default_rng(0)
    v = rng.normal(size=dim)
    features = v / np.linalg.norm(v) * np.linspace(0.2, 2, 60)[:, None]
    features += 0.1 * rng.normal(size=(60, dim)) * np.linspace(0.1, 1, 60)[:, None]
    image = 2.2 * v / np.linalg.norm(v)
    embedded = np.asarray(space.embed(np.float32(np.vstack([image, features]))))
    return embedded[0], embedded[1:]


def test_the_walk_passes_the_texts_whose_cones_hold_it():
    ball, hyperboloid = PoincareBall(1.0, None), Lorentz(1.0, None)
    image, texts = on_the_way(hyperboloid)
    root = np.zeros(4, np.float32)
    actual = image_text.walk(image, texts, root, space=hyperboloid)
    np.testing.assert_array_equal(actual, traversal(image, texts, 1.0))
    assert len({*actual.tolist()}) > 4 and actual[-1] == image_text.ROOT
    np.testing.assert_array_equal(image_text.walk(*on_the_way(ball), root, space=ball), actual)
    # The cone of a root elsewhere need not hold the walk.
    assert image_text.walk(image, texts, -image, space=hyperboloid)[-1] == image_text.ROOT
    # A text at the image itself is passed first; one in another direction, however near, never.
    across = np.float32([[0.3 * -image[1], 0.3 * image[0], 0, 0]])
    found = image_text.walk(image, np.vstack([across, image[None]]), root, space=hyperboloid)
    assert found[0] != 0 and 0 not in found[found != image_text.ROOT]


def test_the_walk_on_the_sphere_leads_to_the_root_text():
    space = Sphere()
    image, texts = on_the_way(space)
    root = points(space, 3, 1, 4)[0]
    weights = np.linspace(1, 0, 50)[:, None]
    line = weights * np.float64(image) + (1 - weights) * np.float64(root)
    line /= np.linalg.norm(line, axis=1, keepdims=True)
    expected = np.argmax(line @ np.vstack([texts, root]).T.astype(np.float64), axis=1)
    actual = image_text.walk(image, texts, root, space=space)
    np.testing.assert_array_equal(actual, np.where(expected == 60, image_text.ROOT, expected))
    assert actual[-1] == image_text.ROOT and len({*actual.tolist()}) > 3


PARENTS = {
    "dog": ["canine", "pet"],  # As in WordNet, nodes may have several parents.
    "wolf": ["canine"],
    "cat": ["feline", "pet"],
    "canine": ["carnivore"],
    "feline": ["carnivore"],
    "carnivore": ["animal"],
    "pet": ["animal"],
    "plum": ["fruit"],
    "fruit": ["thing"],
    "animal": ["thing"],
}


def edges_of(parents):
    return [(node, parent) for node, above in parents.items() for parent in above]


CLASSES = ["plum", "dog", "wolf", "cat"]


def by_hand(predicted, true):
    def ancestors(name):
        return {x for y in PARENTS.get(name, ()) for x in {y, *ancestors(y)}}

    a, b, edges = ancestors(predicted), ancestors(true), 0
    reached = {predicted}
    while true not in reached:
        up = {y for x in reached for y in PARENTS.get(x, ())}
        reached |= up | {x for x, above in PARENTS.items() if not reached.isdisjoint(above)}
        edges += 1
    shared = len(a & b)
    return [edges, len(a) - shared + 1, shared / len(a | b), shared / len(a), shared / len(b)]


def test_tree_scores_compare_ancestors():
    tree = LabelTree.of(CLASSES, edges_of(PARENTS))
    for i, j in itertools.product(range(4), repeat=2):
        actual = tree_scores(np.array([i]), np.array([j]), tree)
        assert [*actual] == ["tie", "lca", "jaccard", "h_precision", "h_recall"]
        assert [*actual.values()] == pytest.approx(by_hand(CLASSES[i], CLASSES[j]))
    assert by_hand("wolf", "wolf") == [0, 1, 1, 1, 1]  # LCA is 1 for a right prediction, not 0.
    assert by_hand("dog", "cat") == [2, 2, 4 / 6, 4 / 5, 4 / 5]  # Through "pet".
    both = tree_scores(np.array([1, 2]), np.array([1, 0]), tree)
    assert both["tie"] == 3 and both["lca"] == 2.5 and both["h_recall"] == 0.75
    reordered = {name: PARENTS[name][::-1] for name in reversed(PARENTS)}
    for a, b in zip(LabelTree.of(CLASSES, edges_of(reordered)), tree, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_forest_gets_a_root_and_other_mistakes_are_errors():
    assert LabelTree.of(["a", "c"], [("a", "b"), ("c", "d")]).paths.tolist() == [[0, 4], [4, 0]]
    for classes, edges, words in (
        ("ax", ["ab"], "the class x is not in the tree"),
        ("x", [], "the class x is not in the tree"),
        ("ab", ["ab"], "the class b has no ancestor in the tree"),
        ("a", ["ab", "bc", "cb"], "[bc] is its own ancestor"),
        ("a", ["ab", "aa"], "a is its own ancestor"),
    ):
        with pytest.raises(UserError, match=words):
            LabelTree.of([*classes], map(tuple, edges))
