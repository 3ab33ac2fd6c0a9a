"""Vectors of texts by sentence encoders of other libraries."""

import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float, Float32, Shaped

from hypjax.data.dataset import fingerprint_of
from hypjax.errors import UserError, counted
from hypjax.system import console, integrations
from hypjax.system.caches import cache_folder
from hypjax.system.files import replacing

TextVectors = Mapping[str, Float[np.ndarray, " dim"]]  # By text.
TextInputs = Mapping[str, Shaped[np.ndarray, " size"]]  # What a tower takes: vectors, or tokens.


class SentenceEncoder(Protocol):
    """An encoder of another library that maps each text to one vector."""

    facts: Any  # What determines the vectors, to be hashed.

    def features(self, texts: Sequence[str]) -> Float32[np.ndarray, "texts dim"]:
        """Embeds texts, each as if it were the only one; says how many it had to cut."""


@functools.lru_cache(maxsize=2)  # A run asks for the dimension first.
def sentence_encoder(spec: str) -> SentenceEncoder:
    """Opens 'st:NAME', a model of sentence-transformers, or 'onnx:FILE', with its tokenizer."""
    library, _, name = spec.partition(":")
    if library not in integrations.names("encode_texts") or not name:
        raise UserError(f"the encoder of texts is {spec!r}; it must be st:NAME or onnx:FILE")
    return integrations.find("encode_texts", library)(name)


def encoder_hash(spec: str) -> str:
    """Hash of a sentence encoder's weights and settings."""
    return fingerprint_of([sentence_encoder(spec).facts])


def text_vectors(spec: str, texts: Sequence[str]) -> TextVectors:
    """Embeds distinct texts once: the cache keeps the vectors for later runs."""
    name = fingerprint_of([encoder_hash(spec), *texts])
    file = pathlib.Path(cache_folder() / "texts" / f"{name}.npy")
    if not file.exists():
        console.say(f"embedding {counted(len(texts), 'text')} once, by {spec}")
        vectors = sentence_encoder(spec).features(texts)
        with console.tolerating(f"the vectors of texts ({file})"):
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file) as temporary, temporary.open("wb") as opened:
                np.save(opened, vectors)
    else:
        vectors = np.load(file)
    return dict(zip(texts, vectors, strict=True))
