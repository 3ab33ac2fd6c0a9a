"""Embeds images with any model, also of another library, in memory or into a file."""

import abc
import concurrent.futures
import dataclasses
import functools
import glob
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float, Int
from PIL import Image

from hypjax.config.recipes import ENCODERS
from hypjax.data.dataset import Dataset
from hypjax.data.pipeline import warn_of_dark
from hypjax.errors import UserError, counted, reason, similar, writing
from hypjax.experiment.embedding import fingerprint
from hypjax.galleries.embeddings import Embeddings
from hypjax.geometry import Space, Sphere
from hypjax.models.architectures import supported
from hypjax.system import console, integrations
from hypjax.system.array_cache import ArrayCache
from hypjax.system.files import locked, remove
from hypjax.system.machine import usable_cores
from hypjax.system.progress import Bar, ProgressLines

_BATCH_SIZE = 64  # Images that another library embeds at once.
_LONGEST = 1000  # Ratio of an image's sides, from which its library would need gigabytes.

# Embeddings of a batch, and by index why images could not be read.
Embedded = tuple[Float[np.ndarray, "n d"], dict[int, str]]


class ImageEmbedder(abc.ABC):
    """A model that embeds images."""

    name: str  # For messages.
    space: Space
    fingerprint: str  # Equal fingerprints mean comparable embeddings.

    @abc.abstractmethod
    def batches(self, dataset: Dataset, *, few: bool = False) -> Iterator[Embedded]:
        """Yields a row for each image in order, one batch at a time.

        Rows are points of the space, unless `columns` is overridden, and meaningless for unreadable
        images. If `few`, a batch that is not full may be faster and round differently.
        """

    def embed_texts(self, texts: str | Sequence[str], templates: Sequence[str] = ()) -> Embeddings:
        """Embeds texts beside images; a `UserError` unless the model has a tower of texts."""
        raise UserError(f"{self.name} embeds no texts; name a model of images and texts")

    def columns(self, rows: Float[np.ndarray, "n d"]) -> dict[str, Float[np.ndarray, "n k"]]:
        """Converts rows of readable images to columns of `Embeddings`, by name."""
        return {"vectors": rows.astype(np.float32)}

    def embed_images(self, images: Dataset, *, few: bool = False) -> Embeddings:
        """Embeds images in memory; if `few`, such as queries, without a progress bar."""
        batches: list[np.ndarray] = []
        reasons: dict[int, str] = {}
        done = 0
        for rows, batch_reasons in self._finite_batches(images, few=few):
            batches.append(rows)
            reasons |= {done + i: reason for i, reason in batch_reasons.items()}
            done += len(rows)
        return self._embeddings(images, np.concatenate(batches), reasons)

    def _finite_batches(
        self, images: Dataset, *, few: bool = False, done: int = 0
    ) -> Iterator[Embedded]:
        """Yields batches of all images after the first `done`; rejects NaN and infinity."""
        lines = ProgressLines("embedded", len(images), done)
        with Bar(total=len(images), initial=done, unit="image", disable=few or None) as bar:
            for rows, reasons in self.batches(images[done:], few=few):
                not_finite = np.flatnonzero(~np.isfinite(rows).all(axis=1))
                for i in np.setdiff1d(not_finite, list(reasons)).tolist():
                    problem = f"the embedding of {images.name(done + i)} is not finite: the weights"
                    raise UserError(f"{problem} are damaged, or diverged; lower the learning rate")
                yield rows, reasons
                done += len(rows)
                bar.update(len(rows))
                if bar.disable and not few:  # No terminal.
                    lines.advance(len(rows))

    def embed_to(self, path: pathlib.Path, images: Dataset, *, append: bool = False) -> Embeddings:
        """Embeds images into a file; after a kill, a later call resumes from a folder beside it.

        With `append`, the images join those of an earlier file, which keeps the rows of images that
        have not changed. Without it, an earlier file must hold these images.
        """
        with locked(path, remedy="name another --output", beside=True):
            if not path.exists():
                embeddings = self._embed_resuming(path, images)
            elif append:
                embeddings = self._appended(path, self._load(path), images)
            elif (embeddings := self._load(path)).images_fingerprint == images.fingerprint:
                return embeddings
            else:
                advice = "add these to them with --append, name another file, or remove it"
                raise UserError(f"{path} exists already and holds other images; {advice}")
            with writing(path):
                if len(embeddings):
                    embeddings.save(path)
                for finished_or_stale in path.parent.glob(f"{glob.escape(path.name)}.*.unfinished"):
                    remove(finished_or_stale)
        if not len(embeddings):
            (first, first_reason), *others = embeddings.unreadable.items()
            problem = f"no image can be read: {first} ({first_reason})"
            raise UserError(problem + (f", and {len(others)} others" if others else ""))
        return embeddings

    def _embed_resuming(self, path: pathlib.Path, images: Dataset) -> Embeddings:
        """Embeds images, with a cache beside `path` of what was embedded before a kill."""
        job = fingerprint((self.fingerprint, images.fingerprint))[:8]
        folder = path.with_name(f"{path.name}.{job}.unfinished")
        table = None
        while table is None:  # A damaged table is computed again.
            unfinished = ArrayCache(folder, len(images))
            with writing(folder), unfinished.filling() as done:
                try:
                    if done < len(images):
                        for rows, reasons in self._finite_batches(images, done=done):
                            unfinished.append(list(rows), reasons)
                finally:
                    if not unfinished.done:
                        remove(folder)
            table = unfinished.table(np.float32)
        return self._embeddings(images, *table)

    def _load(self, path: pathlib.Path) -> Embeddings:
        """Reads an earlier result, or raises a `UserError` if another model embedded it."""
        embeddings = Embeddings.load(path)
        if embeddings.fingerprint != self.fingerprint:
            problem = f"was embedded by {embeddings.model or 'another model'}, not by {self.name}"
            raise UserError(f"{path} exists already and {problem}; name another file, or remove it")
        return embeddings

    def _appended(self, path: pathlib.Path, gallery: Embeddings, images: Dataset) -> Embeddings:
        """Adds images that a gallery lacks, in place of unlisted rows of the same or moved ones."""
        listed, versions = images.versions, gallery.versions
        versions = np.zeros(len(gallery), np.int64) if versions is None else versions
        is_known = (listed != 0) & np.isin(listed, versions)
        new = images.take(np.flatnonzero(~is_known))
        if not len(new):
            console.say(f"embedded 0 new images, reused {len(gallery):,}")
            return gallery
        added = self._embed_resuming(path, new)
        gone = {new.path(i) for i in range(len(new))} - {*added.unreadable} | {*_file_keys(added)}
        pairs = zip(gallery.ids.tolist(), _file_keys(gallery), strict=True)
        stays = np.isin(versions, listed[is_known]) | [*map(gone.isdisjoint, pairs)]
        remaining = gallery.take(np.flatnonzero(stays))
        counts = f"reused {len(remaining):,}, replaced {len(gallery) - len(remaining):,}"
        console.say(f"embedded {counted(len(added), 'new image')}, {counts}")
        joined, unreadable = remaining.joined(added), remaining.unreadable | added.unreadable
        for name in sorted(unreadable.keys() & {*joined.ids.tolist()}):
            problem = f"cannot read {name} any more ({unreadable.pop(name)})"
            if name in added.unreadable:
                console.warn(f"{problem}; its earlier row stays")
        facts = fingerprint((gallery.images_fingerprint, new.fingerprint))
        return dataclasses.replace(joined, unreadable=unreadable, images_fingerprint=facts)

    def _embeddings(self, images: Dataset, rows: np.ndarray, reasons: dict[int, str]) -> Embeddings:
        readable = np.setdiff1d(np.arange(len(images)), list(reasons))
        columns = {"ids": images.names, "labels": images.class_names, "splits": images.splits}
        columns["coarse_labels"] = images.coarse_labels
        return Embeddings(
            **self.columns(rows[readable]),
            **{name: x[readable].astype(str) for name, x in columns.items() if x is not None},
            versions=images.versions[readable],
            space=self.space,
            fingerprint=self.fingerprint,
            model=self.name,
            noun="image",
            images_fingerprint=images.fingerprint,
            unreadable={str(images.names[i]): reason for i, reason in reasons.items()},
        )


