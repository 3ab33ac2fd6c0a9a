"""Galleries as index files of faiss."""

import pathlib

import faiss

from hypjax.errors import writing
from hypjax.galleries.embeddings import Embeddings
from hypjax.system.files import replacing


def export_flat(embeddings: Embeddings, path: pathlib.Path) -> str:
    """Writes the search vectors as an exact IndexFlatIP; returns a sentence with the path."""
    vectors = embeddings.search_vectors()
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    with writing(path), replacing(path) as temporary:
        temporary.write_bytes(faiss.serialize_index(index).tobytes())
    return f"{path}, a flat index of inner products, which is exact"
