"""Pixels, and the input that delivers them."""

import io

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from hypjax.data import device, pixels
from hypjax.data.dataset import Dataset
from hypjax.data.pipeline import evaluation_batches, training_batches
from hypjax.data.plans import ClassBalancedPlans, RandomCrop


def encoded(array):
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG")
    return buffer.getvalue()


def random_dataset(n=30, classes=6, seed=0):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(20, 40, size=(n, 2))
    images = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]
    records = [{"image": encoded(image)} for image in images]
    return Dataset(records, np.arange(n), np.arange(n) % classes, sizes)


def batches(dataset, first=0, last=6, workers=0):
    crop = RandomCrop((0.3, 1.0), (0.75, 1.33), 0.5)
    plan = ClassBalancedPlans(dataset.labels, dataset.sizes, 3, 2, crop, seed=0)
    return plan, list(
        training_batches(
            dataset, plan, first_step=first, last_step=last, side=16, channels=3, workers=workers
        )
    )


def test_batches_carry_their_plans_out():
    dataset = random_dataset()
    plan, delivered = batches(dataset)
    assert len(delivered) == 6
    for step, batch in enumerate(delivered):
        wanted = plan(step)
        np.testing.assert_array_equal(batch.ids, wanted.ids)
        np.testing.assert_array_equal(batch.labels, wanted.labels)
        np.testing.assert_array_equal(batch.flips, wanted.flips)
        for pixels_, i, (top, left, height, width) in zip(
            batch.images, wanted.ids, wanted.boxes.tolist(), strict=True
        ):
            image = Image.open(io.BytesIO(dataset.records[i]["image"]))
            crop = image.crop((left, top, left + width, top + height))
            np.testing.assert_array_equal(pixels_, crop.resize((16, 16), Image.Resampling.BICUBIC))


def test_a_resumed_run_sees_the_same_pixels():
    _, whole = batches(random_dataset())
    _, rest = batches(random_dataset(), first=4)
    assert len(rest) == 2
    for a, b in zip(whole[4:], rest, strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_worker_processes_deliver_the_same_pixels():
    """Here, as in a notebook, nothing has parsed absl's flags, which Grain's workers read."""
    _, here = batches(random_dataset())
    _, there = batches(random_dataset(), workers=2)
    for a, b in zip(here, there, strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_evaluation_views_come_in_order_with_the_last_batch_filled_up():
    dataset = random_dataset(n=10)
    views = list(
        evaluation_batches(dataset, shorter_side=18, side=16, channels=3, batch_size=4, workers=0)
    )
    assert [view.shape for view in views] == [(4, 16, 16, 3)] * 3
    for i, view in enumerate(np.concatenate(views)[:10]):
        image = Image.open(io.BytesIO(dataset.records[i]["image"]))
        np.testing.assert_array_equal(view, pixels.central_view(image, 18, 16))
    assert not views[2][2:].any()


@pytest.mark.parametrize(
    ("size", "resized"),
    [((375, 500), (256, 341)), ((500, 375), (341, 256)), ((20, 20), (256, 256))],
)
def test_central_view_rounds_as_torchvision_does(size, resized):
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8))
    whole = image.resize(resized[::-1], Image.Resampling.BICUBIC)
    top, left = round((resized[0] - 224) / 2), round((resized[1] - 224) / 2)
    expected = np.asarray(whole)[top : top + 224, left : left + 224]
    np.testing.assert_array_equal(pixels.central_view(image, 256, 224), expected)


def test_any_colour_mode_becomes_grey_or_rgb():
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8)
    image = pixels.decode(encoded(grey), channels=3)
    np.testing.assert_array_equal(np.asarray(image), np.repeat(grey[..., None], 3, axis=2))
    colour = np.random.default_rng(0).integers(0, 256, (8, 8, 4), dtype=np.uint8)
    assert pixels.decode(encoded(colour), channels=1).mode == "L"
    assert pixels.decode(encoded(colour), channels=3).mode == "RGB"


def test_held_out_classes_are_numbered_anew():
    dataset = random_dataset(n=30, classes=6)
    part = dataset.of_classes(np.array([1, 4]))
    assert len(part) == 10 and part.num_classes == 2
    np.testing.assert_array_equal(np.unique(part.labels), [0, 1])
    np.testing.assert_array_equal(part.image(1, 3), dataset.image(4, 3))
    assert part.name(1) == "record 4"


def test_device_normalises_and_mirrors():
    images = np.random.default_rng(0).integers(0, 256, (2, 4, 5, 3), dtype=np.uint8)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    np.testing.assert_allclose(
        device.normalize(images, mean, std), (images / 255 - mean) / std, rtol=1e-5, atol=1e-6
    )
    mirrored = device.mirror(jnp.asarray(images), jnp.array([True, False]))
    np.testing.assert_array_equal(mirrored[0], images[0, :, ::-1])
    np.testing.assert_array_equal(mirrored[1], images[1])