def _file_keys(x: Embeddings) -> Iterator[tuple[str, str, str, int]]:
    """Yields what stays when an image's file moves: name, class, split and rounded point."""
    names = (pathlib.PurePath(path).name for path in x.ids.tolist())
    splits = x.labels if x.splits is None else x.splits
    points = (hash((np.round(point, 4) + 0.0).tobytes()) for point in x.vectors)  # No −0.
    return zip(names, x.labels.tolist(), splits.tolist(), points, strict=True)


def columns_of_features(
    features: Float[np.ndarray, "n d"], space: Space
) -> dict[str, Float[np.ndarray, "n k"]]:
    """Columns of `Embeddings`, by name: features, and the points to which a space maps them."""
    if not len(features):
        return {"vectors": features}
    points = Embeddings.from_arrays(features, space=space).vectors
    return {"vectors": points, "raw_features": features}


class ExternalEncoder(Protocol):
    """An encoder of another library: timm, Transformers or an ONNX file."""

    output: str  # What features are, in words.
    facts: Any  # Output, preparation and weights, to be hashed.

    def prepare(self, image: Image.Image) -> Any:
        """Prepares an RGB image, in any thread."""

    def features(self, prepared: Sequence[Any]) -> np.ndarray:
        """Returns the features [images, dim] of prepared images."""


