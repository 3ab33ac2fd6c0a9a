"""Pixels, and the pipeline that delivers them."""

import dataclasses
import functools
import io
import itertools
import pickle

import jax
import numpy as np
import pytest
from PIL import Image

from hypjax.data import pixels
from hypjax.data.dataset import Decoding, decoded_as, fill_cache
from hypjax.data.pipeline import readable_batches, training_batches
from hypjax.data.plans import EpochClassPlans
from hypjax.data.views import RandomCrop, ResizeCrop, centre_crop
from hypjax.errors import UserError
from hypjax.system.array_cache import ArrayCache
from hypjax.types import Frame, View
from tests.helpers.pictures import dataset_of, dataset_without_images, encoded

VIEW = View(side=16, resize=18, channels=3)
CROP = RandomCrop((0.3, 1.0), (0.75, 1.33), 0.5)


def random_dataset(n=30, channels=3):
    rng = np.random.default_rng(0)
    sizes = rng.integers(20, 40, size=(n, 2))
    images = [rng.integers(0, 256, (*size, channels), dtype=np.uint8) for size in sizes]
    return dataset_of(images, np.arange(n) % 6)


def plans(dataset, size=6):
    return EpochClassPlans(dataset.labels, dataset.sizes, size, CROP, 0, 2)


def batches(dataset, first=0, last=6, workers=0):
    steps = range(first, last)
    return list(training_batches(dataset, plans(dataset), steps, VIEW, workers))


@pytest.mark.parametrize("crop", [CROP, ResizeCrop(resize=24, side=16, flip=0.5)])
@pytest.mark.parametrize(("channels", "cached"), [(3, False), (1, False), (1, True), (3, True)])
def test_batches_follow_their_plans(crop, channels, cached, tmp_path):
    dataset = random_dataset(channels=channels)
    if cached:
        dataset = dataclasses.replace(dataset, decoded=ArrayCache(tmp_path, len(dataset)))
        fill_cache(dataset, channels)
    plan_of = EpochClassPlans(dataset.labels, crop.sizes(dataset.sizes), 6, crop, 0, 2)
    view = VIEW._replace(channels=channels)
    delivered = training_batches(dataset, plan_of, range(6), view)
    for step, batch in zip(range(6), delivered, strict=True):
        plan = plan_of(step)
        assert all(map(np.array_equal, batch[1:], (plan.labels, plan.ids, plan.flips)))
        crops = zip(plan.ids, plan.sizes, plan.boxes, strict=True)
        for shown, (i, size, box) in zip(batch.inputs["images"], crops, strict=True):
            image = Image.open(io.BytesIO(dataset.records[i]))
            image = image.resize(size[::-1].tolist(), Image.Resampling.BICUBIC)
            top, left, height, width = box.tolist()
            cropped = image.crop((left, top, left + width, top + height))
            np.testing.assert_array_equal(shown, pixels.resize(cropped, 16))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_and_worker_processes_see_the_same_pixels(workers):
    """As in a notebook, nothing has parsed absl's flags, which Grain's workers read."""
    rest = batches(random_dataset(), first=3, workers=workers)
    for a, b in zip(batches(random_dataset())[3:], rest, strict=True):
        assert all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


def test_two_processes_share_the_rows_of_a_batch():
    """One has the first five rows of each batch of 8, another the rest, padded with black."""
    dataset = random_dataset()

    def delivered(*rows):
        given = training_batches(dataset, plans(dataset, size=8), range(4), VIEW, rows=range(*rows))
        return jax.tree.map(lambda *arrays: np.stack(arrays), *given)

    full, first, second = delivered(8), delivered(5), delivered(5, 10)
    for get in (lambda batch: batch.inputs["images"], lambda batch: batch.flips):
        expected, a, b = map(get, (full, first, second))
        padded = np.concatenate([expected, np.zeros_like(expected[:, :2])], axis=1)
        np.testing.assert_array_equal(np.concatenate([a, b], axis=1), padded)
    for batch in (first, second):
        assert np.array_equal(batch.labels, full.labels) and np.array_equal(batch.ids, full.ids)


