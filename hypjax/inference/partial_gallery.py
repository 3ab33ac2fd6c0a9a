"""Galleries in the making: saved as they grow, or embedded in parts that are joined."""

import contextlib
import dataclasses
import fcntl
import pathlib
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Self

import numpy as np
from jaxtyping import Float

from hypjax.data.image_set import ImageSet
from hypjax.errors import UserError, writing
from hypjax.retrieval.embeddings import Embeddings
from hypjax.system.files import read_npz, write_text

# Embeddings, and why some of the images could not be read, by their index.
Embedded = tuple[Float[np.ndarray, "n d"], dict[int, str]]

_SECONDS_BETWEEN_SAVES = 60


class PartialGallery(contextlib.AbstractContextManager):
    """Embeddings done so far; a context manager that holds the folder's lock."""

    def __init__(self, path: pathlib.Path, facts: str) -> None:
        """Resumes earlier work on the same images by the same model, and drops anything else."""
        self._folder = path.with_name(f"{path.name}.unfinished")
        self._pending: list[Embedded] = []
        self._saved = time.monotonic()
        owner = self._folder / "facts"
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self._folder / "lock").open("w")
            try:  # Two processes that resume one gallery would overwrite each other's parts.
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(f"{path} is being written by another process") from error
            if not owner.exists() or owner.read_bytes() != facts.encode():
                for part in self._folder.glob("*.npz"):
                    part.unlink()
                write_text(owner, facts)
            self.done = sum(len(points) for points, _ in self._load())
            for part in self._folder.glob("*.npz"):
                if part.stem >= _stem(self.done):
                    part.unlink()  # Damaged, or after a damaged one.

    def __exit__(self, *error: object) -> None:
        if any(error) and not self.done and not self._pending:
            self.remove()
        self._lock.close()

    def _load(self) -> Iterator[Embedded]:
        """Yields the parts in order, up to the first damaged one."""
        done = 0
        for path in sorted(self._folder.glob("*.npz")):
            try:
                part = read_npz(path)
                points = part["points"]
                reasons = dict(zip(part["places"].tolist(), part["reasons"].tolist(), strict=True))
            except (OSError, ValueError, KeyError, TypeError):
                return
            if path.stem != _stem(done) or points.ndim != 2:
                return
            done += len(points)
            yield points, reasons

    def add(
        self, points: Float[np.ndarray, "batch d"], broken: dict[int, str], *, saving: bool
    ) -> None:
        """Adds a batch; saves the pending ones once a minute, or now if `saving` is set."""
        self._pending.append((points, broken))
        if saving or time.monotonic() - self._saved >= _SECONDS_BETWEEN_SAVES:
            self._save()

    def _save(self) -> None:
        points, broken = concatenated(self._pending)
        path = self._folder / f"{_stem(self.done)}.npz"
        with writing(self._folder):
            # Renamed once it is whole, so that a kill while it is written leaves no damaged part.
            unfinished = path.with_suffix(".unfinished")
            with unfinished.open("wb") as file:
                places, reasons = np.array(list(broken), int), np.array(list(broken.values()), str)
                np.savez(file, points=points, places=places, reasons=reasons)
            unfinished.replace(path)
        self.done += len(points)
        self._pending, self._saved = [], time.monotonic()

    def contents(self) -> Embedded:
        """All embeddings done so far, and the images that could not be read."""
        return concatenated([*self._load(), *self._pending])

    def remove(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


def concatenated(batches: Iterable[Embedded]) -> Embedded:
    """Joins batches of embeddings, and numbers their unreadable images over all of them."""
    points, broken, count = [], {}, 0
    for batch, reasons in batches:
        points.append(batch)
        broken |= {count + index: reason for index, reason in reasons.items()}
        count += len(batch)
    return np.concatenate(points), broken


def _stem(done: int) -> str:
    return f"{done:012d}"


class Shard(NamedTuple):
    """A part of the images: its index from 1, and the number of parts."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses '3/16'."""
        found = re.fullmatch(r"(\d+)/(\d+)", text, re.ASCII)
        shard = cls(*map(int, found.groups())) if found else cls(0, 0)
        if not 1 <= shard.index <= shard.count:
            raise UserError(f"--shard is {text}; it must be a part and their number, such as 3/16")
        return shard

    def of(self, images: ImageSet, batch_size: int) -> ImageSet:
        """The part's images, which begin with a whole batch."""
        # So each image is embedded in the batch, and with the roundings, that it has without parts.
        batches = -(-len(images) // batch_size)
        if self.count > batches:
            raise UserError(
                f"{len(images)} images are {batches} batches of {batch_size}, too few for "
                f"{self.count} parts; name at most {batches}"
            )
        first, last = (batches * i // self.count * batch_size for i in (self.index - 1, self.index))
        return images[first:last]

    def path(self, output: pathlib.Path) -> pathlib.Path:
        """The part's file, such as gallery-3-of-16.npz for gallery.npz."""
        return output.with_name(f"{output.stem}-{self.index}-of-{self.count}{output.suffix}")


def merge(output: pathlib.Path, images: ImageSet) -> Embeddings:
    """Joins the parts of a gallery into the gallery that one process would have written."""
    if output.exists():
        raise UserError(f"{output} exists already; remove it, or name another --output")
    count = _count(output)
    parts, first = [], 0
    for index in range(1, count + 1):
        path = Shard(index, count).path(output)
        if not path.exists():
            raise UserError(f"{path} is missing; embed it with --shard={index}/{count}")
        part = Embeddings.load(path)
        last = first + len(part) + len(part.unreadable)
        if part.images != images[first:last].fingerprint:
            raise UserError(f"{path} holds other images than --images lists now; embed it again")
        if parts and part.fingerprint != parts[0].fingerprint:
            raise UserError(f"{path} was embedded by another model than the first part")
        parts.append(part)
        first = last
    if first != len(images):
        raise UserError(f"the parts hold {first} images, but --images lists {len(images)}")
    columns = ("vectors", "ids", "labels", "given", "splits", "superlabels")
    found = {name: [getattr(part, name) for part in parts] for name in columns}
    whole = {name: np.concatenate(own) for name, own in found.items() if own[0] is not None}
    unreadable = {path: why for part in parts for path, why in part.unreadable.items()}
    gallery = dataclasses.replace(
        parts[0], **whole, images=images.fingerprint, unreadable=unreadable
    )
    gallery.save(output)
    return gallery


def _count(output: pathlib.Path) -> int:
    pattern = re.compile(re.escape(output.stem) + r"-\d+-of-(\d+)" + re.escape(output.suffix))
    names = [path.name for path in output.parent.glob("*-of-*")]
    counts = {int(found[1]) for found in map(pattern.fullmatch, names) if found}
    if not counts:
        raise UserError(f"there are no parts of {output}; embed them with --shard=1/2 and so on")
    if len(counts) > 1:
        numbers = " and ".join(map(str, sorted(counts)))
        raise UserError(f"there are parts of {numbers} of {output}; remove those of one number")
    return counts.pop()
