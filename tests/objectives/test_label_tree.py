"""HypStructure and HypHC: losses that know the tree of labels, against float64 on the host."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.config import load_config, validate
from hypjax.errors import UserError
from hypjax.objectives import ProblemSizes, hyphc, label_triples
from hypjax.objectives.hier import Triplets
from tests.helpers import losses, small_runs, steps

# Coarse classes of classes 0 to 5, and coarser ones. Class 5 is the only child of its parent.
COARSE = (0, 0, 1, 1, 2, 3), (0, 0, 0, 0, 1, 1)
SPEC = ProblemSizes(6, 2, 7, 7, 100, 8, coarse_labels=COARSE)
LABELS = np.array([5, 5, 0, 0, 2, 2, 1, 1])
KEY = jax.random.key(0)


def levels_of(labels, coarse=COARSE):
    return np.array([labels, *(np.array(level)[labels] for level in coarse), 0 * labels])


def compute(name, spec=SPEC, **fields):
    """A program of (loss, metrics) and the gradient."""
    objective = losses.objective(f"{name}+triplet", **fields)
    started = objective.init(KEY, spec)

    def loss(features, labels):
        value, (_, metrics) = losses.loss_of(objective, started, features, labels, key=KEY)
        return value, metrics

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def midpoint(x):
    """Einstein's midpoint of points of the ball of c = 1 (HypStructure, Eq. 6)."""
    klein = 2 * x / (1 + np.sum(x * x, axis=1, keepdims=True))
    gamma = 1 / np.sqrt(1 - np.sum(klein**2, axis=1, keepdims=True))
    mean = np.sum(gamma * klein, axis=0) / np.sum(gamma)
    return mean / (1 + np.sqrt(1 - mean @ mean))


def by_hand(features, levels):
    """Pearson's correlation over a list of pairs of nodes, and the norm of the midpoint of all."""
    norms = np.linalg.norm(features, axis=1, keepdims=True)
    x = features / norms * np.minimum(np.tanh(norms), 1 - 4e-3)
    nodes, distances, paths = {}, [], []
    for level, labels in enumerate(levels):
        for label in np.unique(labels):
            above = {(i, levels[i, labels == label][0]) for i in range(level, len(levels))}
            nodes[level, label] = midpoint(x[labels == label]), above
    for (a, above_a), (b, above_b) in itertools.combinations(nodes.values(), 2):
        q = np.sum((a - b) ** 2) / ((1 - a @ a) * (1 - b @ b))
        distances.append(2 * np.arcsinh(np.sqrt(q)))
        paths.append(len(above_a ^ above_b))
    return np.corrcoef(distances, paths)[0, 1], np.linalg.norm(midpoint(x))


@pytest.mark.parametrize("coarse", [COARSE, ()], ids=["levels", "classes and root"])
@pytest.mark.parametrize("scale", [0.1, 1.0, 20.0])
def test_hypstructure_equals_a_loop_over_pairs_of_nodes(scale, coarse):
    features = scale * np.random.default_rng(0).normal(size=(8, 7))
    correlation, offset = by_hand(features, levels_of(LABELS, coarse))
    for x64, tolerance in ((True, 1e-10), (False, 1e-6)):
        with jax.enable_x64(x64):
            fields = {"structure_weight": 0.3, "structure_centring": 0.5, "space": "sphere"}
            program = compute("hypstructure", SPEC._replace(coarse_labels=coarse), **fields)
            base = compute("hyphc", hyphc_weight=0.0, space="sphere")
            (loss, metrics), gradient = program(jnp.asarray(features), LABELS)
            of_base = base(jnp.asarray(features), LABELS)[0][0]
        actual = metrics["structure_correlation"], metrics["structure_offset"], loss - of_base
        expected = correlation, offset, 0.3 * (1 - correlation) + 0.5 * offset
        np.testing.assert_allclose(actual, expected, atol=tolerance)
        assert np.isfinite(gradient).all() and np.any(gradient)
    clipped = np.linalg.norm(features, axis=1) > np.arctanh(1 - 4e-3)
    assert metrics["structure_clipped"] == np.mean(clipped)


@pytest.mark.parametrize("name", ["hypstructure", "hyphc"])
@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1.0, 30.0])
def test_degenerate_batches_have_finite_gradients(name, scale):
    program, random = compute(name), scale * np.random.default_rng(0).normal(size=(8, 7))
    one_class, one_coarse = np.full(8, 5), np.array([0, 0, 0, 0, 1, 1, 1, 1])
    opposite = np.concatenate([random[:4], -random[:4]])
    for labels in (LABELS, one_class, one_coarse):
        for features in (random, 0 * random, 0 * random + random[0], opposite):
            (loss, metrics), gradient = program(features.astype("f"), labels)
            assert np.isfinite(loss) and np.isfinite(gradient).all()
            if labels is one_class or not np.ptp(features, axis=0).any():
                assert metrics.get("structure_correlation", 1) == 1
            if labels is one_class:
                assert metrics.get("hyphc_loss", 0) == 0


