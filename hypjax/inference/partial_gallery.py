"""Galleries that are embedded in parts, perhaps on several machines, and joined."""

import dataclasses
import pathlib
import re
from typing import NamedTuple, Self

import numpy as np

from hypjax.data.dataset import Dataset
from hypjax.errors import UserError
from hypjax.retrieval.embeddings import Embeddings


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

    def of(self, images: Dataset, batch_size: int) -> Dataset:
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


def merge(output: pathlib.Path, images: Dataset) -> Embeddings:
    """Joins the parts of a gallery into the gallery that one process would have written."""
    if output.exists():
        raise UserError(f"{output} exists already; remove it, or name another --output")
    pattern = re.compile(re.escape(output.stem) + r"-\d+-of-(\d+)" + re.escape(output.suffix))
    found = map(pattern.fullmatch, (path.name for path in output.parent.glob("*-of-*")))
    counts = sorted({int(name[1]) for name in found if name})
    if len(counts) != 1:
        numbers = " and of ".join(map(str, counts)) or "none"
        raise UserError(f"the parts of {output} must be of one number, but they are of {numbers}")
    parts, first = [], 0
    for index in range(1, counts[0] + 1):
        path = Shard(index, counts[0]).path(output)
        if not path.exists():
            raise UserError(f"{path} is missing; embed it with --shard={index}/{counts[0]}")
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
    names = ("vectors", "ids", "labels", "given", "splits", "superlabels")
    columns = {name: [getattr(part, name) for part in parts] for name in names}
    gallery = dataclasses.replace(
        parts[0],
        **{name: np.concatenate(own) for name, own in columns.items() if own[0] is not None},
        images=images.fingerprint,
        unreadable={path: why for part in parts for path, why in part.unreadable.items()},
    )
    gallery.save(output)
    return gallery
