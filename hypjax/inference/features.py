"""Embeddings of datasets, whose images are read on the way."""

import contextlib
import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jaxlib
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, PyTree, UInt8
from ml_collections import ConfigDict

from hypjax import __version__, parallel
from hypjax.config import validate
from hypjax.config.choices import freezes_encoder
from hypjax.data.dataset import Dataset, union
from hypjax.data.parts import Splits
from hypjax.data.pipeline import readable_batches
from hypjax.data.pixels import DECODER
from hypjax.errors import UserError
from hypjax.inference.embedding import (
    ONE_SCALE,
    PixelScaling,
    Spaces,
    embed_function,
    encode_function,
    place_function,
)
from hypjax.inference.weights import pretrained_encoder
from hypjax.models import Embedder, create_embedder
from hypjax.models.own import OwnEncoder
from hypjax.runs.images import fit_to_features, open_splits
from hypjax.system import console, machine
from hypjax.system.array_cache import ArrayCache
from hypjax.system.caches import cache_folder
from hypjax.system.locks import claimed
from hypjax.types import View

_FORMAT = "hypjax features 2"  # Increase it if an encoder or a view computes something else.
Features = list[Float[np.ndarray, "images dim"]]  # At each scale, float32.


class EvaluationInput(NamedTuple):
    """How images reach a model that is evaluated."""

    view: View
    scaling: PixelScaling
    scales: tuple[float, ...]
    workers: int
    batch_size: int
    mesh: Mesh  # Devices that share each batch.


def evaluation_input(config: ConfigDict, mesh: Mesh | None = None) -> EvaluationInput:
    """The input that a configuration describes."""
    run, mesh = config.run, mesh or parallel.create_mesh(config.run.mesh)
    scaling, scales = (config.data.mean, config.data.std), tuple(config.eval.scales)
    how = run.workers, run.eval_batch_size, mesh
    return EvaluationInput(View.of(config.data), scaling, scales, *how)


def embed_dataset(
    embed: Callable[[UInt8[Array, "batch side side channels"]], PyTree],
    dataset: Dataset,
    source: EvaluationInput,
) -> PyTree:
    """Embeds all images of a dataset under the test view; returns one row for each, on the host.

    `embed` gets a batch, sharded and always of one size, and returns arrays that are replicated.
    """
    return _concatenated(_embedded_batches(embed, dataset, source))


def _concatenated(batches: Iterable[PyTree]) -> PyTree:
    return jax.tree.map(lambda *parts: np.concatenate(parts), *batches)


def _embedded_batches(
    embed: Callable[[UInt8[Array, "batch side side channels"]], PyTree],
    dataset: Dataset,
    source: EvaluationInput,
) -> Iterator[PyTree]:
    """Yields what `embed_dataset` returns, one batch at a time."""
    mesh, total = source.mesh, len(dataset)
    size = parallel.slices(source.batch_size, mesh).rows
    rows = parallel.local_rows(mesh, size)
    batches = readable_batches(dataset, source.view, size, source.workers, rows, tolerant=False)

    def on_host(first: int, found: PyTree) -> PyTree:
        return jax.tree.map(lambda x: np.asarray(x)[: total - first], found)

    pending = None  # Copied once the device computes the next one.
    with contextlib.closing(batches), machine.memory_explained("run.eval_batch_size"):
        for first, (images, _) in zip(range(0, total, size), batches, strict=True):
            found = parallel.gather(embed(parallel.shard(mesh, images)))
            if pending is not None:
                yield on_host(*pending)
            pending = first, found
        if pending is not None:
            yield on_host(*pending)


