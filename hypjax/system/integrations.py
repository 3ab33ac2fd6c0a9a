"""Registry of other programs that hypjax works with; their modules are imported on first use."""

import importlib
import operator
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from hypjax.errors import UserError, nearest, require_package

Ability = Literal["export", "open", "convert", "encode", "encode_texts", "run"]


class Integration(NamedTuple):
    """Packages of another program, and 'MODULE:FUNCTION' of `hypjax.integrations` by ability."""

    packages: str  # Required modules, separated by spaces.
    install: str  # Argument of pip that installs them.
    export: str = ""  # Writes embeddings to a path, and returns a sentence that says where.
    open: str = ""  # Opens exported embeddings as a `Gallery`, by their path or URL.
    convert: str = ""  # Writes a trained model.
    encode: str = ""  # Loads an encoder by its name, see `ExternalEncoder`.
    encode_texts: str = ""  # Loads an encoder of texts, see `hypjax.data.sentences`.
    run: str = ""  # Opens a program for a CPU, see `hypjax.experiment.engines`.


_QDRANT = Integration(
    "qdrant_client", "hypjax[qdrant]", "qdrant:QdrantGallery.export", "qdrant:QdrantGallery.open"
)
_HF = "torch_encoders:TransformersEncoder"
# Keys are names, which are also suffixes of exported files, or schemes of URLs.
INTEGRATIONS = {
    "ann": Integration("usearch numba", "hypjax[ann]", "ann:export_ann", "ann:IndexedGallery.open"),
    "dataset": Integration("pyarrow", "pyarrow", export="parquet:export_dataset"),
    "faiss": Integration("faiss", "faiss-cpu", export="faiss:export_flat"),
    "hf": Integration("torch transformers", "hypjax[hf]", encode=_HF),
    "hf://": Integration("huggingface_hub", "huggingface_hub", export="parquet:push_dataset"),
    "hyperview": Integration("hyperview", "hyperview", export="hyperview:export_hyperview"),
    "onnx": Integration(
        "onnx onnxruntime",
        "hypjax[onnx]",
        convert="onnx:write_onnx",
        encode="onnx_encoder:OnnxEncoder",
        encode_texts="sentence_encoders:OnnxSentences",
    ),
    "onnxruntime": Integration(
        "onnx onnxruntime", "hypjax[onnx]", run="cpu_engines:OnnxRuntimeProgram"
    ),
    "openvino": Integration("onnx openvino", "hypjax[cpu]", run="cpu_engines:OpenVinoProgram"),
    "parquet": Integration("pyarrow", "pyarrow", export="parquet:export_parquet"),
    "postgresql://": Integration(
        "psycopg",
        "hypjax[pgvector]",
        "pgvector:PostgresGallery.export",
        "pgvector:PostgresGallery.open",
    ),
    "qdrant://": _QDRANT,
    "qdrant+https://": _QDRANT,
    # Writing files does not need sentence-transformers; loading them does.
    "sentence-transformers": Integration("", "", convert="sentence_transformers:write_folder"),
    "st": Integration(
        "sentence_transformers",
        "sentence-transformers",
        encode_texts="sentence_encoders:SentenceTransformers",
    ),
    "timm": Integration("torch timm", "hypjax[timm]", encode="torch_encoders:TimmEncoder"),
}


def names(ability: Ability) -> list[str]:
    """Lists the integrations that have an ability."""
    return [name for name, entry in INTEGRATIONS.items() if getattr(entry, ability)]


def packages(name: str) -> list[str]:
    """The modules that an integration requires."""
    return INTEGRATIONS[name].packages.split()


def find(ability: Ability, name: str) -> Callable[..., Any]:
    """Imports the function for an ability; raises a UserError if it or a package is missing."""
    if name not in names(ability):
        raise UserError(f"hypjax knows no {name} to {ability}{nearest(name, names(ability))}")
    integration = INTEGRATIONS[name]
    for package in packages(name):
        require_package(package, name, integration.install)
    module, _, function = getattr(integration, ability).partition(":")
    return operator.attrgetter(function)(importlib.import_module(f"hypjax.integrations.{module}"))


def scheme(location: str) -> str:
    """Returns the scheme of a URL, such as 'qdrant://'; '' for a path."""
    name, separator, _ = location.partition("://")
    return name + separator if separator else ""
