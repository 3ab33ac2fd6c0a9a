"""Plans: Hyp-ViT's sampling, and crop boxes."""

import functools
import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypjax.data.plans import (
    BoxPlans,
    CoarsePairPlans,
    DrawnClassPlans,
    EpochClassPlans,
    ShuffledPlans,
)
from hypjax.data.views import RandomCrop, ResizeCrop

CROP = RandomCrop(area=(0.2, 1.0), ratio=(3 / 4, 4 / 3), flip=0.5)


def plans(counts, classes_per_batch, samples, seed=0, crop=CROP, kind=EpochClassPlans):
    """Plans for a training set with the given number of images in each class, shuffled."""
    rng = np.random.default_rng(1)
    labels = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    sizes = rng.integers(30, 200, size=(len(labels), 2))
    return kind(labels, sizes, classes_per_batch * samples, crop, seed, samples)


datasets = st.lists(st.integers(1, 7), min_size=5, max_size=30)
kinds = st.sampled_from([EpochClassPlans, DrawnClassPlans])
steps = st.integers(0, 10**6)


@given(counts=datasets, n=st.integers(2, 5), d=st.integers(2, 4), step=steps, kind=kinds)
@settings(max_examples=60, deadline=None)
def test_a_batch_holds_n_classes_with_d_adjacent_images(counts, n, d, step, kind):
    plan = plans(counts, n, d, kind=kind)
    batch = plan(step)
    assert batch.ids.shape == (n * d,)
    labels = batch.labels.reshape(n, d)
    assert (labels == labels[:, :1]).all() and len(set(labels[:, 0])) == n
    np.testing.assert_array_equal(plan.labels[batch.ids], batch.labels)
    for row, label in zip(batch.ids.reshape(n, d), labels[:, 0], strict=True):
        if counts[label] >= d:
            assert len(set(row)) == d


@pytest.mark.parametrize("crop", [CROP, ResizeCrop(resize=24, side=16, flip=0.5)])
def test_a_plan_is_a_function_of_seed_and_step_alone(crop):
    plan, same = (plans([5] * 20, 4, 2, crop=crop) for _ in range(2))
    forwards = [plan(step) for step in range(12)]
    backwards = [same(step) for step in reversed(range(12))][::-1]
    for a, b in zip(forwards, backwards, strict=True):
        assert all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))
    changed = plans([5] * 20, 4, 2, seed=1, crop=crop)(0)
    assert not np.array_equal(changed.ids, forwards[0].ids)
    assert not np.array_equal(changed.boxes, forwards[0].boxes)


def test_repeated_images_are_said():
    assert plans([3, 4], 2, 3).describe() == "batches in a pass over all classes: 1"
    text = "1 class with fewer than 4 images (the smallest 3), which a batch repeats"
    assert plans([3, 4], 2, 4, kind=DrawnClassPlans).describe().endswith(f": 0; {text}")


@pytest.mark.parametrize("kind", [EpochClassPlans, DrawnClassPlans])
def test_all_classes_images_and_flips_occur_equally_often(kind):
    plan = plans([4] * 10, 4, 2, kind=kind)  # Two classes are left over in each epoch.
    batches = [plan(step) for step in range(2000)]
    expected = 2000 * 8 / 40
    counts = np.bincount(np.concatenate([batch.ids for batch in batches]), minlength=40)
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected)
    assert abs(np.mean([batch.flips for batch in batches]) - 0.5) < 0.02


