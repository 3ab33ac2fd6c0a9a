"""Embedded images and their files: galleries to search, score and export.

A file holds points of a space, or features of any model, which reading maps into a space.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int, Shaped

from hypjax.errors import UserError, counted, explained, require_utf8, writing
from hypjax.galleries import feature_files
from hypjax.galleries.feature_files import FeatureTable, feature_table
from hypjax.galleries.search import ArrayGallery, Gallery
from hypjax.geometry import Space, Sphere
from hypjax.geometry.registry import describe_space, space_of
from hypjax.geometry.spaces import Role
from hypjax.retrieval import inputs
from hypjax.system import console, hub, integrations
from hypjax.system.files import contiguous, missing, replacing

_COLUMNS = ("ids", "labels", "splits", "coarse_labels", "versions")  # Of files, as are:
_ORIGIN = ("fingerprint", "images_fingerprint", "model", "noun")
_BY_IMAGE = ("vectors", "raw_features", "clipped", *_COLUMNS)
Arrays = dict[str, np.ndarray]  # By name.


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Embeddings(ArrayGallery):
    """A gallery with exact search: points of a space, and the names and classes of their images.

    Attributes:
        vectors: Points of `space`, which may be memory-mapped.
        ids: Paths of the images, or other names.
        labels: Names of the images' classes; '' if unknown.
        space: Space in which the images are compared.
        fingerprint: Fingerprint of the model that embedded the images; '' if unknown.
        images_fingerprint: Hash of the image files and their labels; '' if unknown.
        unreadable: {path: reason} of images that could not be embedded.
        raw_features: Features from which the points were mapped; None if unknown.
        splits: Names of the images' splits; None if unknown.
        coarse_labels: Names of the images' coarse classes; None if unknown.
        model: Name of the model that embedded the images, for messages; '' if unknown.
        noun: What has the points, for messages: "image" or "text".
        versions: Numbers that change with the images' files; 0 or None if unknown.
        clipped: Marks images whose features the space clips; None if not computed, see `load`.
    """

    vectors: Float[np.ndarray, "n d"]
    ids: Shaped[np.ndarray, " n"]
    labels: Shaped[np.ndarray, " n"]
    space: Space
    fingerprint: str = ""
    images_fingerprint: str = ""
    unreadable: dict[str, str] = dataclasses.field(default_factory=dict)
    raw_features: Float[np.ndarray, "n d"] | None = None
    splits: Shaped[np.ndarray, " n"] | None = None
    coarse_labels: Shaped[np.ndarray, " n"] | None = None
    model: str = ""
    noun: str = "image"
    versions: Int[np.ndarray, " n"] | None = None
    clipped: Bool[np.ndarray, " n"] | None = None

    @classmethod
    def from_arrays(
        cls,
        features: Float[ArrayLike, "n d"],
        labels: Shaped[ArrayLike, " n"] | None = None,
        *,
        space: Space | None = None,
        ids: Sequence[str] | None = None,
    ) -> "Embeddings":
        """Maps features of any model into a space, by default `Sphere()`, for cosine similarity.

        Labels are names or numbers of classes. Ids are names of the images, by default row numbers.
        Raises UserError if an array has the wrong shape or type, or is not finite.
        """
        arrays = {"features": features, "labels": labels, "ids": ids}
        return cls._embedded(feature_table(arrays, "the arrays"), space)

    @classmethod
    def _embedded(
        cls, table: FeatureTable, space: Space | None, *, overwrite: bool = False
    ) -> "Embeddings":
        """Maps a table's features into a space; with `overwrite`, points take their memory."""
        space = Sphere() if space is None else space
        inputs.check_space(space)
        features = table.features
        if space.normalized and len(zeros := np.flatnonzero(~features.any(axis=1))):
            raise UserError(f"row {zeros[0]} of the features is all zeros; leave it out")
        clipped = inputs.by_blocks(jax.jit(space.clipped), features) if overwrite else None
        embed = jax.jit(space.embed)
        out = features if overwrite and features.flags.writeable else None
        vectors = inputs.by_blocks(lambda x: embed(np.asarray(x, np.float32)), features, out)
        embeddings = cls._of_table(table._replace(features=vectors), space)
        embeddings.check()
        raw_features = None if overwrite else features
        return dataclasses.replace(embeddings, raw_features=raw_features, clipped=clipped)

    @classmethod
    def _of_table(cls, table: FeatureTable, space: Space) -> "Embeddings":
        """Embeddings of a table whose features are points of the space already."""
        points, ids, labels, splits, coarse_labels = table
        return cls(points, ids, labels, space, splits=splits, coarse_labels=coarse_labels)

    def __repr__(self) -> str:
        classes = counted(len(np.unique(self.labels)), "class")
        points = f"{len(self)} points of {self.vectors.shape[1]} coordinates in {self.space}"
        return f"Embeddings({points}, {classes})"

    def take(self, rows: Int[np.ndarray, " chosen"]) -> "Embeddings":
        """Selects rows."""
        columns = {x: y[rows] for x in _BY_IMAGE if (y := getattr(self, x)) is not None}
        return dataclasses.replace(self, **columns)

    def joined(self, other: "Embeddings") -> "Embeddings":
        """Appends another table's rows; fills splits and coarse labels that one lacks with ''."""
        if not len(self) or not len(other):  # No points may have another dimension.
            return self if len(self) else other
        columns: dict[str, Any] = {}
        for name in _BY_IMAGE:
            parts = [getattr(table, name) for table in (self, other)]
            lacking = [i for i, column in enumerate(parts) if column is None]
            if len(lacking) == 1 and name in ("splits", "coarse_labels"):
                rows = len((self, other)[lacking[0]])
                parts[lacking.pop()] = np.full(rows, "")
                console.warn(f"{name} of {counted(rows, self.noun)} are unknown; scores need them")
            columns[name] = None if lacking else np.concatenate(parts)
        return dataclasses.replace(self, **columns)

    def check(self) -> None:
        """Raises a `UserError` that names the first vector that is not a point of the space."""
        inputs.check_in_space(self.space, self.vectors)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Checks the points and writes an .npz file atomically.

        The file's arrays are `features` if they are known, else `vectors` (points); `ids`,
        `labels`, `unreadable` (pairs of path and reason), `space` (JSON), `fingerprint`,
        `images_fingerprint` and `model`; and, if known, `splits`, `coarse_labels` and `versions`.
        Raises UserError if a point is not in the space, or the file cannot be written.
        """
        self.check()
        columns = {name: getattr(self, name) for name in (*_COLUMNS, *_ORIGIN)}
        points = "vectors" if self.raw_features is None else "features"
        columns[points] = self.vectors if self.raw_features is None else self.raw_features
        arrays: dict[str, Any] = {x: contiguous(y) for x, y in columns.items() if y is not None}
        arrays["unreadable"] = np.array([*self.unreadable.items()], dtype=str).reshape(-1, 2)
        arrays["space"] = json.dumps(describe_space(self.space))
        file = pathlib.Path(path)
        with writing(file), replacing(file) as temporary, temporary.open("wb") as opened:
            np.savez(opened, **arrays)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        space: Space | None = None,
        *,
        labels: str | os.PathLike[str] | None = None,
        coarse_labels: str | os.PathLike[str] | None = None,
        overwrite: bool = False,
    ) -> "Embeddings":
        """Reads a file from `save`, or a file of features, without executing anything in it.

        Features (see `hypjax.galleries.feature_files`) and points of another space are mapped into
        `space`, by default the file's space, or else `Sphere()`. Files from the papers' code hold
        points; if `space` is passed, they must be points of `space`. `labels` and `coarse_labels`
        are files with the images' classes. With `overwrite`, points take the features' memory:
        `raw_features` is None, and `clipped` is set. Raises UserError if a file cannot be read, is
        damaged or of another kind, or if a row is not finite.
        """
        arrays = feature_files.read_arrays(path, labels=labels, coarse_labels=coarse_labels)
        return cls._from_file(arrays, str(path), space, overwrite=overwrite)

    @classmethod
    def _from_file(
        cls, arrays: Arrays, source: str, space: Space | None, *, overwrite: bool = False
    ) -> "Embeddings":
        if "space" not in arrays:
            table = feature_table(arrays, source)
            if space is not None and feature_files.IN_SPACE in arrays:
                inputs.check_space(space)
                embeddings = cls._of_table(table, space)
                embeddings.check()
                return embeddings
            return cls._embedded(table, space, overwrite=overwrite)
        with explained(f"{source} is damaged", "; embed them again"):
            file_space = space_of(json.loads(str(arrays["space"])))
            unreadable = dict(np.asarray(arrays.get("unreadable", ())).tolist())
            holds_features = "features" in arrays
            vectors = arrays["features" if holds_features else "vectors"]
            ids, labels = arrays["ids"], arrays["labels"]
            versions = arrays.get("versions", np.zeros(ids.shape, np.int64))
            if versions.shape != ids.shape:
                raise ValueError("not every image has a version")
        table = feature_table({**arrays, "features": vectors, "labels": labels}, source)
        if holds_features:
            embeddings = cls._embedded(table, space or file_space, overwrite=overwrite)
        elif space is not None and describe_space(space) != describe_space(file_space):
            features = np.asarray(file_space.features(table.features), np.float32)
            embeddings = cls._embedded(table._replace(features=features), space)
        else:
            embeddings = cls._of_table(table, file_space)
        return dataclasses.replace(
            embeddings,
            unreadable=unreadable,
            versions=versions,
            fingerprint=str(arrays.get("fingerprint", "")),
            images_fingerprint=str(arrays.get("images_fingerprint", "")),
            model=str(arrays.get("model", "")),
            noun=str(arrays.get("noun", "image")),
        )

    def all_clipped(self) -> bool:
        """Whether the space clips the features of all images; False if features are unknown."""
        clipped = self.clipped
        if clipped is None and self.raw_features is not None:
            clipped = inputs.by_blocks(jax.jit(self.space.clipped), self.raw_features)
        return clipped is not None and bool(clipped.all())

    def search_vectors(self, role: Role = "gallery") -> Float[np.ndarray, "n k"]:
        """Vectors for an index of inner products, float32; a `UserError` if the space has none."""
        if not hasattr(self.space, "search_vectors"):
            raise UserError(f"distances in {self.space} are no inner products; use hypjax.search")
        with jax.enable_x64(True):
            vectors = self.space.search_vectors(np.asarray(self.vectors, np.float64), role)
        return np.asarray(vectors, np.float32)

    def features(self) -> Float[np.ndarray, "n d"]:
        """Features from which the points were mapped, float32, or clipped features if unknown."""
        raw = self.raw_features
        return np.asarray(self.space.features(self.vectors) if raw is None else raw, np.float32)


def read_features(
    path: str | os.PathLike[str], labels: str | os.PathLike[str] | None = None
) -> FeatureTable:
    """Reads a table of features from a file of features or points, as `Embeddings.load` does."""
    arrays = feature_files.read_arrays(path, labels=labels)
    if "features" not in arrays and "space" in arrays:
        arrays |= {"features": Embeddings._from_file(arrays, str(path), None).features()}
    return feature_table(arrays, str(path))


def open_gallery(location: str | os.PathLike[str]) -> Gallery:
    """Opens a gallery: an .npz file, an exported file or folder, or a collection at a URL.

    Raises UserError if the gallery is missing or damaged, or a package is not installed.
    """
    location = os.fspath(location)
    engine = _engine(location)
    path = location if "://" in location else pathlib.Path(location).expanduser()
    if isinstance(path, pathlib.Path) and not path.exists() and (engine or "?" not in location):
        raise UserError(f"{missing(path)}; python -m hypjax.embed makes a gallery")
    if not engine:
        return Embeddings.load(location)
    return integrations.find("open", engine)(path)


def is_gallery(location: str | os.PathLike[str]) -> bool:
    """Whether a location looks like a gallery that `open_gallery` can open."""
    location = os.fspath(location)
    is_file = location.partition("?")[0].endswith(".npz")  # Perhaps with options.
    return is_file or _engine(location) in integrations.names("open")


def _engine(location: str) -> str:
    """Name of the engine that opens a location; '' for an .npz file."""
    if scheme := integrations.scheme(location):
        return scheme
    suffix = pathlib.Path(location).suffix.removeprefix(".")
    return suffix if suffix in integrations.names("open") else ""


def find_export(name: str) -> Callable[[Embeddings, pathlib.Path], str]:
    """Finds the function that exports embeddings to a format or a URL.

    The function writes the embeddings beside a path or to the URL, and returns a sentence that says
    where. Raises UserError if the format is unknown, or a package is not installed.
    """
    scheme = integrations.scheme(name)
    if scheme == hub.SCHEME and not hub.is_name(name.removeprefix(scheme)):
        raise UserError(f"{name} names no repository to write; write {scheme}OWNER/NAME")
    write, options = integrations.find("export", scheme or name), {"url": name} if scheme else {}

    def export(embeddings: Embeddings, path: pathlib.Path) -> str:
        require_utf8(embeddings.ids.tolist())
        if not len(embeddings):
            raise UserError("there are no embeddings to export")
        embeddings.check()
        table = dataclasses.replace(embeddings, vectors=contiguous(embeddings.vectors))
        return write(table, path, **options)

    return export