def photo(width=500, height=400, seed=0):
    """Returns a picture with smooth regions and edges, like a photo."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (height // 20, width // 20, 3), np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


jpeg = functools.partial(encoded, kind="JPEG")


def dataset_of_files(*files, **options):
    images = [pixels.decode(file, 3, upright=options.get("upright", False)) for file in files]
    sizes = np.array([image.size[::-1] for image in images])
    records = {"records": [*files], "sizes": sizes}
    return dataset_without_images(np.arange(len(files)), **records, **options)


def crop(dataset, i, side, channels):
    frame = Frame(tuple(dataset.sizes[i].tolist()), (31, 57, 300, 280))
    return dataset.crop(i, frame, side, channels)


def test_crops_are_those_of_the_whole_image_also_from_the_host_cache(tmp_path):
    """Draft decoding, or a resize that reads beyond the box, would give other pixels."""
    files = [jpeg(photo(seed=i), quality=90) for i in range(3)]
    files += [encoded(photo().convert("L")), jpeg(photo().convert("CMYK"))]
    cut = Image.open(io.BytesIO(files[0])).crop((57, 31, 337, 331))
    expected = cut.resize((32, 32), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(crop(dataset_of_files(files[0]), 0, 32, 3), expected)
    for channels in (1, 3):
        exact = dataset_of_files(*files)
        decoded = ArrayCache(tmp_path / str(channels), len(exact))
        cached = dataclasses.replace(exact, decoded=decoded)
        fill_cache(cached, channels)
        cached = pickle.loads(pickle.dumps(cached.take(np.array([4, 0, 2, 3]))))
        view, padded = View(32, 40, channels), View(500, 500, channels, "letterbox")
        for i, j in enumerate([4, 0, 2, 3]):
            for images in (
                (crop(cached, i, 32, channels), crop(exact, j, 32, channels)),
                (cached.test_view(i, view), exact.test_view(j, view)),
                (cached.test_view(i, padded), exact.test_view(j, padded)),
                (cached.image(i, channels), exact.image(j, channels)),
            ):
                np.testing.assert_array_equal(*images)


@pytest.mark.parametrize(("file", "byte", "count"), [("arrays", 0, 6144), ("index", 24, 1)])
def test_damaged_images_in_the_host_cache_are_decoded_again(tmp_path, capsys, file, byte, count):
    exact = random_dataset(n=8)
    opened = [dataclasses.replace(exact, decoded=ArrayCache(tmp_path, 8)) for _ in range(2)]
    fill_cache(opened[0], 3)
    intact = (tmp_path / file).read_bytes()
    damaged = np.frombuffer(intact, np.uint8).copy()
    damaged[byte : byte + count] ^= 1
    (tmp_path / file).write_bytes(damaged)
    for cached in opened:
        fill_cache(cached, 3)
        for i in range(8):
            np.testing.assert_array_equal(cached.image(i, 3), exact.image(i, 3))
    assert capsys.readouterr().err.count("is damaged; what differs is computed again") == 1
    assert (tmp_path / file).read_bytes() == intact


def test_images_that_are_left_out_have_no_place_in_the_host_cache(tmp_path):
    """The image after one that cannot be read was taken for the next one."""
    exact = random_dataset(n=4).take(np.array([0, 2, 3]))
    cached = decoded_as(exact, Decoding(cache_dir=tmp_path))
    fill_cache(cached, 3)
    for i in range(3):
        np.testing.assert_array_equal(cached.image(i, 3), exact.image(i, 3))


@pytest.mark.parametrize("fast", [False, True])
def test_a_photo_that_was_replaced_is_named(fast):
    """Its plan is for another size: pixels beyond the image would be black."""
    dataset = dataset_of_files(jpeg(photo()), jpeg(photo(80, 60)), fast=fast)
    dataset.records.reverse()
    message = r"cannot read record 0 \(it is 80×60 pixels, but was 500×400 before\)"
    with pytest.raises(UserError, match=message):
        crop(dataset, 0, 32, 3)


def nearly_the_same(a, b, tolerance):
    difference = np.abs(np.asarray(a, int) - np.asarray(b, int))
    return difference.max() <= tolerance and difference.mean() <= tolerance / 10


def test_the_fast_decoder_gives_nearly_the_same_pixels():
    """A shift by half a reduced pixel would change them by up to 50 levels, and 14 on average."""
    files = [jpeg(photo(801, 603), quality=90), jpeg(photo().convert("L"), quality=90)]
    exact = dataset_of_files(*files)
    fast = dataclasses.replace(exact, fast=True)
    for i, channels, (side, tolerance) in itertools.product(range(2), (1, 3), [(250, 2), (32, 12)]):
        a, b = (crop(d, i, side, channels) for d in (exact, fast))
        assert nearly_the_same(a, b, tolerance)
        for kind in ("centre_crop", "letterbox", "squash"):
            view = View(side, side + 20, channels, kind)
            assert nearly_the_same(*(d.test_view(i, view) for d in (exact, fast)), tolerance)


def test_the_fast_decoder_leaves_unknown_files_to_the_exact_one():
    turned = Image.Exif()
    turned[0x0112] = 6
    exact = dataset_of_files(encoded(photo()), jpeg(photo(), exif=turned), upright=True)
    fast = dataclasses.replace(exact, fast=True)
    for i in range(2):
        np.testing.assert_array_equal(crop(fast, i, 32, 3), crop(exact, i, 32, 3))
    exact.records[1] = exact.records[1][:2000]
    for broken in (exact, fast):
        with pytest.raises(UserError, match="cannot read record 1"):
            crop(broken, 1, 32, 3)


def test_evaluation_views_come_in_order_with_the_last_batch_padded():
    dataset = random_dataset(n=10)
    views = [images for images, _ in readable_batches(dataset, VIEW, 4)]
    assert [view.shape for view in views] == [(4, 16, 16, 3)] * 3
    for i, view in enumerate(np.concatenate(views)[:10]):
        image = Image.open(io.BytesIO(dataset.records[i]))
        frame = centre_crop(image.height, image.width, VIEW)
        np.testing.assert_array_equal(view, pixels.show(image, frame, 16))
    assert not views[2][2:].any()
    dataset.records[1] = b"no image"
    images, broken = next(readable_batches(dataset, VIEW, 4))
    assert broken == {1: "not an image"} and not images[1].any() and images[2].any()
    with pytest.raises(UserError, match="cannot read record 1"):
        list(readable_batches(dataset, VIEW, 4, tolerant=False))