@given(counts=datasets, size=st.integers(2, 5), epoch=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_an_epoch_has_every_class_or_with_plain_shuffling_every_image_once(counts, size, epoch):
    by_class = plans(counts, size, 2)
    shuffled = ShuffledPlans(by_class.labels, by_class.sizes, size, CROP, seed=0)

    def in_epoch(plan, epoch):
        steps = range(epoch * plan.batches_per_epoch, (epoch + 1) * plan.batches_per_epoch)
        return [plan(step) for step in steps]

    classes = np.concatenate([batch.labels[::2] for batch in in_epoch(by_class, epoch)])
    assert len({*classes}) == len(classes) == len(counts) // size * size
    ids, other = (np.concatenate([x.ids for x in in_epoch(shuffled, epoch + i)]) for i in (0, 1))
    assert len({*ids}) == len(ids) == sum(counts) // size * size
    assert sum(counts) < 8 or not np.array_equal(other, ids)


def test_an_epoch_has_five_batches_of_every_pair_of_coarse_classes():
    coarse = np.repeat([0, 1, 2, 3], [2, 7, 6, 9])
    kind = functools.partial(CoarsePairPlans, coarse=coarse)
    plan = plans([4] * 24, 8, 2, kind=kind)
    steps = range(60, 60 + plan.batches_per_epoch)
    batches = [plan(step).labels[::2] for step in steps]
    counts = np.array([np.bincount(coarse[batch], minlength=4) for batch in batches])
    pairs = list(itertools.combinations(range(4), 2))
    assert sorted(tuple(np.flatnonzero(row)) for row in counts) == sorted(pairs * 5)
    filled = counts[:, 0] > 0  # From the larger one of a pair.
    assert {*counts[filled].ravel()} == {0, 2, 6} and {*counts[~filled].ravel()} == {0, 4}
    drawn = np.bincount(np.concatenate([plan(step).labels[::2] for step in range(900)]))
    expected = 450 * np.repeat([1, 2 / 3, 7 / 9, 14 / 27], [2, 7, 6, 9])
    assert np.abs(drawn - expected).max() < 5 * np.sqrt(450)


def test_images_are_drawn_with_replacement_on_request():
    labels, sizes = np.repeat(np.arange(10), 4), np.full((40, 2), 50)
    plan = DrawnClassPlans(labels, sizes, 10, CROP, 0, samples_per_class=2, repeats=True)
    pairs = np.concatenate([plan(step).ids.reshape(-1, 2) for step in range(400)])
    assert abs(np.mean(pairs[:, 0] == pairs[:, 1]) - 1 / 4) < 0.05


def test_half_a_batch_are_boxes_of_the_other_half():
    owners = np.array([0, 1, 2, 3, 1, 3, 3, 0])  # Image 2 has no box.
    plan = BoxPlans(np.arange(8), np.full((8, 2), 50), 4, CROP, 0, owners=owners)
    epochs = [np.concatenate([plan(2 * i + j).ids[:2] for j in (0, 1)]) for i in range(40)]
    assert plan.batches_per_epoch == 2 and all(sorted(x) == [0, 1, 2, 3] for x in epochs)
    batches = [plan(step).ids.reshape(2, 2) for step in range(80)]
    for images, boxes in batches:
        np.testing.assert_array_equal(owners[boxes], images)
        np.testing.assert_array_equal(images == boxes, images == 2)
    assert {*np.concatenate([x[1] for x in batches])} == {7, 4, 2, 5, 6}


def test_boxes_are_inside_their_images():
    """`tests/parity` compares their distribution with torchvision's."""
    sizes = np.random.default_rng(0).integers(30, 200, size=(1000, 2))
    corner, extent = np.split(CROP.boxes(np.random.default_rng(1), sizes), 2, axis=1)
    assert (extent > 0).all() and (corner >= 0).all() and (corner + extent <= sizes).all()


def test_an_image_too_narrow_for_any_box_gives_its_centre():
    sizes = np.array([(10, 1000), (1000, 10)] * 50)
    boxes = CROP.boxes(np.random.default_rng(0), sizes)
    np.testing.assert_array_equal(boxes, [(0, 493, 10, 13), (493, 0, 13, 10)] * 50)


def test_windows_are_equally_likely_at_all_places():
    crop = ResizeCrop(resize=6, side=4, flip=0.5)
    sizes = crop.sizes(np.full((18_000, 2), 500))
    top, left, height, width = crop.boxes(np.random.default_rng(0), sizes).T
    assert (sizes == 6).all() and ({*height} | {*width}) == {4}
    counts = np.bincount(3 * top + left, minlength=9)
    assert len(counts) == 9 and np.abs(counts - 2000).max() < 5 * np.sqrt(2000)
    whole = ResizeCrop(resize=4, side=4, flip=0.5)
    assert (whole.boxes(np.random.default_rng(0), sizes * 0 + 4) == (0, 0, 4, 4)).all()
