"""Views of images, and changes of their colours on the device."""

import jax
import numpy as np
import pytest
from PIL import Image, ImageOps

from hypjax.data import pixels
from hypjax.data.pipeline import readable_batches
from hypjax.data.views import TEST_VIEWS, centre_crop
from hypjax.models import colours
from hypjax.types import View
from tests.helpers.pictures import dataset_without_images, encoded

BICUBIC = Image.Resampling.BICUBIC


def noise(height, width, channels=3):
    shape = height, width, channels
    return np.random.default_rng(0).integers(0, 2, shape, np.uint8) * np.uint8(255)


@pytest.mark.parametrize("size", [(90, 120), (121, 90), (50, 50), (37, 500), (1, 400), (2000, 3)])
def test_a_letterbox_pads_as_pillow_does(size):
    image, view = pixels.from_array(noise(*size)), View(40, 7, 3, "letterbox")
    shown = pixels.show(image, TEST_VIEWS["letterbox"](*size, view), 40)
    if max(size) < 80 * min(size):  # Else Pillow's line has no rows.
        np.testing.assert_array_equal(shown, ImageOps.pad(image, (40, 40), BICUBIC))
    columns, rows = (np.count_nonzero(shown.any(axis=(axis, 2))) for axis in (0, 1))
    assert max(rows, columns) == 40 and min(rows, columns) >= 1


@pytest.mark.parametrize(
    "size", [(1, 1), (1, 300), (2, 299), (300, 3), (7, 97), (53, 11), (24, 25)]
)
@pytest.mark.parametrize("view", [View(32, 37, 3), View(30, 30, 1), View(25, 64, 3)])
def test_a_box_of_an_enlarged_image_needs_only_its_own_pixels(size, view):
    frame, values = centre_crop(*size, view), noise(*size, view.channels)
    top, left, height, width = frame.box
    enlarged = pixels.from_array(values).resize(frame.size[::-1], BICUBIC)
    expected = pixels.array(enlarged.crop((left, top, left + width, top + height)))
    np.testing.assert_array_equal(pixels.enlarged_box(values, frame), expected)


@pytest.mark.parametrize("size", [(1, 20_000), (20_000, 1), (2, 90_000), (1, 3_000_000)])
def test_a_line_is_not_enlarged_as_a_whole(size, monkeypatch):
    """20,000 × 1 pixels took gigabytes; an image that does so still is named, and left out."""
    resize, sizes = Image.Image.resize, []
    monkeypatch.setattr(
        Image.Image, "resize", lambda *x, **y: sizes.append(x[1]) or resize(*x, **y)
    )
    files = [encoded(Image.new("L", size[::-1], 90)), encoded(Image.new("L", (9, 9)))]
    dataset, view = dataset_without_images([0, 1], records=files), View(32, 36, 3)
    assert (dataset.test_view(0, view) == 90).all() and {*sizes} <= {(32, 32)}
    show = pixels.show

    def exhausted(image, *args):
        if image.size == size[::-1]:
            raise MemoryError
        return show(image, *args)

    monkeypatch.setattr(pixels, "show", exhausted)
    ((_, broken),) = readable_batches(dataset, view, 2)
    assert broken == {0: "it takes too much memory"}


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