def pretrained_features(
    config: ConfigDict,
) -> tuple[Float[np.ndarray, "images dim"], tuple[str, ...]]:
    """Embeds the training images with the encoder that `model.weights` names.

    As in Hyp-ViT's Table 1, the features are not normalised, and a centre crop cuts nothing off the
    shorter side, whatever `data.resize` says. Beside them are the notes that every result computed
    from these images must carry. Several scales are refused: unlike points of a space, these
    features have no mean.
    """
    config = fit_to_features(config)
    validate(config)
    if tuple(config.eval.scales) != ONE_SCALE:
        raise UserError(
            f"config.eval.scales is {config.eval.scales}, but the encoder's features are measured "
            "at one scale; set --config.eval.scales=1, or measure a gallery with --embeddings"
        )
    model = create_embedder(config, evaluating=True)
    splits = open_splits(config)
    train, source = splits.training_images(), evaluation_input(config)
    source = source._replace(view=source.view._replace(resize=source.view.side))
    if train.vectors is not None:
        return train.vectors, splits.notes
    params = {"encoder": pretrained_encoder(config, model.encoder)}
    return Encodings(model, source).encode(params, train)[0], splits.notes


class Encodings:
    """The encoder's embeddings of images under the test view, at each of some scales.

    Those of `datasets` are computed once, all together, and kept in memory: an encoder that is not
    trained embeds an image in the same way whenever it is scored. With a folder they are kept
    there, too, for other runs, unless several processes share the work.
    """

    def __init__(
        self,
        model: Embedder,
        source: EvaluationInput,
        datasets: Sequence[Dataset] = (),
        folder: pathlib.Path | None = None,
    ) -> None:
        self.model, self.source, self._folder = model, source, folder
        by_records: dict[int, list[Dataset]] = {}
        for images in datasets:
            if images.boxes is None:
                by_records.setdefault(id(images.records), []).append(images)
        # By the identity of the records: the images, and their embeddings at each scale.
        self._images = {key: union(images) for key, images in by_records.items()}
        self._features: dict[int, Features] = {}

    def of(
        self, params: PyTree, dataset: Dataset
    ) -> dict[float, Float[np.ndarray, "images dim"]] | None:
        """The embeddings of images that are kept, by scale; None if they are not.

        The first call embeds all datasets that share the images' records, so the encoder's
        parameters must be the same in all calls.
        """
        key = id(dataset.records)
        images = None if dataset.boxes is not None else self._images.get(key)
        if images is None or not np.isin(dataset.positions, images.positions).all():
            return None
        if key not in self._features:
            self._features[key] = self._computed_once(params, images)
        rows = np.searchsorted(images.positions, dataset.positions)
        features = zip(self.source.scales, self._features[key], strict=True)
        return {scale: at_scale[rows] for scale, at_scale in features}

    def _computed_once(self, params: PyTree, images: Dataset) -> Features:
        """The embeddings of images from the folder, or else computed, and kept there."""

        def compute(done: int) -> Iterator[Features]:
            count = len(images) - done
            if count:
                console.say(f"embedding {count} images with the frozen encoder, once")
            return self._batches(params, images.take(np.arange(done, len(images))))

        if self._folder is None or images.source is None or jax.process_count() > 1:
            return _concatenated(compute(0))
        what = images.source, images.positions.tolist(), images.upright, images.fast
        source, platform = self.source, self.source.mesh.devices.flat[0].platform
        how = DECODER, source.view, source.scaling, source.scales, self.model.encoder, platform
        folder = self._folder / feature_key((*what, *how), params["encoder"])
        return cached_features(folder, len(images), len(source.scales), compute)

    def encode(self, params: PyTree, dataset: Dataset) -> Features:
        """Embeds all images of a dataset; returns one array for each scale."""
        return _concatenated(self._batches(params, dataset))

    def _batches(self, params: PyTree, dataset: Dataset) -> Iterator[Features]:
        params = {"encoder": params.get("encoder", {})}  # It may have none.
        params = parallel.place(params, parallel.replicated(self.source.mesh))
        return _embedded_batches(functools.partial(self._encode, params), dataset, self.source)

    @functools.cached_property
    def _encode(self) -> Callable[[PyTree, Array], list[Array]]:
        function = encode_function(self.model, self.source.scaling, self.source.scales)
        return jax.jit(parallel.map_images(function, self.source.mesh))


def feature_key(facts: Sequence[object], params: PyTree) -> str:
    """Hash of facts, whose `repr` says all about them, of parameters, and of versions."""
    versions = __version__, jax.__version__, jaxlib.__version__
    digest = hashlib.sha256(repr((_FORMAT, *versions, *facts)).encode())
    for leaf in jax.tree.leaves(params):
        digest.update(np.ascontiguousarray(leaf))
    return digest.hexdigest()[:32]


