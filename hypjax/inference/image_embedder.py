"""Embedding images with any model: in memory, into a file that can be resumed, or in parts."""

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

# Embeddings of a batch, and why some of its images could not be read, by their index.
Embedded = tuple[Float[np.ndarray, "n d"], dict[int, str]]


class ImageEmbedder(abc.ABC):
    """A model that embeds images."""

    name: str  # For messages.
    space: Space  # Of the embeddings.
    fingerprint: str  # Hash of all that embeddings depend on, except images; equal ones compare.
    batch_size: int
    match: Match | None = None  # How far matches are, if that is known.

    @abc.abstractmethod
    def batches(self, dataset: Dataset, *, few: bool = False) -> Iterator[Embedded]:
        """Yields the rows of a dataset's images in order, one batch at a time.

        Rows, by default points of the space, are saved with unfinished work, and meaningless for
        unreadable images. If `few`, a batch that is not full may be faster, and round differently.
        """

    def columns(self, rows: Float[np.ndarray, "n d"]) -> dict[str, Float[np.ndarray, "n k"]]:
        """The columns of `Embeddings` that rows of readable images become."""
        return {"vectors": rows.astype(np.float32)}

    def embed_images(self, images: Dataset, *, few: bool = False) -> Embeddings:
        """Embeds images in memory; a `few`, such as a search's queries, without a progress bar."""
        rows, broken, done = [], {}, 0
        for batch, reasons in self._checked(images, few=few):
            rows.append(batch)
            broken |= {done + index: reason for index, reason in reasons.items()}
            done += len(batch)
        return self._embeddings(images, np.concatenate(rows), broken)

    def _checked(self, images: Dataset, *, few: bool = False, done: int = 0) -> Iterator[Embedded]:
        """Yields the `batches` of the images that are not done; their rows must be finite."""
        total = len(images)
        lines = console.ProgressLines("embedded", total, done)
        with tqdm.tqdm(total=total, initial=done, unit="image", disable=few or None) as bar:
            for rows, broken in self.batches(images[done:], few=few):
                wrong = np.flatnonzero(~np.isfinite(rows).all(axis=1))
                for i in np.setdiff1d(wrong, list(broken)).tolist():
                    problem = f"the embedding of {images.name(done + i)} is not finite: the weights"
                    raise UserError(f"{problem} are damaged, or diverged; lower the learning rate")
                yield rows, broken
                done += len(rows)
                bar.update(len(rows))
                if bar.disable and not few:  # No terminal.
                    lines.advance(len(rows))

    def embed_to(self, path: pathlib.Path, images: Dataset) -> Embeddings:
        """Embeds images into a file; a folder beside it stores finished rows, to resume."""
        if path.exists():
            done = Embeddings.load(path)
            if done.fingerprint != self.fingerprint:
                problem = f"was embedded by {done.model or 'another model'}, not by {self.name}"
            elif done.images_fingerprint != images.fingerprint:
                problem = "holds other images"
            else:
                return done
            raise UserError(f"{path} exists already and {problem}; name another file, or remove it")
        work = fingerprint((self.fingerprint, images.fingerprint))[:8]
        folder = path.with_name(f"{path.name}.{work}.unfinished")
        unfinished = ArrayCache(folder, len(images))
        lock = locked(folder, remedy="name another --output")
        with writing(folder), unfinished.filling(lock) as done:
            try:
                for batch in self._checked(images, done=done) if done < len(images) else ():
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
    """A part of the images: its index from 1, and the number of parts."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses '3/16'."""
        match = re.fullmatch(r"(\d+)/(\d+)", text, re.ASCII)
        shard = cls(*map(int, match.groups())) if match else cls(0, 0)
        if not 1 <= shard.index <= shard.count:
            raise UserError(f"--shard is {text}; it must be a part and their number, such as 3/16")
        return shard

    def of(self, images: Dataset, batch_size: int) -> Dataset:
        """The part's images, which begin with a whole batch."""
        # So that each image is in the same batch, with the same roundings, as without parts.
        batches = -(-len(images) // batch_size)
        if self.count > batches:
            total = f"{len(images)} images in batches of {batch_size}"
            raise UserError(f"{total} are too few for {self.count} parts; name at most {batches}")
        first, last = (batches * i // self.count * batch_size for i in (self.index - 1, self.index))
        return images[first:last]

    def path(self, output: pathlib.Path) -> pathlib.Path:
        """The part's file, such as gallery-3-of-16.npz for gallery.npz."""
        return output.with_name(f"{output.stem}-{self.index}-of-{self.count}{output.suffix}")


def merge(output: pathlib.Path, images: Dataset) -> Embeddings:
    """Joins the parts of a gallery into the gallery that one process would have written."""
    if output.exists():
        raise UserError(f"{output} exists already; remove it, or name another --output")
    pattern = re.compile(re.escape(output.stem) + r"-\d+-of-(\d+)" + re.escape(output.suffix))
    matches = map(pattern.fullmatch, (path.name for path in output.parent.glob("*-of-*")))
    counts = sorted({int(name[1]) for name in matches if name})
    if len(counts) != 1:
        numbers = " and of ".join(map(str, counts)) or "no number"
        raise UserError(f"{output} has parts of {numbers}; embed those of one number by --shard")
    parts, first = [], 0
    for index in range(1, counts[0] + 1):
        path = Shard(index, counts[0]).path(output)
        if not path.exists():
            raise UserError(f"{path} is missing; embed it with --shard={index}/{counts[0]}")
        part = Embeddings.load(path)
        last = first + len(part) + len(part.unreadable)
        if part.images_fingerprint != images[first:last].fingerprint:
            raise UserError(f"{path} holds other images than --images lists now; embed it again")
        if parts and part.fingerprint != parts[0].fingerprint:
            raise UserError(f"{path} and the first part are of different models; embed it again")
        parts.append(part)
        first = last
    if first != len(images):
        raise UserError(f"the parts hold {first} images, but --images lists {len(images)}")
    columns = {name: [getattr(part, name) for part in parts] for name in COLUMNS}
    gallery = dataclasses.replace(
        parts[0],
        **{name: np.concatenate(rows) for name, rows in columns.items() if rows[0] is not None},
        images_fingerprint=images.fingerprint,
        unreadable={path: why for part in parts for path, why in part.unreadable.items()},
    )
    gallery.save(output)
    return gallery
