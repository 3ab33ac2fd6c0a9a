"""Images whose embeddings are to be drawn: those of a gallery."""

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from PIL import Image

from hypjax.data.groupings import CLASS, Grouping
from hypjax.data.pixels import read_image
from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.retrieval.embeddings import Embeddings


class Part(NamedTuple):
    """Images that are drawn together.

    Attributes:
        title: What they are.
        points: Their points.
        groupings: Groupings of the images, by name; the first are the classes.
        names: Names of the images.
        read: From the index of an image to its pixels.
    """

    title: str
    points: Float[np.ndarray, "n d"]
    groupings: Mapping[str, Grouping]
    names: Sequence[str]
    read: Callable[[int], Image.Image]


class Drawn(NamedTuple):
    """What is drawn.

    Attributes:
        parts: The images, in parts that are drawn beside each other.
        space: Space of the points.
        proxies: Points of hierarchical proxies; none for most runs.
        parents: Index of each proxy's parent; -1 if it has none.
    """

    parts: list[Part]
    space: Space
    proxies: Float[np.ndarray, "p d"]
    parents: Int[np.ndarray, " p"]


def draw_gallery(path: pathlib.Path, most: int, seed: int) -> Drawn:
    """Reads a gallery that `hypjax.embed` wrote.

    Args:
        path: The file.
        most: Largest number of images; of more, random ones are chosen.
        seed: Seed of the choice.

    Raises:
        UserError: The file cannot be read, or is damaged.
    """
    gallery = Embeddings.load(path)
    chosen = choose(len(gallery), most, seed)
    names, labels = np.unique(gallery.labels[chosen], return_inverse=True)
    grouping = Grouping(labels, [name or "unknown" for name in names.tolist()])
    paths = gallery.ids[chosen].tolist()
    read = functools.partial(_read, paths)
    title = describe(path.name, len(chosen), len(gallery))
    part = Part(title, gallery.vectors[chosen], {CLASS: grouping}, paths, read)
    return Drawn([part], gallery.space, gallery.vectors[:0], np.zeros(0, int))


def _read(paths: Sequence[str], i: int) -> Image.Image:
    return read_image(paths[i], 3)


def captions(part: Part) -> list[str]:
    """Returns the class and the name of each image."""
    classes = part.groupings[CLASS]
    named = zip(classes.labels.tolist(), part.names, strict=True)
    return [f"{classes.names[label]}, {name}" for label, name in named]


def choose(count: int, most: int, seed: int) -> Int[np.ndarray, " chosen"]:
    """Indices of all images or, of more than `most`, of random ones, in their order.

    Raises:
        UserError: There are no images.
    """
    if not count:
        raise UserError("there are no images to draw")
    return np.sort(np.random.default_rng(seed).permutation(count)[:most])


def describe(name: str, chosen: int, count: int) -> str:
    """Returns the title of a part of which so many images are drawn."""
    return (
        f"{name}: {chosen:,} of {count:,} images" if chosen < count else f"{name}: {count:,} images"
    )
