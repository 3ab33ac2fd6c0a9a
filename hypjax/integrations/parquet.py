"""Galleries as tables in Parquet, and as datasets of the Hugging Face hub."""

import dataclasses
import json
import os
import pathlib

import numpy as np
import pyarrow
import pyarrow.parquet
from huggingface_hub import DatasetCard, DatasetCardData

from hypjax import __version__
from hypjax.errors import UserError, writing
from hypjax.galleries.embeddings import Embeddings
from hypjax.geometry.registry import describe_space
from hypjax.system import hub
from hypjax.system.files import replacing, sha256, write_text

_TABLE, _CARD = "gallery.parquet", "README.md"
_TEMPLATE = pathlib.Path(__file__).with_name("dataset_card.md.j2")


def export_parquet(embeddings: Embeddings, path: pathlib.Path) -> str:
    """Writes a table with the columns id, label, vector and search_vector."""
    vectors = {"vector": embeddings.vectors, "search_vector": embeddings.search_vectors()}
    columns = {
        name: pyarrow.FixedSizeListArray.from_arrays(np.ravel(rows), rows.shape[1])
        for name, rows in vectors.items()
    }
    labels = [label or None for label in embeddings.labels.tolist()]
    table = pyarrow.table({"id": embeddings.ids.tolist(), "label": labels, **columns})
    space = json.dumps(describe_space(embeddings.space))
    metadata = {"hypjax.space": space, "hypjax.fingerprint": embeddings.fingerprint}
    with writing(path), replacing(path) as temporary:
        pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), temporary)
    return str(path)


def export_dataset(embeddings: Embeddings, folder: pathlib.Path, name: str = "") -> str:
    """Writes a folder for `datasets.load_dataset`: the table, with relative paths, and a card."""
    ids = embeddings.ids.tolist()
    if all(map(os.path.isabs, ids)):
        shared = os.path.commonpath([os.path.dirname(path) for path in ids])
        ids = [os.path.relpath(path, shared) for path in ids]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        export_parquet(dataclasses.replace(embeddings, ids=np.array(ids)), folder / _TABLE)
        # `datasets` notices that a table has changed only if the configuration's name changes.
        files = [{"split": "gallery", "path": _TABLE}]
        content = {"config_name": f"gallery-{sha256(folder / _TABLE)[:12]}", "data_files": files}
        card = DatasetCard.from_template(
            DatasetCardData(tags=["hypjax", "image-retrieval"], configs=[content]),
            str(_TEMPLATE),
            name=name or folder.name,
            count=len(embeddings),
            version=__version__,
            space=embeddings.space,
            dim=embeddings.vectors.shape[1],
            search_dim=embeddings.search_vectors().shape[1],
            space_facts=describe_space(embeddings.space),
        )
        write_text(folder / _CARD, f"{card}\n")
    return str(folder)


def push_dataset(embeddings: Embeddings, folder: pathlib.Path, url: str) -> str:
    """Writes a dataset into a folder, and uploads it in one commit; returns its address.

    New repositories are private, since file names may hold private information.
    """
    name = url.removeprefix(hub.SCHEME)
    export_dataset(embeddings, folder, name)
    files = [_TABLE, _CARD]
    try:
        return hub.upload(folder, files, name, private=True, repo_type="dataset", marker=_TABLE)
    except UserError as error:
        raise UserError(f"wrote {folder}, but did not upload it: {error}") from error
