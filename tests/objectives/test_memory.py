"""The cross-batch memory of losses of pairs, and KoLeo: against plain lists and loops."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.config import validate
from hypjax.errors import UserError
from hypjax.geometry.registry import create_space
from hypjax.objectives import ProblemSizes, contrastive, koleo
from hypjax.objectives.comparisons import References
from hypjax.objectives.memory import Memory, empty_memory
from tests.helpers import losses
from tests.helpers.losses import (
    BALL,
    SPHERE,
    both_spaces,
    embedded,
    loss_of,
    mostly_sphere,
    objective_of,
)
from tests.objectives.test_pair_and_proxy_losses import PAIRS

LABELS = np.array([0, 0, 3, 3, 1, 1])
REMEMBERED = np.array([3, 0, 2, 0, 1, 3, 1, 0, 3])
NAMES = [name for name in PAIRS if "semihard" not in name]  # Those that take references.


def points_of(space, n, seed=0):
    features = np.random.default_rng(seed).normal(size=(n, 4)) + 0.5
    return np.asarray(embedded(space, features)[0])


@pytest.mark.parametrize("size", [4, 10, 12])
def test_a_memory_holds_the_latest_points(size):
    """Batches of 4, through four ends of the memory or more."""
    latest, memory = collections.deque(maxlen=size), empty_memory(size, 3)
    write, rng = jax.jit(Memory.write), np.random.default_rng(0)
    for step in range(14):
        points, labels = rng.normal(size=(4, 3)).astype("f"), rng.integers(0, 9, 4)
        rows, memory = memory.next_rows(4), write(memory, points, labels)
        latest.extend(zip(points.tolist(), labels.tolist(), strict=True))
        np.testing.assert_array_equal(memory.points[rows], points)
        np.testing.assert_array_equal(rows, (4 * step + np.arange(4)) % size)
        pairs = sorted(zip(memory.points.tolist(), memory.labels.tolist(), strict=True))
        assert [pair for pair in pairs if pair[1] >= 0] == sorted(latest)
        oldest = int(memory.place) if len(latest) == size else 0
        assert memory.points[oldest].tolist() == latest[0][0]


def test_a_memory_takes_no_points_that_are_not_finite():
    memory = empty_memory(3, 2)._replace(place=jnp.int32(2), labels=jnp.array([4, 5, 6]))
    points = jnp.array([[1.0, 2], [jnp.nan, 4]])
    memory = jax.jit(Memory.write)(memory, points, jnp.array([7, 8]))
    assert (memory.labels.tolist(), int(memory.place)) == ([-1, 5, 7], 1)
    assert memory.points.tolist() == [[0, 0], [0, 0], [1, 2]]


@mostly_sphere
def test_losses_of_references_equal_plain_loops(float64, space):
    """Of some rows, with images' own ones; with positives alone; without any; and of no rows."""
    points, others = points_of(space, 6), points_of(space, 9, 1)
    d = np.asarray(space.distance(points[:, None], others))
    own = np.array([4, 5, 6, 7, 8, 0])

    def compute(points, batch, references):
        common = {"space": space, "references": references}
        values = [PAIRS[name][0](points, batch, **common, **PAIRS[name][2]) for name in NAMES]
        return sum(values), values

    both = jax.jit(jax.value_and_grad(compute, has_aux=True))
    for batch, labels, shown in (
        (LABELS, np.where(np.arange(9) < 3, -1, REMEMBERED), own),
        (np.full(6, 3), np.full(9, 3), None),
        (LABELS, np.full(9, 7), None),
        (LABELS, np.full(9, -1), None),
    ):
        references = References(jnp.asarray(others), jnp.asarray(labels), shown)
        same = batch[:, None] == labels
        other = ~same & (labels >= 0)
        if shown is not None:
            same[np.arange(6), own] = False
        (_, values), slopes = both(points, batch, references)
        assert np.isfinite(slopes).all() and np.any(slopes) == np.any(labels >= 0)
        for name, actual in zip(NAMES, values, strict=True):
            _, loop, settings = PAIRS[name]
            expected = loop(d, same, other, **settings)
            np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-12, err_msg=name)