def test_hyphc_equals_a_loop_over_triples(float64):
    """Depths by the closed form of distances: cosh²o = (2·C·A·B − A² − B²)/(C² − 1)."""
    rng = np.random.default_rng(0)
    leaves = rng.normal(size=(6, 4))
    leaves *= 0.8 / np.linalg.norm(leaves, axis=1, keepdims=True)
    similarities = rng.uniform(size=(6, 6))
    triples = rng.permuted(np.tile(np.arange(6), (20, 1)), axis=1)[:, :3]
    valid = np.arange(20) % 3 > 0
    time, expected = (1 + 0.8**2) / (1 - 0.8**2), []
    for triple in triples[valid]:
        pairs = list(itertools.combinations(triple, 2))
        cosh = [1 + 2 * np.sum((leaves[a] - leaves[b]) ** 2) / 0.36**2 for a, b in pairs]
        depths = np.arccosh([np.sqrt(2 * time**2 * (c - 1) / (c**2 - 1)) for c in cosh])
        weights, alike = np.exp(depths / 0.1), np.array([similarities[pair] for pair in pairs])
        expected.append(np.sum(alike) - np.sum(weights * alike) / np.sum(weights))
    actual = jax.jit(hyphc)(leaves, Triplets(triples, valid), similarities, temperature=0.1)
    np.testing.assert_allclose(actual, np.mean(expected), rtol=1e-10)
    assert hyphc(leaves, Triplets(triples, np.zeros(20, bool)), similarities) == 0


def test_triples_separate_labels_at_each_level():
    levels = levels_of(LABELS)[:-1]
    drawn = label_triples(jnp.asarray(levels), jnp.arange(8), KEY, 30)
    assert drawn.valid.shape == (3 * 8 * 30,) and drawn.valid.all()
    for labels, triples in zip(levels, drawn.indices.reshape(3, -1, 3), strict=True):
        i, j, k = triples.T
        assert np.array_equal(i, np.repeat(np.arange(8), 30)) and np.all(i != j)
        assert np.all((labels[i] == labels[j]) & (labels[i] != labels[k]))
    assert {*j[i == 2].tolist()} == {3, 4, 5, 6, 7} and {*k[i == 2].tolist()} == {0, 1}
    assert not label_triples(jnp.zeros((2, 8), int), jnp.arange(8), KEY, 2).valid.any()
    assert label_triples(jnp.array([[0, 1, 1]]), jnp.arange(3), KEY, 1).valid.tolist() == [
        False,
        True,
        True,
    ]


def test_leaves_may_be_proxies():
    """With several proxies of a class, each is a leaf; the head's outputs do not count."""
    fields = {"hyphc_leaves": "proxies", "hyphc_weight": 1.0, "centres": 3}
    objective = losses.objective("hyphc+soft_triple", **fields)
    params, state = objective.init(KEY, SPEC)
    features = np.random.default_rng(0).normal(size=(8, 7)).astype("f")

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def gradients(proxies, features):
        started = {"base": {"proxies": proxies}}, state
        return losses.loss_of(objective, started, features, LABELS, key=KEY)[1][1]["hyphc_loss"]

    of_proxies, of_features = gradients(params["base"]["proxies"], features)
    assert np.any(of_proxies, axis=(1, 2)).tolist() == [True, True, True, False, False, True]
    assert not np.any(of_features)


def test_what_would_not_train_is_refused():
    config = losses.configured("hypstructure+supcon")
    config.optim.frozen = ("encoder",)
    with pytest.raises(UserError, match="structure_features .* head if optim.frozen"):
        validate(config)
    config.objective.structure_features = "head"
    validate(config)
    with pytest.raises(UserError, match="hyphc_leaves .* images, unless the loss has proxies"):
        validate(losses.configured("hyphc+supcon", hyphc_leaves="proxies"))


# The known parts of CHEST: SoftTriple in two parts, and proxies as leaves.
CHEST = ["name=hyphc+soft_triple", "hyphc_leaves=proxies", "space=product", "summed=True"]
CHEST += ["parts=sphere,poincare"]


@pytest.mark.parametrize("fields", [["name=hypstructure+pairwise_cross_entropy"], CHEST])
def test_train_steps(fields):
    fields = [f"objective.{field}" for field in fields]
    fields += [*small_runs.SHORT_GLYPHS, "data.validation_classes=0"]
    config = load_config(str(small_runs.REPOSITORY / "configs/glyphs.py"), fields)
    state, step = steps.start(config)
    for seed in range(2):
        state, metrics = step(state, steps.random_batch(seed))
        assert np.isfinite(metrics["loss"]) and metrics["skipped"] == 0
