"""Embedded images and their files: galleries to search, or to export."""

import dataclasses
import json
import math
import os
import pathlib
import types

import jax
import numpy as np
from jaxtyping import Float

from hypjax.errors import UserError, writing
from hypjax.geometry import SPACES, Fused, InnerProductSpace, Space
from hypjax.geometry.spaces import Role
from hypjax.retrieval import inputs
from hypjax.system.files import read_npz, replacing

_FORMAT = "hypjax embeddings 1"
_CHECKED = 1 << 16  # Vectors that are checked at once.
# Types of the fields of spaces, in files.
_FIELD_TYPES = {
    "c": (int, float),
    "clip_radius": (int, float, types.NoneType),
    "riemannian": (bool,),
}
_SIMPLE = (bool, int, float, str, types.NoneType)  # Types of the fields of others' spaces.


@dataclasses.dataclass(frozen=True, eq=False)
class Embeddings:
    """Points of a space, and the images they were embedded from.

    Attributes:
        vectors: Points of the space, [n, d], float32.
        ids: Paths of the images, [n] strings.
        labels: Names of their classes, [n] strings; empty if unknown.
        space: Space of the points.
        fingerprint: Fingerprint of the model. Points of different models cannot be compared.
        images: Fingerprint of the image files and their labels.
        unreadable: {path: reason} for images that could not be embedded.
    """

    vectors: Float[np.ndarray, "n d"]
    ids: np.ndarray
    labels: np.ndarray
    space: Space
    fingerprint: str
    images: str
    unreadable: dict[str, str]

    def __len__(self) -> int:
        return len(self.ids)

    def check(self) -> None:
        """Checks that all vectors are points of the space.

        Raises:
            UserError: One is not; the message names the first.
        """
        for rows in inputs.blocks(len(self), _CHECKED):
            self.space.check(self.vectors[rows], first=rows.start)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes an .npz file atomically.

        Its arrays are `vectors`, `ids`, `labels`, `unreadable` (pairs of path and reason), `space`
        (JSON), `fingerprint`, `images` and `format`.

        Raises:
            UserError: A vector is not a point of the space, or the file cannot be written.
        """
        self.check()
        pairs = np.array(list(self.unreadable.items()), dtype=str).reshape(-1, 2)
        file = pathlib.Path(path)
        with writing(file), replacing(file) as temporary, temporary.open("wb") as opened:
            np.savez(
                opened,
                format=np.array(_FORMAT),
                vectors=self.vectors,
                ids=self.ids,
                labels=self.labels,
                unreadable=pairs,
                space=np.array(json.dumps(describe_space(self.space))),
                fingerprint=np.array(self.fingerprint),
                images=np.array(self.images),
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Embeddings":
        """Reads a file that `save` wrote, without executing anything in it.

        Raises:
            UserError: The file cannot be read, is damaged, or was not written by `save`.
        """
        arrays = read_arrays(path, "galleries are written by python -m hypjax.embed")
        if str(arrays.get("format")) != _FORMAT:
            raise UserError(f"{path} was not written by hypjax.embed")
        try:
            embeddings = cls(
                vectors=arrays["vectors"],
                ids=arrays["ids"],
                labels=arrays["labels"],
                space=space_of(json.loads(str(arrays["space"]))),
                fingerprint=str(arrays["fingerprint"]),
                images=str(arrays["images"]),
                unreadable=dict(arrays["unreadable"].tolist()),
            )
            embeddings._check()
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise UserError(f"{path} is damaged ({error}); embed the images again") from error
        return embeddings

    def _check(self) -> None:
        """Raises a `ValueError` unless the fields have their types and shapes."""
        if self.vectors.ndim != 2 or self.vectors.dtype != np.float32:
            raise ValueError(f"its vectors are {self.vectors.dtype} {self.vectors.shape}")
        if isinstance(self.space, Fused) and self.vectors.shape[1] % len(self.space.parts):
            raise ValueError(f"its vectors have {self.vectors.shape[1]} coordinates")
        for name, values in (("ids", self.ids), ("labels", self.labels)):
            if values.shape != self.vectors.shape[:1] or values.dtype.kind != "U":
                raise ValueError(f"its {name} are {values.dtype} {values.shape}")

    def search_vectors(self, role: Role = "gallery") -> Float[np.ndarray, "n k"]:
        """Vectors for an inner-product index, float32, as gallery items or as queries.

        Raises:
            UserError: The role is unknown, or inner products do not rank points of this space.
        """
        if not isinstance(self.space, InnerProductSpace):
            raise UserError(
                f"{type(self.space).__name__} distances are no inner products; search the gallery "
                "with hypjax.search, or embed with a run whose eval.spaces are poincare or sphere"
            )
        if role not in ("query", "gallery"):
            raise UserError(f"role is {role!r}; it must be query or gallery")
        with jax.enable_x64(True):
            vectors = self.space.search_vectors(np.asarray(self.vectors, np.float64), role)
        return np.asarray(vectors, np.float32)

    def features(self) -> Float[np.ndarray, "n d"]:
        """Features before they were mapped into the space, as far as the map can be inverted."""
        return np.asarray(self.space.features(self.vectors))


def describe_space(space: Space) -> dict[str, object]:
    """Describes a space in values that JSON can hold; `space_of` is the inverse."""
    if isinstance(space, Fused):
        parts = [[describe_space(part), float(weight)] for part, weight in space.parts]
        return {"name": "fused", "parts": parts, "normalized": space.normalized}
    for name, kind in SPACES.items():
        if type(space) is kind:
            fields = dataclasses.asdict(space)
            return (
                {"name": name} | ({"c": float(fields.pop("c"))} if "c" in fields else {}) | fields
            )
    raise UserError(
        f"{type(space).__name__} cannot be written to a file; name it by hypjax.register_space"
    )


def space_of(description: dict[str, object]) -> Space:
    """The space that `describe_space` described, or a Key-, Type- or ValueError if it is none."""
    fields = dict(description)
    if fields["name"] == "fused":
        parts = tuple((space_of(part), float(weight)) for part, weight in fields["parts"])
        return Fused(parts, normalized=bool(fields["normalized"]))
    kind = SPACES[fields.pop("name")]
    for name, value in fields.items():
        if type(value) not in _FIELD_TYPES.get(name, _SIMPLE):
            raise ValueError(f"{name} is {value!r}")
    return kind(**fields)


def read_arrays(
    path: str | os.PathLike[str], remedy: str, most_bytes: float = math.inf
) -> dict[str, np.ndarray]:
    """As `read_npz`; that the file cannot be read, or is damaged, is a `UserError`."""
    try:
        return read_npz(pathlib.Path(path), most_bytes)
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror or error})") from error
    except ValueError as error:
        raise UserError(f"{path} is {error}; {remedy}") from error
