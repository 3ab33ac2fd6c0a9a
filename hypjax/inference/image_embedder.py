"""Embeds images with any model: in memory, or into a file with resumption."""

import abc
import glob
import pathlib
from collections.abc import Iterator

import numpy as np
import tqdm
from jaxtyping import Float

from hypjax.data.dataset import Dataset
from hypjax.errors import UserError, writing
from hypjax.geometry import Space
from hypjax.inference.embedding import fingerprint
from hypjax.retrieval.embeddings import Embeddings
from hypjax.system import console
from hypjax.system.array_cache import ArrayCache
from hypjax.system.files import locked, remove

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

        Rows, by default points of the space, are meaningless for unreadable images. If `few`, a
        batch that is not full may be faster and round differently.
        """

    def columns(self, rows: Float[np.ndarray, "n d"]) -> dict[str, Float[np.ndarray, "n k"]]:
        """Converts rows of readable images to columns of `Embeddings`, by name."""
        return {"vectors": rows.astype(np.float32)}

    def embed_images(self, images: Dataset, *, few: bool = False) -> Embeddings:
        """Embeds images in memory; if `few`, such as queries, without a progress bar."""
        rows, broken, done = [], {}, 0
        for batch, reasons in self._finite_batches(images, few=few):
            rows.append(batch)
            broken |= {done + index: reason for index, reason in reasons.items()}
            done += len(batch)
        return self._embeddings(images, np.concatenate(rows), broken)

    def _finite_batches(
        self, images: Dataset, *, few: bool = False, done: int = 0
    ) -> Iterator[Embedded]:
        """Yields batches of all images after the first `done`; rejects NaN and infinity."""
        total = len(images)
        lines = console.ProgressLines("embedded", total, done)
        with tqdm.tqdm(total=total, initial=done, unit="image", disable=few or None) as bar:
            for rows, broken in self.batches(images[done:], few=few):
                not_finite = np.flatnonzero(~np.isfinite(rows).all(axis=1))
                for i in np.setdiff1d(not_finite, list(broken)).tolist():
                    problem = f"the embedding of {images.name(done + i)} is not finite: the weights"
                    raise UserError(f"{problem} are damaged, or diverged; lower the learning rate")
                yield rows, broken
                done += len(rows)
                bar.update(len(rows))
                if bar.disable and not few:  # No terminal.
                    lines.advance(len(rows))

    def embed_to(self, path: pathlib.Path, images: Dataset) -> Embeddings:
        """Embeds images into a file; after a kill, a later call resumes from a folder beside it."""
        if path.exists():
            finished = Embeddings.load(path)
            if finished.fingerprint != self.fingerprint:
                other_model = finished.model or "another model"
                problem = f"was embedded by {other_model}, not by {self.name}"
            elif finished.images_fingerprint != images.fingerprint:
                problem = "holds other images"
            else:
                return finished
            raise UserError(f"{path} exists already and {problem}; name another file, or remove it")
        job = fingerprint((self.fingerprint, images.fingerprint))[:8]
        folder = path.with_name(f"{path.name}.{job}.unfinished")
        unfinished = ArrayCache(folder, len(images))
        lock = locked(folder, remedy="name another --output")
        with writing(folder), unfinished.filling(lock) as done:
            try:
                if done < len(images):
                    for batch in self._finite_batches(images, done=done):
                        unfinished.append(*batch)
            except BaseException:
                if not unfinished.done:
                    remove(folder)
                raise
            embeddings = self._embeddings(images, *unfinished.table(np.float32))
            if len(embeddings):
                embeddings.save(path)
            for finished_or_stale in path.parent.glob(f"{glob.escape(path.name)}.*.unfinished"):
                remove(finished_or_stale)
        if not len(embeddings):
            first_reason = next(iter(embeddings.unreadable.values()))
            raise UserError(f"none of the {len(images)} images can be read ({first_reason})")
        return embeddings

    def _embeddings(self, images: Dataset, rows: np.ndarray, broken: dict[int, str]) -> Embeddings:
        readable = np.setdiff1d(np.arange(len(images)), list(broken))
        columns = {"ids": images.names, "labels": images.class_names, "splits": images.splits}
        columns["coarse_labels"] = images.coarse_labels
        return Embeddings(
            **self.columns(rows[readable]),
            **{name: x[readable].astype(str) for name, x in columns.items() if x is not None},
            space=self.space,
            fingerprint=self.fingerprint,
            model=self.name,
            images_fingerprint=images.fingerprint,
            unreadable={str(images.names[i]): reason for i, reason in broken.items()},
        )
