"""Embeds images with any model: in memory, into a file with resumption, or in shards."""

import abc
import dataclasses
import glob
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple, Self

import numpy as np
import tqdm
from jaxtyping import Float

from hypjax.data.dataset import Dataset
from hypjax.errors import UserError, writing
from hypjax.geometry import Space
from hypjax.inference.embedding import fingerprint
from hypjax.inference.hits import Match
from hypjax.retrieval.embeddings import COLUMNS, Embeddings
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
    batch_size: int
    match: Match | None = None  # Distance of matches, if measured.

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


class Shard(NamedTuple):
    """One of several consecutive ranges of the images, to embed in a process of its own."""

    index: int  # From 1.
    count: int  # Number of shards.

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses '3/16'."""
        match = re.fullmatch(r"(\d+)/(\d+)", text, re.ASCII)
        shard = cls(*map(int, match.groups())) if match else cls(0, 0)
        if not 1 <= shard.index <= shard.count:
            raise UserError(f"--shard is {text}; it must be INDEX/COUNT, such as 3/16")
        return shard

    def of(self, images: Dataset, batch_size: int) -> Dataset:
        """The images of the shard."""
        # Shards begin with a full batch, so that each image is in the same batch, with the same
        # roundings, as without shards.
        num_batches = -(-len(images) // batch_size)
        if self.count > num_batches:
            total = f"{len(images)} images in batches of {batch_size}"
            most = f"name at most {num_batches}"
            raise UserError(f"{total} are too few for {self.count} shards; {most}")
        first_batch = num_batches * (self.index - 1) // self.count
        last_batch = num_batches * self.index // self.count
        return images[first_batch * batch_size : last_batch * batch_size]

    def path(self, output: pathlib.Path) -> pathlib.Path:
        """The shard's file, such as gallery-3-of-16.npz for gallery.npz."""
        return output.with_name(f"{output.stem}-{self.index}-of-{self.count}{output.suffix}")


def merge(output: pathlib.Path, images: Dataset) -> Embeddings:
    """Joins the files of all shards into the gallery that one process would have written."""
    if output.exists():
        raise UserError(f"{output} exists already; remove it, or name another --output")
    pattern = re.compile(re.escape(output.stem) + r"-\d+-of-(\d+)" + re.escape(output.suffix))
    matches = [pattern.fullmatch(path.name) for path in output.parent.glob("*-of-*")]
    counts = sorted({int(match[1]) for match in matches if match})
    if len(counts) != 1:
        numbers = " and of ".join(map(str, counts)) or "no number"
        raise UserError(f"{output} has shards of {numbers}; embed all with one --shard=INDEX/COUNT")
    (count,) = counts
    shards, first = [], 0
    for index in range(1, count + 1):
        path = Shard(index, count).path(output)
        if not path.exists():
            raise UserError(f"{path} is missing; embed it with --shard={index}/{count}")
        shard = Embeddings.load(path)
        last = first + len(shard) + len(shard.unreadable)
        if shard.images_fingerprint != images[first:last].fingerprint:
            raise UserError(f"{path} holds other images than --images lists now; embed it again")
        if shards and shard.fingerprint != shards[0].fingerprint:
            raise UserError(f"{path} and the first shard are of different models; embed it again")
        shards.append(shard)
        first = last
    if first != len(images):
        raise UserError(f"the shards hold {first} images, but --images lists {len(images)}")
    columns = {name: [getattr(shard, name) for shard in shards] for name in COLUMNS}
    gallery = dataclasses.replace(
        shards[0],
        **{name: np.concatenate(rows) for name, rows in columns.items() if rows[0] is not None},
        images_fingerprint=images.fingerprint,
        unreadable={path: why for shard in shards for path, why in shard.unreadable.items()},
    )
    gallery.save(output)
    return gallery
