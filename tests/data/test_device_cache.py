"""The device cache: pixels of its crops, and runs that use it."""

import dataclasses

import jax
import numpy as np
import pytest
from PIL import Image

from hypjax import parallel, train
from hypjax.assemble import assemble_training
from hypjax.data import device_crops, pixels
from hypjax.data.device_cache import crop_batches, fill, plan_layout
from hypjax.data.pipeline import training_batches
from hypjax.data.plans import EpochClassPlans, Plan
from hypjax.data.views import RandomCrop, ResizeCrop
from hypjax.errors import UserError
from hypjax.system import machine
from hypjax.types import Frame, View
from tests.helpers import small_runs
from tests.helpers.pictures import dataset_of

MIXED = [(300, 500), (500, 300), (500, 500), (45, 480), (480, 45), (41, 43)]


def pictures(sizes, channels, seed=0):
    """Returns pictures of coarse colours and noise, whose sharp edges clip when resized."""
    rng = np.random.default_rng(seed)
    images = []
    for i, (height, width) in enumerate(sizes):
        coarse = rng.integers(0, 256, (height // 20 + 1, width // 20 + 1, channels), np.uint8)
        image = coarse.repeat(20, axis=0).repeat(20, axis=1)[:height, :width].astype(int)
        image = image + rng.normal(0, (12, 90)[i % 2], image.shape)
        images.append(np.clip(image, 0, 255).astype(np.uint8))
    return dataset_of(images, np.arange(len(sizes)))


def random_plan(sizes, count, seed=0):
    """Draws boxes of at least 40 pixels, some of which touch the borders."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, len(sizes), count)
    extent = rng.integers(40, sizes[ids], endpoint=True)
    room = sizes[ids] - extent
    corner = np.clip(rng.integers(-20, room + 20, endpoint=True), 0, room)
    boxes = np.concatenate([corner, extent], axis=1).astype(np.int32)
    return Plan(ids, ids, sizes[ids], boxes, np.zeros(count, bool))


# Optimised, as users' programs are: otherwise more levels differ by one.
OPTIONS = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
jitted_cut = jax.jit(device_crops.crop, static_argnums=2, compiler_options=OPTIONS)


def lay_out(sizes, channels):
    return plan_layout(sizes, parallel.create_mesh((1, 1)), channels)


def cut(dataset, layout, crops, side):
    mesh = parallel.create_mesh((1, 1))
    return np.asarray(jitted_cut(fill(layout, dataset, mesh), crops, side))


def close(views, expected):
    difference = np.abs(views.astype(int) - expected)
    rare = (difference > 1).mean() < 1e-4 and (difference > 0).mean() < 2e-3
    return difference.max() <= 2 and rare


@pytest.mark.parametrize(("channels", "side", "count"), [(3, 224, 20), (1, 60, 80)])
def test_crops_equal_pillows(channels, side, count):
    """Images are copied to the device in several parts."""
    dataset = pictures(MIXED, channels)
    plan = random_plan(dataset.sizes, count)
    layout = lay_out(dataset.sizes, channels)
    assert len(list(layout.slabs())) > 1
    views = cut(dataset, layout, layout.crops(plan, range(count)), side)
    frames = map(Frame, dataset.sizes[plan.ids].tolist(), plan.boxes.tolist())
    crops = zip(plan.ids, frames, strict=True)
    expected = [dataset.crop(int(i), frame, side, channels) for i, frame in crops]
    assert close(views, np.stack(expected))


def test_images_are_scaled_once_to_the_stored_side():
    dataset = pictures([(200, 300), (333, 200), (90, 300), (80, 70)], 3)
    crop = RandomCrop((0.2, 1.0), (0.75, 1.33), 0.5, stored_side=100)
    sizes = crop.sizes(dataset.sizes)
    np.testing.assert_array_equal(sizes, [(100, 150), (166, 100), (90, 300), (80, 70)])
    assert dataclasses.replace(crop, stored_side=None).sizes(dataset.sizes) is dataset.sizes
    plan, layout = random_plan(sizes, 40), lay_out(sizes, 3)
    views = cut(dataset, layout, layout.crops(plan, range(40)), 64)
    for view, i, box in zip(views, plan.ids, plan.boxes, strict=True):
        small = dataset.image(int(i), 3).resize(sizes[i][::-1].tolist(), Image.Resampling.BICUBIC)
        assert close(view, pixels.show(small, Frame(small.size[::-1], tuple(box)), 64))


def test_squares_are_cut_exactly_as_on_the_host():
    crop = ResizeCrop(resize=24, side=16, flip=0.5)
    dataset = pictures([(40, 61), (61, 40), (23, 23), (24, 24), (90, 30), (30, 200)], 3)
    plans = EpochClassPlans(dataset.labels, crop.sizes(dataset.sizes), 8, crop, 0, 2)
    layout = lay_out(plans.sizes, 3)
    assert (layout.sizes == 24).all() and layout.max_rows == 24 and layout.shape[1] == 3 * 24
    store = fill(layout, dataset, parallel.create_mesh((1, 1)))
    cut_on_device = jax.jit(device_crops.crop, static_argnums=2)
    device = crop_batches(layout, plans, range(4), range(8))
    host = training_batches(dataset, plans, range(4), View(16, 24, 3, "squash"))
    for ours, hosts in zip(device, host, strict=True):
        cropped = cut_on_device(store, ours.inputs["images"], 16)
        np.testing.assert_array_equal(cropped, hosts.inputs["images"])
        np.testing.assert_array_equal(ours.flips, hosts.flips)


def test_images_are_laid_out_in_the_least_memory():
    """Landscape if all long sides are equal, portrait if some are much longer."""
    sizes = np.array([(500, 333), (333, 500), (500, 500)] * 50)
    assert lay_out(sizes, 3).shape[1] == 1500
    np.testing.assert_array_equal(lay_out(sizes, 3).transposed, [True, False, False] * 50)
    sizes[0] = 5000, 333
    np.testing.assert_array_equal(lay_out(sizes, 3).transposed, [False, True, False] * 50)
    assert np.prod(lay_out(sizes, 3).shape) < 1.5 * 3 * sizes.prod(axis=1).sum()


def test_images_that_do_not_fit_are_refused(photos_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "free_memory", lambda mesh: 40_000)
    config = small_runs.load(photos_folder, "run.cache=device")
    with pytest.raises(UserError, match=r"take 5\d\.\dkB, more than 80% of the 40.0kB free"):
        train.train_and_evaluate(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    smaller = assemble_training(
        small_runs.load(photos_folder, "run.cache=device", "data.stored_side=10")
    )
    assert (smaller.plans.sizes.min(axis=1) == 10).all()
    assert "shorter sides are scaled down to 10 pixels" in smaller.experiment.splits.notes[0]
    monkeypatch.setattr(machine, "free_memory", lambda mesh: 2**30)
    with pytest.raises(UserError, match=r"and a crop of the longest take 4\.\d+GB"):
        lay_out(np.array([(1, 20_000), (10, 10)]), 3)  # A crop would pad it to a square.
    monkeypatch.setattr(machine, "free_memory", lambda mesh: None)
    fields = ["data.train_view=resize_crop", "data.resize=20", "data.test_view=squash"]
    squares = assemble_training(small_runs.load(photos_folder, *fields, "run.cache=device"))
    assert squares.plans.crop == ResizeCrop(20, 16, 0.5)
    assert (squares.plans.sizes == 20).all() and (squares.layout.sizes == 20).all()
    assert squares.learner.pixels.view == View(16, 20, 3, "squash")
