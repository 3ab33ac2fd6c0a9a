"""Galleries in the formats of search engines and viewers, and those that searches read again."""

import importlib
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from hypjax.errors import UserError, require_utf8
from hypjax.geometry import Space
from hypjax.integrations import faiss as faiss_files
from hypjax.integrations import qdrant
from hypjax.integrations import usearch as graph
from hypjax.integrations.hyperview import export_hyperview
from hypjax.integrations.parquet import export_dataset, export_parquet, push_dataset
from hypjax.integrations.qdrant import Neighbours
from hypjax.retrieval.embeddings import Embeddings
from hypjax.system import hub


@runtime_checkable
class EngineGallery(Protocol):
    """What a search asks of a gallery in an engine, which keeps ids and labels itself.

    Attributes:
        space: Space of the points.
        fingerprint: That of the `Embeddings` which were exported.
    """

    space: Space
    fingerprint: str

    def nearest(
        self, points: Float[np.ndarray, "queries d"], k: int, paths: Sequence[str]
    ) -> list[Neighbours]:
        """Finds the k nearest images of each query, without the image of the query's own path."""

    def has_class(self, name: str) -> bool:
        """Whether an image is of this class."""


Gallery = Embeddings | graph.GraphGallery | EngineGallery


class Export(NamedTuple):
    """A format, or an engine."""

    writer: Callable[[Embeddings, pathlib.Path], str]  # To a path; returns where they are.
    module: str  # Package that this needs.
    package: str  # Its name for pip.
    # Opens what was written, by its path or URL, if hypjax searches it.
    opener: Callable[[pathlib.Path | str], Gallery] | None = None

    def write(self, embeddings: Embeddings, path: pathlib.Path) -> str:
        """Checks embeddings and writes them, or raises UserError; returns where they are."""
        require_utf8(embeddings.ids.tolist())
        if not len(embeddings):
            raise UserError("there are no embeddings to export")
        embeddings.check()
        return self.writer(embeddings, path)


def open_gallery(location: str | os.PathLike[str]) -> Gallery:
    """Opens a gallery: a .npz file, what an export of `EXPORTS` wrote, or a collection at a URL.

    Raises UserError if it is missing, damaged or something else.
    """
    location = os.fspath(location)
    path = pathlib.Path(location).expanduser()
    if export := _at_url(location):
        if export.opener is None:
            raise UserError(f"{location} holds no gallery; embed its images, and search these")
        return export.opener(location)
    export = EXPORTS.get(path.suffix.removeprefix("."))
    return export.opener(path) if export and export.opener else Embeddings.load(path)


def is_gallery(location: str | os.PathLike[str]) -> bool:
    """Whether a location looks like one that `open_gallery` opens."""
    location = os.fspath(location)
    suffixes = (f".{name}" for name, export in EXPORTS.items() if export.opener)
    if location.endswith((".npz", *suffixes)):
        return True
    try:
        at = _at_url(location)
    except UserError:  # It may be a dataset of images.
        return False
    return bool(at and at.opener)


def find_export(name: str) -> Export:
    """Returns the export of a name in `EXPORTS`, or the one to a URL whose scheme is in `URLS`.

    Raises UserError if there is none, or its package is not installed.
    """
    export = _at_url(name) or EXPORTS.get(name)
    if not export:
        names = ", ".join(EXPORTS)
        raise UserError(
            f"--export={name} is unknown; it must be one of {names}, qdrant://… or hf://OWNER/NAME"
        )
    try:
        importlib.import_module(export.module)
    except ImportError as error:
        raise UserError(
            f"--export={name} needs {export.module}: pip install {export.package}"
        ) from error
    return export


def _at_url(location: str) -> Export | None:
    scheme, mark, _ = location.partition("://")
    return URLS[scheme](location) if mark and scheme in URLS else None


def _collection(url: str) -> Export:
    def write(embeddings: Embeddings, _: pathlib.Path) -> str:
        return qdrant.export_qdrant(embeddings, url)

    return Export(write, "qdrant_client", '"hypjax[qdrant]"', qdrant.QdrantGallery.open)


def _repository(url: str) -> Export:
    name = url.removeprefix(hub.SCHEME)
    if not hub.is_name(name):
        raise UserError(f"{url} names no repository to write; write {hub.SCHEME}OWNER/NAME")

    def push(embeddings: Embeddings, folder: pathlib.Path) -> str:
        return push_dataset(embeddings, folder, name)

    return Export(push, "huggingface_hub", "huggingface_hub")


# By their names, which are also the suffixes of what they write.
EXPORTS = {
    "dataset": Export(export_dataset, "pyarrow", "pyarrow"),
    "faiss": Export(faiss_files.export_flat, "faiss", "faiss-cpu"),
    "faiss:hnsw": Export(faiss_files.export_hnsw, "faiss", "faiss-cpu"),
    "hyperview": Export(export_hyperview, "hyperview", "hyperview"),
    "parquet": Export(export_parquet, "pyarrow", "pyarrow"),
    "qdrant": Export(
        qdrant.export_qdrant, "qdrant_edge", '"hypjax[qdrant]"', qdrant.QdrantGallery.open
    ),
    "usearch": Export(graph.export_usearch, "usearch", '"hypjax[ann]"', graph.GraphGallery.open),
}
# By the schemes of URLs.
URLS = {"qdrant": _collection, "qdrant+https": _collection, "hf": _repository}