def configured(space="sphere", name="contrastive", **fields):
    config = losses.configured(name, space=space, **fields)
    config.train.batch_size, config.train.samples_per_class = len(LABELS), 2
    validate(config)
    return config


SPEC = ProblemSizes(4, 2, 16, 4, 20, len(LABELS))  # Of 20 training images.


def assert_steps(config, rows, expected, taught=False):
    """Compares loss and gradient of some steps with those of a function of all that is remembered.

    The function takes outputs, references with all rows, and the rows of the batch.
    """
    space, objective = create_space(config.objective), objective_of(config)
    _, state = objective.init(jax.random.key(0), SPEC)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def step(projected, state, teacher):
        teacher = teacher if taught else None
        return loss_of(objective, ({}, state), projected, LABELS, teacher=teacher)

    wanted, embed = jax.jit(jax.value_and_grad(expected)), jax.jit(space.embed)
    latest = collections.deque(maxlen=rows)
    for number in range(4):
        outputs, of_teacher = np.random.default_rng(number).normal(size=(2, 6, 4)) + 0.3
        remembered = embed(of_teacher if taught else outputs)
        latest.extend(zip(np.asarray(remembered), LABELS, strict=True))
        points, labels = map(np.array, zip(*latest, strict=True))
        empty = rows - len(latest)
        references = References(
            np.pad(points, ((0, empty), (0, 0))), np.pad(labels, (0, empty), constant_values=-1)
        )
        (loss, (state, metrics)), slope = step(outputs, state, of_teacher)
        value, slopes = wanted(outputs, references, np.arange(len(latest) - 6, len(latest)))
        np.testing.assert_allclose(loss, value, rtol=1e-10)
        np.testing.assert_allclose(slope, slopes, rtol=1e-6, atol=1e-10)
        np.testing.assert_allclose(metrics["memory_filled"], len(latest) / rows)
    assert state["memory"].points.shape == (rows, 4)


@both_spaces
def test_the_loss_is_that_of_the_batch_of_the_memory_and_of_koleo(float64, space):
    """The batch enters the memory first, where it has no gradient, nor itself as a positive."""

    def expected(outputs, references, own):
        points = space.embed(outputs)
        loss = contrastive(points, LABELS, space=space, margin=0.3)
        s = 1 - space.distance_matrix(points, references.points) / 2
        same, filled = LABELS[:, None] == references.labels[None], references.labels[None] >= 0
        itself = own[:, None] == jnp.arange(len(references.labels))[None]
        loss += jnp.sum(jnp.where(same & ~itself, 1 - s, 0)) / 6
        loss += jnp.sum(jnp.where(~same & filled, jnp.maximum(s - 0.3, 0), 0)) / 6
        return loss + 0.7 * koleo(points, space=space)

    fields = {"memory": 0.5, "koleo_weight": 0.7, "margin": 0.3}  # A share of the images.
    name = "sphere" if space is SPHERE else "poincare"
    assert_steps(configured(name, **fields), 10, expected)


def test_a_teacher_embeds_the_images_of_the_memory(float64):
    """An image's positives then are also the teacher's point of the same image."""

    def expected(outputs, references, own):
        points = SPHERE.embed(outputs)
        return contrastive(points, LABELS) + contrastive(points, LABELS, references=references)

    config = configured(memory=12.0, memory_decay=0.9)
    assert objective_of(config).teacher_decay == 0.9
    assert objective_of(configured(memory=12.0)).teacher_decay is None
    assert objective_of(configured()).init(jax.random.key(0), SPEC) == ({}, {})
    assert_steps(config, 12, expected, taught=True)


