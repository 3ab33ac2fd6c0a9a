"""Input, compared with torchvision: decoding, cropping and resizing photos."""

import contextlib
import functools
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array
from PIL import Image

from hypjax import parallel
from hypjax.benchmarks import measure, peers
from hypjax.benchmarks.measure import Task, table  # noqa: F401
from hypjax.data import pixels
from hypjax.data.dataset import Dataset, fill_cache
from hypjax.data.device_cache import CacheLayout, crop_batches, fill, lay_out
from hypjax.data.device_crops import Store, cut
from hypjax.data.host_cache import DecodedImages
from hypjax.data.photo_dataset import Files
from hypjax.data.photos import find_photos
from hypjax.data.pipeline import evaluation_batches, training_batches
from hypjax.data.plans import Plan, ShuffledPlans
from hypjax.data.views import RandomCrop
from hypjax.models.layers import mirror
from hypjax.system.machine import usable_cores
from hypjax.types import Crops, View

_SIDE, _SHORTER_SIDE = 224, 256
_VIEW = View(_SIDE, _SHORTER_SIDE, channels=3)
_AREA, _RATIO = (0.2, 1.0), (3 / 4, 4 / 3)  # Of RandomResizedCrop in Hyp-ViT.
_BATCH = 100
_INSTALL = "torchvision (pip install torchvision)"


def rows(options: measure.Options) -> measure.Rows:
    """Measures 2,000 training views, or a tenth if quick, and the test views of all photos."""
    with contextlib.ExitStack() as stack:
        folders = (stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(3))
        small, large, cache = map(pathlib.Path, folders)
        if options.images is None:
            paths = _make_photos(small, width=500, count=64)  # Of CUB's typical size.
        else:
            paths = [photo.path for photo in find_photos(options.images)]
        tasks = _tasks(paths, large, cache, batches=2 if options.quick else 20)
        return measure.measure(tasks, options.repeats)


def _tasks(
    paths: Sequence[pathlib.Path], large: pathlib.Path, cache: pathlib.Path, batches: int
) -> Iterator[Task]:
    files, count = _open_dataset(paths), batches * _BATCH
    height, width = files.sizes.mean(axis=0).round().astype(int)
    words = f"{count} crops of photos of {width}×{height}"
    train, name = _peer(paths, count, training=True)

    def crops(words: str, dataset: Dataset, batches: int, size: int, peer: Any) -> Task:
        read = functools.partial(_read_training_batches, dataset, batches, size)
        return Task(words, read, peer, name, items=batches * size)

    def variants(files: Dataset) -> dict[str, Dataset]:
        return {"exact pixels": files, "fast decoder": _with_fast_decoder(files)}

    cached = {"exact pixels, host cache": _with_host_cache(files, cache)}
    for variant, dataset in {**variants(files), **cached}.items():
        yield crops(f"{words}, {variant}", dataset, batches, _BATCH, train)
    crop = functools.partial(_crop_on_device, *_fill_device_cache(files), batches)
    device = jax.local_devices()[0].device_kind
    yield Task(f"{words}, from the device cache ({device})", crop, train, name, items=count)
    # Photos of a camera's size, for which the fast decoder is made.
    photos, count = _make_photos(large, width=3000, count=8), batches * 5
    train, _ = _peer(photos, count, training=True)
    for variant, dataset in variants(_open_dataset(photos)).items():
        words = f"{count} crops of photos 3000 pixels wide, {variant}"
        yield crops(words, dataset, 5, batches, train)
    test, _ = _peer(paths, len(paths), training=False)
    evaluate = functools.partial(_read_evaluation_batches, files)
    yield Task(f"{len(paths)} test views, exact pixels", evaluate, test, name, items=len(paths))


def _make_photos(folder: pathlib.Path, width: int, count: int) -> list[pathlib.Path]:
    """Writes JPEG files that take about as many bytes as photos."""
    rng = np.random.default_rng(0)
    for i in range(count):
        height = int(width * rng.uniform(0.65, 0.85))
        coarse = Image.fromarray(rng.integers(0, 256, (24, 32, 3), np.uint8))
        smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
        grain = rng.normal(0, 12, smooth.shape).astype(np.int16)
        photo = Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8))
        photo.save(folder / f"{i}.jpg", quality=90)
    return sorted(folder.iterdir())


