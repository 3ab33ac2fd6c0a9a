"""Galleries in the formats of search engines and viewers, and those that searches read again."""

import importlib
import json
import os
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hypjax.engines import faiss_files, graph, qdrant
from hypjax.engines.hyperview import export_hyperview
from hypjax.engines.qdrant_collections import SCHEMES
from hypjax.errors import UserError, require_utf8, writing
from hypjax.retrieval.embeddings import Embeddings, describe_space
from hypjax.system.files import replacing


class Export(NamedTuple):
    """A format."""

    writer: Callable[[Embeddings, pathlib.Path], str]  # To a path; returns where they are.
    module: str  # Package that this needs.
    package: str  # Its name for pip.

    def write(self, embeddings: Embeddings, path: pathlib.Path) -> str:
        """Checks embeddings and writes them, or raises UserError; returns where they are."""
        require_utf8(embeddings.ids.tolist())
        if not len(embeddings):
            raise UserError("there are no embeddings to export")
        embeddings.check()
        return self.writer(embeddings, path)


Gallery = Embeddings | graph.GraphGallery | qdrant.QdrantGallery


def open_gallery(location: str | os.PathLike[str]) -> Gallery:
    """Opens a gallery: a .npz or .usearch file, a .qdrant folder, or a collection at a URL.

    Raises UserError if it is missing, damaged or something else.
    """
    location = os.fspath(location)
    path = pathlib.Path(location).expanduser()
    if location.startswith(SCHEMES) or path.suffix == qdrant.SUFFIX:
        return qdrant.QdrantGallery.open(location if location.startswith(SCHEMES) else path)
    return graph.GraphGallery.open(path) if path.suffix == graph.SUFFIX else Embeddings.load(path)


def is_gallery(location: str | os.PathLike[str]) -> bool:
    """Whether a location looks like one that `open_gallery` opens."""
    location = os.fspath(location)
    return location.startswith(SCHEMES) or location.endswith((".npz", graph.SUFFIX, qdrant.SUFFIX))


def find_export(name: str) -> Export:
    """Returns the export of a name in `EXPORTS`, or the one to the URL of a Qdrant collection.

    Raises UserError if there is none, or its package is not installed.
    """
    export = EXPORTS.get(name)
    if name.startswith(SCHEMES):
        export = Export(
            lambda embeddings, _: qdrant.export_qdrant(embeddings, name),
            "qdrant_client",
            '"hypjax[qdrant]"',
        )
    if not export:
        names = ", ".join(EXPORTS)
        raise UserError(f"--export={name} is unknown; it must be one of {names}, or qdrant://…")
    try:
        importlib.import_module(export.module)
    except ImportError as error:
        raise UserError(
            f"--export={name} needs {export.module}: pip install {export.package}"
        ) from error
    return export


def export_parquet(embeddings: Embeddings, path: pathlib.Path) -> str:
    """Writes a table with the columns id, label, vector and search_vector.

    Raises UserError if inner products do not rank points of the space.
    """
    import pyarrow
    import pyarrow.parquet

    def rows(vectors: np.ndarray) -> pyarrow.Array:
        values = pyarrow.array(np.ascontiguousarray(vectors).reshape(-1))
        return pyarrow.FixedSizeListArray.from_arrays(values, vectors.shape[1])

    table = pyarrow.table(
        {
            "id": embeddings.ids.tolist(),
            "label": [label or None for label in embeddings.labels.tolist()],
            "vector": rows(embeddings.vectors),
            "search_vector": rows(embeddings.search_vectors()),
        }
    )
    metadata = {
        "hypjax.space": json.dumps(describe_space(embeddings.space)),
        "hypjax.fingerprint": embeddings.fingerprint,
    }
    with writing(path), replacing(path) as temporary:
        pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), temporary)
    return str(path)


EXPORTS = {
    "faiss": Export(faiss_files.export_flat, "faiss", "faiss-cpu"),
    "faiss:hnsw": Export(faiss_files.export_hnsw, "faiss", "faiss-cpu"),
    "hyperview": Export(export_hyperview, "hyperview", "hyperview"),
    "parquet": Export(export_parquet, "pyarrow", "pyarrow"),
    "qdrant": Export(qdrant.export_qdrant, "qdrant_edge", '"hypjax[qdrant]"'),
    "usearch": Export(graph.export_usearch, "usearch", '"hypjax[ann]"'),
}
