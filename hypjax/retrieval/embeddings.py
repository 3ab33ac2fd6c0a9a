"""Embedded images in a file: a gallery to search, or to take elsewhere."""

import contextlib
import dataclasses
import json
import os
import pathlib
import types
import zipfile
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jaxtyping import Float

from hypjax.errors import UserError
from hypjax.geometry import PoincareBall, Space, Sphere, poincare
from hypjax.geometry.spaces import Role

_FORMAT = "hypjax embeddings 1"
_SPACES = {"poincare": PoincareBall, "sphere": Sphere}


@dataclasses.dataclass(frozen=True, eq=False)
class Embeddings:
    """Points of a space, and what they stand for.

    Attributes:
        vectors: The points, float32.
        ids: Paths of the images.
        labels: Names of their classes; empty where they are not known.
        space: Where the points lie.
        fingerprint: Of the model that made them; others' points cannot be compared with these.
        images: Fingerprint of the image files and their labels.
        unreadable: {path: reason} of images that are not among them.
    """

    vectors: Float[np.ndarray, "n d"]
    ids: np.ndarray
    labels: np.ndarray
    space: Space
    fingerprint: str
    images: str
    unreadable: dict[str, str]

    def __len__(self) -> int:
        """Number of images."""
        return len(self.ids)

    def save(self, path: pathlib.Path) -> None:
        """Writes an .npz file, which appears whole or not at all.

        Its arrays are `vectors`, `ids`, `labels`, `unreadable` (pairs of path and reason), `space`
        (JSON), `fingerprint`, `images` and `format`.

        Raises:
            UserError: It cannot be written.
        """
        pairs = np.array(list(self.unreadable.items()), dtype=str).reshape(-1, 2)
        with _unfinished(path) as unfinished, unfinished.open("wb") as file:
            np.savez(
                file,
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
    def load(cls, path: pathlib.Path) -> "Embeddings":
        """Reads a file that `save` wrote; nothing in it is ever executed.

        Raises:
            UserError: It cannot be read, or is another kind of file.
        """
        try:
            file = np.load(path, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise UserError(f"{path} is not written by hypjax.embed")
            with file:
                arrays = {name: file[name] for name in file.files}
        except OSError as error:
            raise UserError(f"cannot read {path} ({error.strerror or error})") from error
        except (ValueError, zipfile.BadZipFile, EOFError) as error:
            raise UserError(f"{path} is no .npz file of plain arrays, or is damaged") from error
        if str(arrays.get("format")) != _FORMAT:
            raise UserError(f"{path} is not written by hypjax.embed")
        try:
            read = cls(
                vectors=arrays["vectors"],
                ids=arrays["ids"],
                labels=arrays["labels"],
                space=space_of(json.loads(str(arrays["space"]))),
                fingerprint=str(arrays["fingerprint"]),
                images=str(arrays["images"]),
                unreadable=dict(arrays["unreadable"].tolist()),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path} is damaged ({error}); embed the images again") from error
        if not len(read.vectors) == len(read.ids) == len(read.labels):
            raise UserError(f"{path} is damaged (lengths differ); embed the images again")
        return read

    def search_vectors(self, role: Role = "gallery") -> Float[np.ndarray, "n k"]:
        """What an inner-product index holds in the points' place, or is asked for, float32."""
        if role not in ("query", "gallery"):
            raise UserError(f"role is {role!r}; it must be query or gallery")
        with jax.enable_x64(True):
            vectors = self.space.search_vectors(np.asarray(self.vectors, np.float64), role)
        return np.asarray(vectors, np.float32)

    def features(self) -> Float[np.ndarray, "n d"]:
        """Embeddings before the map into their space, as far as it can be undone.

        Those of a ball come back clipped; lengths are lost on a sphere.
        """
        if isinstance(self.space, PoincareBall):
            return np.asarray(poincare.logmap0(self.vectors, self.space.c))
        return self.vectors

    def export_faiss(self, path: pathlib.Path) -> None:
        """Writes a faiss IndexFlatIP of the search vectors.

        Raises:
            UserError: faiss is not installed, or the file cannot be written.
        """
        faiss = require_faiss()
        vectors = self.search_vectors()
        index = faiss.IndexFlatIP(vectors.shape[1])
        index.add(vectors)
        with _unfinished(path) as unfinished:
            unfinished.write_bytes(faiss.serialize_index(index).tobytes())

    def export_parquet(self, path: pathlib.Path) -> None:
        """Writes a table with the columns id, label, vector and search_vector.

        Raises:
            UserError: The file cannot be written.
        """
        import pyarrow
        import pyarrow.parquet

        def rows(vectors: np.ndarray) -> pyarrow.Array:
            values = pyarrow.array(np.ascontiguousarray(vectors).reshape(-1))
            return pyarrow.FixedSizeListArray.from_arrays(values, vectors.shape[1])

        table = pyarrow.table(
            {
                "id": self.ids.tolist(),
                "label": [label or None for label in self.labels.tolist()],
                "vector": rows(self.vectors),
                "search_vector": rows(self.search_vectors()),
            }
        )
        facts = {
            "hypjax.space": json.dumps(describe_space(self.space)),
            "hypjax.fingerprint": self.fingerprint,
        }
        with _unfinished(path) as unfinished:
            pyarrow.parquet.write_table(table.replace_schema_metadata(facts), unfinished)


def require_faiss() -> types.ModuleType:
    """Imports faiss.

    Raises:
        UserError: It is not installed.
    """
    try:
        import faiss
    except ImportError as error:
        raise UserError("--export=faiss needs faiss: pip install faiss-cpu") from error
    return faiss


EXPORTS: dict[str, Callable[[Embeddings, pathlib.Path], None]] = {
    "faiss": Embeddings.export_faiss,
    "parquet": Embeddings.export_parquet,
}


def describe_space(space: Space) -> dict[str, object]:
    """A space as JSON; `space_of` reads it again."""
    for name, kind in _SPACES.items():
        if isinstance(space, kind):
            fields = dataclasses.asdict(space)
            return {"name": name} | ({"c": float(fields.pop("c"))} | fields if fields else {})
    raise UserError(f"{type(space).__name__} cannot be written to a file")


def space_of(description: dict[str, object]) -> Space:
    """The space that was described."""
    fields = dict(description)
    return _SPACES[fields.pop("name")](**fields)


@contextlib.contextmanager
def _unfinished(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A path to write to, which takes its final name if the body ends well."""
    unfinished = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        yield unfinished
        unfinished.replace(path)
    except OSError as error:
        raise UserError(f"cannot write to {path} ({error.strerror or error})") from error
    finally:
        unfinished.unlink(missing_ok=True)