def _open_dataset(paths: Sequence[pathlib.Path]) -> Dataset:
    sizes = []
    for path in paths:
        with Image.open(path) as image:
            sizes.append((image.height, image.width))
    positions = np.arange(len(paths))
    return Dataset(Files(paths), positions, np.zeros_like(positions), np.array(sizes))


def _with_fast_decoder(files: Dataset) -> Dataset:
    return Dataset(files.records, files.positions, files.labels, files.sizes, fast=True)


def _with_host_cache(files: Dataset, folder: pathlib.Path) -> Dataset:
    decoded = DecodedImages(folder / "decoded.bin", files.sizes, channels=3)
    cached = Dataset(files.records, files.positions, files.labels, files.sizes, decoded=decoded)
    fill_cache(cached, channels=3)
    return cached


def _read_training_batches(dataset: Dataset, batches: int, size: int) -> None:
    repeated, plans = _repeat_and_plan(dataset, size)
    for _ in training_batches(repeated, plans, range(batches), _VIEW):
        pass


def _repeat_and_plan(dataset: Dataset, size: int) -> tuple[Dataset, ShuffledPlans]:
    """Repeats the photos until they suffice for a batch of the given size, and plans batches."""
    crop = RandomCrop(_AREA, _RATIO, flip=0.5)
    repeated = dataset.take(np.tile(np.arange(len(dataset)), -(-size // len(dataset))))
    return repeated, ShuffledPlans(repeated.labels, repeated.sizes, size, crop, seed=0)


def _fill_device_cache(files: Dataset) -> tuple[Callable[[int], Plan], CacheLayout, Store]:
    """Stores each photo once on one device; returns plans, layout and stored pixels."""
    mesh = parallel.create_mesh((1, 1))
    layout = lay_out(files.sizes, channels=3)
    store = fill(layout, files, mesh)
    _, plans = _repeat_and_plan(files, _BATCH)

    def plan(step: int) -> Plan:
        planned = plans(step)
        return planned._replace(ids=planned.ids % len(files))

    return plan, layout, store


def _crop_on_device(
    plan: Callable[[int], Plan], layout: CacheLayout, store: Store, batches: int
) -> None:
    """Crops and flips as the train step does."""
    for batch in crop_batches(layout, plan, range(batches), range(_BATCH)):
        views = _views(store, batch.images, batch.flips)
    views.block_until_ready()


@jax.jit
def _views(store: Store, crops: Crops, flips: Array) -> Array:
    return mirror(cut(store, crops, _SIDE), flips)


def _read_evaluation_batches(dataset: Dataset) -> None:
    for _ in evaluation_batches(dataset, _VIEW, _BATCH):
        pass


def _peer(
    paths: Sequence[pathlib.Path], count: int, training: bool
) -> tuple[Callable[[], object] | None, str]:
    """Returns a pass over torchvision's DataLoader with persistent workers, and its name."""
    if peers.torchvision() is None:
        return None, _INSTALL
    import torch

    loader = torch.utils.data.DataLoader(
        _TorchPhotos([str(path) for path in paths], count, training),
        batch_size=_BATCH,
        num_workers=usable_cores(),
        persistent_workers=True,
        multiprocessing_context="forkserver",  # JAX's threads do not survive a fork.
    )

    def run() -> None:
        for _ in loader:
            pass

    return run, f"torchvision DataLoader, {loader.num_workers} workers"


class _TorchPhotos:
    """The same views as a map-style dataset of PyTorch."""

    def __init__(self, paths: Sequence[str], count: int, training: bool) -> None:
        self._paths, self._count, self._training = paths, count, training

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> Any:
        with Image.open(self._paths[i % len(self._paths)]) as image:
            return self._transform(image.convert(pixels.MODES[3]))

    @functools.cached_property
    def _transform(self) -> Callable[[Image.Image], Any]:
        transforms = peers.torchvision().transforms
        bicubic = transforms.InterpolationMode.BICUBIC
        if self._training:
            view = [
                transforms.RandomResizedCrop(_SIDE, _AREA, _RATIO, interpolation=bicubic),
                transforms.RandomHorizontalFlip(),
            ]
        else:
            view = [transforms.Resize(_SHORTER_SIDE, bicubic), transforms.CenterCrop(_SIDE)]
        half = (0.5, 0.5, 0.5)
        return transforms.Compose([*view, transforms.ToTensor(), transforms.Normalize(half, half)])
