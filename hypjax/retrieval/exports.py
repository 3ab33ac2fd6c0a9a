"""Galleries in the formats of other search engines and viewers."""

import importlib
import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hypjax.errors import UserError
from hypjax.retrieval.embeddings import Embeddings, describe_space, replacing_file
from hypjax.retrieval.graph import export_usearch
from hypjax.retrieval.hyperview import export_hyperview


class Export(NamedTuple):
    """A format.

    Attributes:
        write: Writes embeddings, given the path of the file; returns where they are.
        module: Package that this needs.
        package: Its name for pip.
    """

    write: Callable[[Embeddings, pathlib.Path], str]
    module: str
    package: str

    def require(self) -> Any:
        """Imports and returns the package.

        Raises:
            UserError: It is not installed.
        """
        try:
            return importlib.import_module(self.module)
        except ImportError as error:
            raise UserError(
                f"this export needs {self.module}: pip install {self.package}"
            ) from error


def export_faiss(embeddings: Embeddings, path: pathlib.Path) -> str:
    """Writes the search vectors as a faiss IndexFlatIP.

    Raises:
        UserError: faiss is not installed, inner products do not rank points of the space, or the
            file cannot be written.
    """
    faiss = EXPORTS["faiss"].require()
    vectors = embeddings.search_vectors()
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    with replacing_file(path) as temporary:
        temporary.write_bytes(faiss.serialize_index(index).tobytes())
    return str(path)


def export_parquet(embeddings: Embeddings, path: pathlib.Path) -> str:
    """Writes a table with the columns id, label, vector and search_vector.

    Raises:
        UserError: Inner products do not rank points of the space, or the file cannot be written.
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
    with replacing_file(path) as temporary:
        pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), temporary)
    return str(path)


EXPORTS = {
    "faiss": Export(export_faiss, "faiss", "faiss-cpu"),
    "hyperview": Export(export_hyperview, "hyperview", "hyperview"),
    "parquet": Export(export_parquet, "pyarrow", "pyarrow"),
    "usearch": Export(export_usearch, "usearch", '"hypjax[ann]"'),
}