class ExternalEmbedder(ImageEmbedder):
    """Embeds images with an encoder of another library; galleries also hold its raw features."""

    def __init__(
        self,
        spec: str,
        encoder: ExternalEncoder,
        space: Space | None = None,
        batch_size: int | None = None,
    ) -> None:
        """Checks on an image of noise that the encoder returns one vector, always the same."""
        self.space, self.batch_size = space or Sphere(), batch_size or _BATCH_SIZE
        self.name, self._encoder = spec, encoder
        self.fingerprint = fingerprint(encoder.facts)
        noise = np.random.default_rng(0).integers(256, size=(256, 256, 3), dtype=np.uint8)
        prepared = encoder.prepare(Image.fromarray(noise))
        first, second = (encoder.features([prepared]) for _ in range(2))
        if first.ndim != 2 or len(first) != 1:
            shape = f"the shape {list(first.shape)} for one image, not [1, dim]"
            raise UserError(f"the {encoder.output} of {spec} has {shape}")
        # On a GPU roundings may differ; random masks or dropout change the first digit.
        if not np.allclose(first, second, rtol=0, atol=1e-2 * np.ptp(first), equal_nan=True):
            raise UserError(f"{spec} embeds one image in different ways, so it cannot be searched")
        self._dim = first.shape[1]
        console.say(f"{spec}: features are its {encoder.output}, of dimension {self._dim}")

    def batches(self, dataset: Dataset, *, few: bool = False) -> Iterator[Embedded]:
        """Yields features in order, a batch at a time, and why images of it cannot be read."""
        del few  # Batches are not padded here.
        if dataset.vectors is not None:
            raise UserError(f"{self.name} embeds images, but {dataset.name(0)} stands for features")
        brightest = np.zeros(len(dataset), int)  # Levels of the images.
        prepare = functools.partial(self._prepare, dataset, brightest)
        starts = range(0, len(dataset), self.batch_size)
        batches = [range(len(dataset))[start : start + self.batch_size] for start in starts]
        pool = concurrent.futures.ThreadPoolExecutor(usable_cores())
        try:
            next_batch = pool.map(prepare, batches[0])
            for next_indices in [*batches[1:], []]:
                # The next batch is prepared while this one is embedded.
                batch, next_batch = next_batch, pool.map(prepare, next_indices)
                prepared = list(batch)
                reasons = {i: x for i, x in enumerate(prepared) if isinstance(x, str)}
                readable = [i for i in range(len(prepared)) if i not in reasons]
                rows = np.zeros((len(prepared), self._dim), np.float32)
                if readable:
                    rows[readable] = self._encoder.features([prepared[i] for i in readable])
                yield rows, reasons
            warn_of_dark(dataset, brightest)
        finally:
            pool.shutdown(cancel_futures=True)

    def _prepare(self, dataset: Dataset, brightest: Int[np.ndarray, " n"], i: int) -> Any | str:
        """Prepares an image for the encoder, or returns why the image cannot be read."""
        try:
            image = dataset.image(i, channels=3)
            if max(image.size) > _LONGEST * min(image.size):  # Libraries enlarge it, then crop it.
                raise ValueError(f"it is a line of {image.width} × {image.height} pixels; crop it")
            brightest[i] = np.max(image.getextrema())
            return self._encoder.prepare(image)
        except Exception as error:  # Libraries raise almost anything on images of odd shapes.
            return reason(error.__cause__ or error)

    def columns(self, rows: Float[np.ndarray, "n d"]) -> dict[str, Float[np.ndarray, "n k"]]:
        """Converts features to points of the space; also keeps the features."""
        return columns_of_features(rows, self.space)


def open_encoder(
    spec: str, space: Space | None = None, batch_size: int | None = None, **pixels: Any
) -> ExternalEmbedder:
    """Opens an encoder of another library, whose features are mapped into a space.

    `spec` is 'timm:NAME'; 'hf:NAME', a model of Transformers on the hub or in a folder; or
    'onnx:FILE', with '@OUTPUT' if the file has several outputs. `pixels` are `mean`, `std` and
    `resize`, by which pixels are prepared for an ONNX model. By default, the space is the sphere.
    """
    library, _, name = spec.partition(":")
    if library not in integrations.names("encode") or not name:
        kinds = f"lite, dinov2, timm's name of weights ({supported(spec)})"
        kinds += f", timm:NAME, hf:NAME or onnx:FILE{similar(spec, ENCODERS)}"
        raise UserError(f"the encoder is {spec!r}; it must be {kinds}")
    encoder = integrations.find("encode", library)(name, **pixels)
    return ExternalEmbedder(spec, encoder, space, batch_size)
