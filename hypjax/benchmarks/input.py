"""Input beside torchvision: decoding, cropping and resizing photos by all cores, or a device."""

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
from hypjax.benchmarks import peers
from hypjax.benchmarks.measure import Work
from hypjax.data import device_crops, pixels
from hypjax.data.dataset import Dataset, fill_cache
from hypjax.data.device_cache import CacheLayout, crop_batches, fill, lay_out
from hypjax.data.device_crops import Store
from hypjax.data.host_cache import DecodedImages
from hypjax.data.photos import Files, find_photos
from hypjax.data.pipeline import evaluation_batches, training_batches
from hypjax.data.plans import Plan, RandomCrop, ShuffledPlans
from hypjax.errors import UserError
from hypjax.models.normalize import mirror
from hypjax.system.cores import usable_cores
from hypjax.types import Crops, View

_SIDE, _SHORTER_SIDE = 224, 256
_VIEW = View(_SIDE, _SHORTER_SIDE, channels=3)
_AREA, _RATIO = (0.2, 1.0), (3 / 4, 4 / 3)  # Of RandomResizedCrop, as Hyp-ViT has them.
_BATCH = 100
_INSTALL = "torchvision (pip install torchvision)"


def works(quick: bool, images: str | None) -> Iterator[Work]:
    """What is timed: 2,000 training views, and the test views of all photos.

    Args:
        quick: A tenth of it.
        images: Folder of photos; None: some are made, of CUB's usual size.
    """
    with contextlib.ExitStack() as stack:
        if images is None:
            folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
            paths = _photos(folder)
        else:
            paths = [photo.path for photo in find_photos(images)]
        cache = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        yield from _works(paths, cache, batches=2 if quick else 20)


def _works(paths: Sequence[pathlib.Path], cache: pathlib.Path, batches: int) -> Iterator[Work]:
    files = _open(paths)
    count = batches * _BATCH
    height, width = files.sizes.mean(axis=0).round().astype(int)
    what = f"{count} crops of photos of {width}×{height}"
    train, name = _peer(paths, count, training=True)
    for words, dataset in (
        ("exact pixels", files),
        ("fast decoder", _fast(files)),
        ("exact pixels, host cache", _cached(files, cache)),
    ):
        if dataset is not None:
            yield Work(
                f"{what}, {words}",
                functools.partial(_train, dataset, batches),
                train,
                name,
                items=count,
            )
    cut = functools.partial(_cut, *_on_device(files), batches)
    yield Work(
        f"{what}, decoded before, on the device ({_device()})", cut, train, name, items=count
    )
    yield from _large(batches * 5)
    test, name = _peer(paths, len(paths), training=False)
    evaluate = functools.partial(_evaluate, files)
    yield Work(f"{len(paths)} test views, exact pixels", evaluate, test, name, items=len(paths))


def _large(count: int) -> Iterator[Work]:
    """Photos as cameras make them, which the fast decoder is for."""
    with tempfile.TemporaryDirectory() as folder:
        paths = _photos(pathlib.Path(folder), width=3000, count=8)
        files = _open(paths)
        train, name = _peer(paths, count, training=True)
        for words, dataset in (("exact pixels", files), ("fast decoder", _fast(files))):
            if dataset is not None:
                yield Work(
                    f"{count} crops of photos of 3000 pixels' width, {words}",
                    functools.partial(_train, dataset, 5, count // 5),
                    train,
                    name,
                    items=count,
                )


def _photos(folder: pathlib.Path, width: int = 500, count: int = 64) -> list[pathlib.Path]:
    """Makes some JPEGs, of CUB's usual size, and about as large in bytes as photos are."""
    rng = np.random.default_rng(0)
    for i in range(count):
        height = int(width * rng.uniform(0.65, 0.85))
        coarse = Image.fromarray(rng.integers(0, 256, (24, 32, 3), np.uint8))
        smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
        grain = rng.normal(0, 12, smooth.shape).astype(np.int16)
        photo = Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8))
        photo.save(folder / f"{i}.jpg", quality=90)
    return sorted(folder.iterdir())


def _open(paths: Sequence[pathlib.Path]) -> Dataset:
    sizes = []
    for path in paths:
        with Image.open(path) as image:
            sizes.append((image.height, image.width))
    everything = np.arange(len(paths))
    return Dataset(Files(paths), everything, np.zeros_like(everything), np.array(sizes))


def _fast(files: Dataset) -> Dataset | None:
    from hypjax.data import fast_jpeg

    try:
        fast_jpeg.require()
    except UserError:
        return None
    return Dataset(files.records, files.positions, files.labels, files.sizes, fast=True)


def _cached(files: Dataset, folder: pathlib.Path) -> Dataset:
    decoded = DecodedImages(folder / "decoded.bin", files.sizes, channels=3)
    cached = Dataset(files.records, files.positions, files.labels, files.sizes, decoded=decoded)
    fill_cache(cached, channels=3)
    return cached


def _train(dataset: Dataset, batches: int, size: int = _BATCH) -> None:
    repeated, plans = _planned(dataset, size)
    for _ in training_batches(repeated, plans, range(batches), _VIEW):
        pass


def _planned(dataset: Dataset, size: int) -> tuple[Dataset, ShuffledPlans]:
    """The photos again and again, since they may be fewer than a batch wants, and their plans."""
    crop = RandomCrop(_AREA, _RATIO, flip=0.5)
    repeated = dataset.take(np.tile(np.arange(len(dataset)), -(-size // len(dataset))))
    return repeated, ShuffledPlans(repeated.labels, repeated.sizes, size, crop, seed=0)


def _on_device(files: Dataset) -> tuple[Callable[[int], Plan], CacheLayout, Store]:
    """Plans of the photos, which lie on one device, each once."""
    mesh = parallel.create_mesh((1, 1))
    layout = lay_out(files.sizes, channels=3)
    store = fill(layout, files, mesh)
    _, plans = _planned(files, _BATCH)

    def plan(step: int) -> Plan:
        planned = plans(step)
        return planned._replace(ids=planned.ids % len(files))

    return plan, layout, store


def _cut(plan: Callable[[int], Plan], layout: CacheLayout, store: Store, batches: int) -> None:
    """Crops and flips, as the train step does."""
    for batch in crop_batches(layout, plan, range(batches), range(_BATCH)):
        views = _views(store, batch.images, batch.flips)
    views.block_until_ready()


@jax.jit
def _views(store: Store, crops: Crops, flips: Array) -> Array:
    return mirror(device_crops.cut(store, crops, _SIDE), flips)


def _device() -> str:
    return jax.local_devices()[0].device_kind


def _evaluate(dataset: Dataset) -> None:
    for _ in evaluation_batches(dataset, _VIEW, _BATCH):
        pass


def _peer(
    paths: Sequence[pathlib.Path], count: int, training: bool
) -> tuple[Callable[[], object] | None, str]:
    """A pass over torchvision's DataLoader, whose workers are started once."""
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
    """The same views as PyTorch programs make them: a map-style dataset."""

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