def test_the_memory_alone_and_a_teacher_give_the_loss_of_moco(float64):
    """InfoNCE (He et al., CVPR 2020, Eq. 1), without the teacher's point of the same image."""

    def expected(outputs, references, own):
        logits = -BALL.distance_matrix(BALL.embed(outputs), references.points) / 0.2
        compared = own[:, None] != jnp.arange(len(references.labels))[None]
        compared &= references.labels[None] >= 0
        positive = compared & (LABELS[:, None] == references.labels[None])
        total = jax.nn.logsumexp(logits, axis=1, where=compared, keepdims=True)
        return jnp.mean(jnp.mean(total - logits, axis=1, where=positive))

    moco = {"memory": 12.0, "memory_decay": 0.9, "memory_only": True}
    assert_steps(configured("poincare", "supcon", **moco), 12, expected, taught=True)


def test_the_memory_alone_gives_the_loss_of_scalable_nca(float64):
    """The share of an image's class among all others in the memory (Wu et al., 2018, Eqs. 2, 4)."""

    def expected(outputs, references, own):
        weights = jnp.exp(SPHERE.embed(outputs) @ references.points.T / 0.05)
        others = own[:, None] != jnp.arange(len(references.labels))[None]
        weights = jnp.where(others & (references.labels[None] >= 0), weights, 0.0)
        same = jnp.where(LABELS[:, None] == references.labels[None], weights, 0.0)
        return jnp.mean(-jnp.log(same.sum(axis=1) / weights.sum(axis=1)))

    nca = {"memory": 12.0, "memory_only": True, "temperature": 0.05}
    assert_steps(configured("sphere", "scalable_nca", **nca), 12, expected)


def test_wrong_settings_are_refused():
    with pytest.raises(UserError, match="memory_only must be False unless memory is set"):
        objective_of(configured(memory_only=True))
    with pytest.raises(UserError, match="memory is 2.5; it must be a number of images"):
        configured(memory=2.5)
    with pytest.raises(UserError, match="memory must be 0 for semi-hard triplets"):
        objective_of(configured(name="triplet", mining="semihard", memory=1.0))
    for size, rows in ((0.2, 4), (21.0, 21)):  # A batch has 6 images, and the data set 20.
        with pytest.raises(UserError, match=f"is {size:g}, which holds {rows} images; it must "):
            objective_of(configured(memory=size)).init(jax.random.key(0), SPEC)


@both_spaces
def test_images_are_not_pushed_from_their_copies(float64, space):
    """Tuples share negatives."""
    points, ids = points_of(space, 7), np.array([0, 1, 2, 3, 4, 5, 6, 0, 1, 2])
    d = jax.jit(space.distance)(points[:, None], points) + np.diag([np.inf] * 7)
    nearest = d.min(axis=1) ** (0.5 if space is SPHERE else 1)
    actual = jax.jit(lambda x: koleo(x, space=space, ids=ids))(points[ids])
    np.testing.assert_allclose(actual, -np.mean(np.log(nearest[ids])), rtol=1e-9)


@both_spaces
def test_equal_points_do_not_repel_each_other(space):
    one, *others = points_of(space, 4).astype("f")
    slope = jax.jit(jax.grad(lambda x: koleo(x, space=space)))
    assert not np.any(slope(np.stack([one] * 5)))
    some = np.asarray(slope(np.stack([one, one, *others])))
    assert np.isfinite(some).all() and not some[1].any() and some[2:].any()


@both_spaces
def test_koleo_keeps_the_digits_of_small_distances(space):
    """In float32 a product of two such points finds neither their distance nor its gradient."""
    point = np.array([0.6, 0.8])
    near = np.stack([point, point + 1e-5 * np.array([0.8, -0.6])]).astype("f")
    with jax.enable_x64(True):
        expected = jax.jit(lambda x: koleo(x, space=space))(near.astype(float))
    value, slope = jax.jit(jax.value_and_grad(lambda x: koleo(x, space=space)))(near)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    # −log d, whose gradient has the length 1/d.
    np.testing.assert_allclose(np.linalg.norm(slope[0]) * 1e-5, 1, rtol=0.02)
