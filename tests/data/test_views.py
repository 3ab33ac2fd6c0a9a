"""Changes of colours on the device."""

import jax
import numpy as np

from hypjax.models import colours


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
