"""Speed of input, compared with torchvision: decoding, cropping and resizing photos."""

import collections
import dataclasses
import functools
import io
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from PIL import Image

from benchmarks import job, measure, peers
from benchmarks.measure import COLUMNS as COLUMNS
from benchmarks.measure import Task
from hypjax.data.dataset import Dataset, fill_cache
from hypjax.data.photos import find_images
from hypjax.data.pipeline import readable_batches, training_batches
from hypjax.data.plans import ShuffledPlans
from hypjax.data.views import RandomCrop
from hypjax.system.array_cache import ArrayCache
from hypjax.system.machine import usable_cores
from hypjax.types import View

_SIDE, _SHORTER_SIDE = 224, 256
_VIEW = View(_SIDE, _SHORTER_SIDE, channels=3)
_AREA, _RATIO = (0.2, 1.0), (3 / 4, 4 / 3)  # Parameters of RandomResizedCrop in Hyp-ViT.
_BATCH = 100


def rows(options: measure.Options) -> Iterator[dict[str, Any]]:
    """Times 2,000 training views, or a tenth if quick, and the test views of all photos."""
    with tempfile.TemporaryDirectory() as folder:
        yield from measure.measure(_tasks(options, pathlib.Path(folder)), options)


def _tasks(options: measure.Options, folder: pathlib.Path) -> Iterator[Task]:
    batches = 2 if options.quick else 20
    if options.images is None:
        job.write_photos(folder / "small", 500, 64, [0])  # Of CUB's typical size.
    files = _open_dataset(options.images or folder / "small")
    height, width = files.sizes.mean(axis=0).round().astype(int)
    cached = dataclasses.replace(files, decoded=ArrayCache(folder / "decoded", len(files)))
    fill_cache(cached, channels=3)
    variants = {**_with_each_decoder(files), "exact pixels, host cache": cached}
    yield from _crop_tasks(variants, f"{width}×{height}", batches, _BATCH)
    # Photos of a camera's size, for which the fast decoder is made.
    job.write_photos(folder / "large", 3000, 8, [0])
    large = _with_each_decoder(_open_dataset(folder / "large"))
    yield from _crop_tasks(large, "3000 pixels in width", 5, batches)
    peer, peer_name = _torchvision_loader(files, len(files), training=False)
    yield Task(
        f"{len(files)} test views, exact pixels",
        lambda: _consume(readable_batches(files, _VIEW, _BATCH)),
        peer,
        peer_name,
        items=len(files),
    )


def _open_dataset(where: str | pathlib.Path) -> Dataset:
    files = find_images(str(where))
    sizes = np.array([_open_image(files.content(i)).size[::-1] for i in range(len(files))])
    return dataclasses.replace(files, sizes=sizes, upright=False)


def _open_image(file: bytes) -> Image.Image:
    return Image.open(io.BytesIO(file))


def _with_each_decoder(files: Dataset) -> dict[str, Dataset]:
    return {"exact pixels": files, "fast decoder": dataclasses.replace(files, fast=True)}


def _crop_tasks(
    variants: dict[str, Dataset], size: str, batches: int, batch_size: int
) -> Iterator[Task]:
    count = batches * batch_size
    peer, name = _torchvision_loader(variants["exact pixels"], count, training=True)
    for variant, dataset in variants.items():
        read = functools.partial(_read_training_batches, dataset, batches, batch_size)
        yield Task(f"{count} crops of photos of {size}, {variant}", read, peer, name, items=count)


def _consume(batches: Iterator[Any]) -> None:
    collections.deque(batches, maxlen=0)


def _read_training_batches(dataset: Dataset, batches: int, size: int) -> None:
    """Repeats the photos until they suffice for a batch of the given size, and reads batches."""
    repeated = dataset.take(np.tile(np.arange(len(dataset)), -(-size // len(dataset))))
    crop = RandomCrop(_AREA, _RATIO, flip=0.5)
    plans = ShuffledPlans(repeated.labels, repeated.sizes, size, crop, seed=0)
    _consume(training_batches(repeated, plans, range(batches), _VIEW))


def _torchvision_loader(
    files: Dataset, count: int, training: bool
) -> tuple[Callable[[], None] | None, str]:
    """A pass over a DataLoader of PyTorch with torchvision's transforms, and its name."""
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
        _TorchPhotos(files, count, transforms.Compose(view)),
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

    files: Dataset
    count: int
    transform: Callable[[Image.Image], Any]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        return self.transform(_open_image(self.files.content(i % len(self.files))).convert("RGB"))