def cached_features(
    folder: pathlib.Path, count: int, scales: int, compute: Callable[[int], Iterable[Features]]
) -> Features:
    """Returns the features of so many images from a folder, and computes those it lacks.

    One process at a time fills the folder, and others wait. `compute` gets the number of images
    whose features are there, and yields the others' in batches. Damaged features are computed
    again. Where nothing can be written, a warning says so.
    """
    try:
        table = None
        while table is None:
            cache = ArrayCache(folder, count)
            if not cache.is_complete():
                with cache.filling(claimed(folder, "embedding images")) as done:
                    for batch in compute(done):
                        cache.append(np.stack(batch, axis=1))
            table = cache.table(np.float32)
        return list(table[0].reshape(count, scales, -1).swapaxes(0, 1).copy())
    except OSError as error:
        console.warn(f"features cannot be kept in {folder} ({error.strerror})")
        return _concatenated(compute(0))


def frozen_encodings(
    config: ConfigDict, model: Embedder, source: EvaluationInput, splits: Splits
) -> Encodings | None:
    """What a run keeps of its encoder's embeddings; None if it is trained, or they are given."""
    if not freezes_encoder(config.optim.frozen) or not model.encoder.takes_pixels:
        return None
    train, embeds = config.train, any(config.eval.pca.values())
    embeds |= train.cached_features or train.sampling == "tuples"
    embeds |= config.model.head_init == "pca"
    parts = (splits.test, splits.gallery, splits.validation, splits.train if embeds else None)
    folder, kind = None, type(model.encoder)
    # The code of a user's encoder may change under the same name.
    if kind is not OwnEncoder and kind.__module__.startswith("hypjax."):
        folder = pathlib.Path(config.run.cache_dir or cache_folder()).expanduser() / "features"
    return Encodings(model, source, list(filter(None, parts)), folder)


@dataclasses.dataclass(frozen=True, eq=False)
class DatasetEmbedder:
    """Embeds datasets with a model; compiled once, whatever their sizes and the learned space."""

    model: Embedder
    spaces: Spaces
    source: EvaluationInput
    encodings: Encodings | None = None

    def points(self, params: PyTree, dataset: Dataset) -> dict[str, np.ndarray]:
        """Embeds all images of a dataset, each part of the model in its space."""
        scales = self.source.scales
        if self.encodings is not None and set(scales) <= set(self.encodings.source.scales):
            if (kept := self.encodings.of(params, dataset)) is not None:
                return self._placed(params, [kept[scale] for scale in scales])
        params = parallel.place(params, parallel.replicated(self.source.mesh))
        return embed_dataset(functools.partial(self._embed, params), dataset, self.source)

    def _placed(
        self, params: PyTree, encoded: Sequence[Float[np.ndarray, "images dim"]]
    ) -> dict[str, np.ndarray]:
        """From the encoder's embeddings at each scale to points."""
        mesh = self.source.mesh
        params = {name: own for name, own in params.items() if name != "encoder"}
        params = parallel.place(params, parallel.replicated(mesh))
        count, size = len(encoded[0]), parallel.slices(self.source.batch_size, mesh).rows
        local, parts = list(parallel.local_rows(mesh, size)), []
        for start in range(0, count, size):
            rows = [each[start : start + size] for each in encoded]
            padded = [np.resize(each, (size, each.shape[1]))[local] for each in rows]
            batch = parallel.shard(mesh, padded)
            parts.append(parallel.gather(self._place(params, batch)))
        return jax.tree.map(lambda *rows: np.concatenate(rows)[:count], *parts)

    @functools.cached_property
    def _embed(self) -> Callable[[PyTree, Array], dict[str, Array]]:
        how = self.source.scaling, self.spaces, self.source.scales
        function = embed_function(self.model, *how)
        return jax.jit(parallel.map_images(function, self.source.mesh))

    @functools.cached_property
    def _place(self) -> Callable[[PyTree, Sequence[Array]], dict[str, Array]]:
        function = place_function(self.model, self.spaces)
        return jax.jit(parallel.map_images(function, self.source.mesh))
