"""Views: what they show of an image, on the host, from the caches and on the device."""

import dataclasses

import jax
import numpy as np
import pytest
from PIL import Image

from hypjax import parallel
from hypjax.data import device_crops, pixels
from hypjax.data.dataset import fill_cache
from hypjax.data.device_cache import crop_batches, fill, lay_out
from hypjax.data.pipeline import training_batches
from hypjax.data.plans import EpochClassPlans
from hypjax.data.views import ResizeCrop, centre_crop
from hypjax.models import colours
from hypjax.system.array_cache import ArrayCache
from hypjax.training.setup import build
from hypjax.types import View
from tests.helpers import small_runs
from tests.helpers.pictures import dataset_of

SIZES = [(40, 61), (61, 40), (23, 23), (24, 24), (90, 30), (3, 200)]
CROP = ResizeCrop(resize=24, side=16, flip=0.5)
VIEW = View(side=16, resize=24, channels=3, test="squash")


def pictures(count=12, channels=3):
    """Noise, and a dataset of it with two images in each class."""
    rng = np.random.default_rng(0)
    shapes = [(*SIZES[i % len(SIZES)], channels) for i in range(count)]
    arrays = [rng.integers(0, 256, shape, np.uint8) for shape in shapes]
    return arrays, dataset_of(arrays, np.arange(count) // 2)


def plans_of(dataset):
    return EpochClassPlans(dataset.labels, CROP.sizes(dataset.sizes), 8, CROP, 0, 2)


def squashed(array, side):
    image = pixels.from_array(array).resize((side, side), Image.Resampling.BICUBIC)
    return pixels.array(image)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("cached", [False, True])
def test_resize_crop_cuts_windows_of_the_squashed_image(cached, channels, tmp_path):
    arrays, dataset = pictures(channels=channels)
    if cached:
        decoded = ArrayCache(tmp_path / "cache", len(dataset))
        dataset = dataclasses.replace(dataset, decoded=decoded)
        fill_cache(dataset, channels)
    plans, view = plans_of(dataset), VIEW._replace(channels=channels)
    for step, batch in zip(range(6), training_batches(dataset, plans, range(6), view), strict=True):
        np.testing.assert_array_equal(batch.flips, plans(step).flips)
        for found, i, (top, left, height, width) in zip(
            batch.images, batch.ids, plans(step).images.box, strict=True
        ):
            assert (height, width) == (16, 16)
            expected = squashed(arrays[i], 24)[top : top + 16, left : left + 16]
            np.testing.assert_array_equal(found, expected)


def test_the_device_cache_holds_squares_and_cuts_exactly_the_hosts_pixels():
    _, dataset = pictures()
    plans = plans_of(dataset)
    layout = lay_out(plans.sizes, 3)
    assert (layout.sizes == 24).all() and layout.largest == (24, 24)
    store = fill(layout, dataset, parallel.create_mesh((1, 1)))
    cut = jax.jit(device_crops.cut, static_argnums=2)
    device = crop_batches(layout, plans, range(4), range(8))
    host = training_batches(dataset, plans, range(4), VIEW)
    for _, ours, hosts in zip(range(4), device, host, strict=True):
        np.testing.assert_array_equal(cut(store, ours.images, 16), hosts.images)
        np.testing.assert_array_equal(ours.flips, hosts.flips)


def test_windows_are_equally_likely_at_all_places():
    crop = ResizeCrop(resize=6, side=4, flip=0.5)
    sizes = crop.sizes(np.full((18_000, 2), 500))
    top, left, height, width = crop.boxes(np.random.default_rng(0), sizes).T
    assert (sizes == 6).all() and (height == 4).all() and (width == 4).all()
    counts = np.bincount(3 * top + left, minlength=9)
    assert len(counts) == 9 and np.abs(counts - 2000).max() < 5 * np.sqrt(2000)
    whole = ResizeCrop(resize=4, side=4, flip=0.5)
    assert (whole.boxes(np.random.default_rng(0), sizes * 0 + 4) == (0, 0, 4, 4)).all()


def test_views_are_built_from_the_configuration(photos_folder):
    fields = ["data.train_view=resize_crop", "data.resize=20", "data.test_view=squash"]
    setup = build(small_runs.load(photos_folder, *fields, "run.cache=device"))
    assert setup.plans.crop == ResizeCrop(20, 16, 0.5)
    assert (setup.plans.sizes == 20).all() and (setup.layout.sizes == 20).all()
    assert View.of(setup.config.data) == View(16, 20, 3, "squash")


def test_the_centre_crop_is_the_middle_square_of_the_resized_image():
    view = View(16, 20, 3, "centre_crop")
    assert centre_crop(40, 60, view) == ((20, 30), (2, 7, 16, 16))
    assert centre_crop(50, 30, view) == ((33, 20), (8, 2, 16, 16))


def test_colours_are_changed_for_each_image_alone():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (6, 24, 24, 3), np.uint8)
    plain = colours.Draws(np.ones((6, 3)), np.zeros(6), np.zeros(6, bool), np.zeros(6))
    third = plain._replace(hue=np.full(6, 1 / 3))  # Red becomes green, and green blue.
    red = images // 8 * [1, 0, 0] + 100
    change = jax.jit(colours.changed)
    np.testing.assert_array_equal(change(images, plain), images)
    rest = np.float32(red) - red @ [[0.299], [0.587], [0.114]]
    turned = np.roll(rest, 1, axis=-1)
    expected = np.float32(red) - rest + turned - turned @ [[0.299], [0.587], [0.114]]
    found = np.asarray(change(red.astype(np.uint8), third), np.float32)
    np.testing.assert_allclose(found, expected, atol=0.51)
    grey = np.asarray(change(images, plain._replace(grey=np.arange(6) == 2)))
    assert np.ptp(grey[2], axis=-1).max() == 0
    np.testing.assert_array_equal(np.delete(grey, 2, 0), np.delete(images, 2, 0))


def test_changes_are_drawn_as_often_and_as_far_as_they_are_set():
    changes = colours.ColourChanges((0.4, 0.2, 0.0, 0.1), grey=0.2, blur=0.5)
    draws = colours.draw_changes(jax.random.key(0), changes, 4000)
    far = np.abs(np.column_stack([draws.factors - 1, draws.hue]))
    np.testing.assert_allclose(far.max(axis=0), changes.jitter, rtol=0.01)
    np.testing.assert_allclose(np.mean(far > 0, axis=0), [0.8, 0.8, 0, 0.8], atol=0.03)
    assert abs(np.mean(draws.grey) - 0.2) < 0.03 and abs(np.mean(draws.sigma > 0) - 0.5) < 0.03
    assert 0.1 <= draws.sigma[draws.sigma > 0].min() < draws.sigma.max() <= 2
