"""Input, compared with torchvision: decoding, cropping and resizing photos."""

import collections
import contextlib
import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from PIL import Image

from benchmarks import peers
from benchmarks.job import scene
from benchmarks.measure import Options, Task
from hypjax import parallel
from hypjax.data import pixels
from hypjax.data.dataset import Dataset, fill_cache
from hypjax.data.device_cache import crop_batches, fill, lay_out
from hypjax.data.device_crops import cut
from hypjax.data.photo_dataset import Files
from hypjax.data.photos import find_photos
from hypjax.data.pipeline import evaluation_batches, training_batches
from hypjax.data.plans import Plan, ShuffledPlans
from hypjax.data.views import RandomCrop
from hypjax.errors import UserError
from hypjax.models.layers import mirror
from hypjax.system.array_cache import ArrayCache
from hypjax.system.machine import usable_cores
from hypjax.types import View

_SIDE, _SHORTER_SIDE = 224, 256
_VIEW = View(_SIDE, _SHORTER_SIDE, channels=3)
_AREA, _RATIO = (0.2, 1.0), (3 / 4, 4 / 3)  # Of RandomResizedCrop in Hyp-ViT.
_BATCH = 100


def tasks(options: Options) -> Iterator[Task]:
    """2,000 training views, or a tenth if quick, and the test views of all photos."""
    batches = 2 if options.quick else 20
    with contextlib.ExitStack() as stack:
        folders = (stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(3))
        small, large, cache = map(pathlib.Path, folders)
        if options.images is None:
            paths = _make_photos(small, width=500, count=64)  # Of CUB's typical size.
        else:
            paths = _image_files(options.images)
        files, count = _open_dataset(paths), batches * _BATCH
        height, width = files.sizes.mean(axis=0).round().astype(int)
        words = f"{count} crops of photos of {width}×{height}"
        train, name = _peer(paths, count, training=True)
        decoded = ArrayCache(cache / "decoded", len(files))
        cached = dataclasses.replace(files, decoded=decoded)
        fill_cache(cached, channels=3)
        for variant, dataset in {**_decoders(files), "exact pixels, host cache": cached}.items():
            read = functools.partial(_read_training_batches, dataset, batches, _BATCH)
            yield Task(f"{words}, {variant}", read, train, name, items=count)
        device = jax.local_devices()[0].device_kind
        crop = _crops_on_device(files, batches)
        yield Task(f"{words}, from the device cache ({device})", crop, train, name, items=count)
        # Photos of a camera's size, for which the fast decoder is made.
        photos, fewer = _make_photos(large, width=3000, count=8), batches * 5
        train, _ = _peer(photos, fewer, training=True)
        for variant, dataset in _decoders(_open_dataset(photos)).items():
            read = functools.partial(_read_training_batches, dataset, 5, batches)
            words = f"{fewer} crops of photos 3000 pixels wide, {variant}"
            yield Task(words, read, train, name, items=fewer)
        test, _ = _peer(paths, len(paths), training=False)
        yield Task(
            f"{len(paths)} test views, exact pixels",
            lambda: _consume(evaluation_batches(files, _VIEW, _BATCH)),
            test,
            name,
            items=len(paths),
        )


def _image_files(where: str) -> list[pathlib.Path]:
    photos = find_photos(where)
    if any(photo.content is not photo.path or photo.vector is not None for photo in photos):
        raise UserError(f"{where} holds no files of single images; name a folder of them")
    return [pathlib.Path(photo.path) for photo in photos]


def _make_photos(folder: pathlib.Path, width: int, count: int) -> list[pathlib.Path]:
    """Writes JPEG files that take about as many bytes as photos."""
    rng = np.random.default_rng(0)
    for i in range(count):
        height = int(width * rng.uniform(0.65, 0.85))
        photo = Image.fromarray(scene(rng, (24, 32), (height, width)))
        photo.save(folder / f"{i}.jpg", quality=90)
    return sorted(folder.iterdir())


def _open_dataset(paths: Sequence[pathlib.Path]) -> Dataset:
    sizes = []
    for path in paths:
        with Image.open(path) as image:
            sizes.append((image.height, image.width))
    positions = np.arange(len(paths))
    return Dataset(Files(paths), positions, np.zeros_like(positions), np.array(sizes))


def _decoders(files: Dataset) -> dict[str, Dataset]:
    return {"exact pixels": files, "fast decoder": dataclasses.replace(files, fast=True)}


def _consume(batches: Iterator[Any]) -> None:
    collections.deque(batches, maxlen=0)


def _read_training_batches(dataset: Dataset, batches: int, size: int) -> None:
    repeated, plans = _repeat_and_plan(dataset, size)
    _consume(training_batches(repeated, plans, range(batches), _VIEW))


def _repeat_and_plan(dataset: Dataset, size: int) -> tuple[Dataset, ShuffledPlans]:
    """Repeats the photos until they suffice for a batch of the given size, and plans batches."""
    crop = RandomCrop(_AREA, _RATIO, flip=0.5)
    repeated = dataset.take(np.tile(np.arange(len(dataset)), -(-size // len(dataset))))
    return repeated, ShuffledPlans(repeated.labels, repeated.sizes, size, crop, seed=0)


def _crops_on_device(files: Dataset, batches: int) -> Callable[[], None]:
    """Returns what crops and flips as the train step does, from photos stored on one device."""
    layout = lay_out(files.sizes, channels=3)
    store = fill(layout, files, parallel.create_mesh((1, 1)))
    _, plans = _repeat_and_plan(files, _BATCH)
    view = jax.jit(lambda store, crops, flips: mirror(cut(store, crops, _SIDE), flips))

    def plan(step: int) -> Plan:
        planned = plans(step)
        return planned._replace(ids=planned.ids % len(files))  # Each photo is stored once.

    def run() -> None:
        for batch in crop_batches(layout, plan, range(batches), range(_BATCH)):
            views = view(store, batch.images, batch.flips)
        views.block_until_ready()

    return run


def _peer(
    paths: Sequence[pathlib.Path], count: int, training: bool
) -> tuple[Callable[[], None] | None, str]:
    """Returns a pass over torchvision's DataLoader with persistent workers, and its name."""
    if not peers.installed("torchvision"):
        return None, "torchvision (pip install torchvision)"
    import torch
    from torchvision import transforms

    bicubic = transforms.InterpolationMode.BICUBIC
    if training:
        crop = transforms.RandomResizedCrop(_SIDE, _AREA, _RATIO, interpolation=bicubic)
        view = [crop, transforms.RandomHorizontalFlip()]
    else:
        view = [transforms.Resize(_SHORTER_SIDE, bicubic), transforms.CenterCrop(_SIDE)]
    half = (0.5, 0.5, 0.5)
    view += [transforms.ToTensor(), transforms.Normalize(half, half)]
    loader = torch.utils.data.DataLoader(
        _TorchPhotos(paths, count, transforms.Compose(view)),
        batch_size=_BATCH,
        num_workers=usable_cores(),
        persistent_workers=True,
        multiprocessing_context="forkserver",  # JAX's threads do not survive a fork.
    )
    name = f"torchvision DataLoader, {loader.num_workers} workers"
    return lambda: _consume(iter(loader)), name


@dataclasses.dataclass(frozen=True)
class _TorchPhotos:
    """The same views as a map-style dataset of PyTorch."""

    paths: Sequence[pathlib.Path]
    count: int
    transform: Callable[[Image.Image], Any]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        with Image.open(self.paths[i % len(self.paths)]) as image:
            return self.transform(image.convert(pixels.MODES[3]))
