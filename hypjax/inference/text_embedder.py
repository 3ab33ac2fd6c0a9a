"""Embeds texts as points of the space in which a model embeds images."""

import abc
import functools
from collections.abc import Callable, Sequence
from typing import cast

import jax
import numpy as np
from jaxtyping import Array, Float, Float32, PyTree

from hypjax.data.sentences import encoder_hash, sentence_encoder
from hypjax.errors import UserError
from hypjax.experiment import engines
from hypjax.experiment.embedding import fingerprint
from hypjax.geometry import Space
from hypjax.models import Embedder
from hypjax.models.text import TextTransformer
from hypjax.models.tokens import Tokenizer
from hypjax.retrieval.inputs import by_blocks
from hypjax.system.caches import cache_folder
from hypjax.types import Outputs

_BATCH_SIZE = 64  # Most texts that are embedded at once.
_LENGTHS = (16, 32)  # Tokens of short texts, each of which has programs, beside the context.


class TextEmbedder(abc.ABC):
    """Embeds texts as points of a space."""

    def __init__(self, space: Space) -> None:
        self._space = space

    @abc.abstractmethod
    def _features(self, texts: Sequence[str]) -> Float[np.ndarray, "texts d"]:
        """The head's output for each text, float32."""

    def points(
        self, texts: Sequence[str], templates: Sequence[str] = ()
    ) -> Float32[np.ndarray, "texts d"]:
        """Embeds texts as points of the space.

        With templates, such as "a photo of a {}.", the features of each text's prompts are averaged
        before the map into the space (MERU, Section 4.1); in a space of directions, features of
        length 1, as for CLIP.
        """
        for template in templates:
            if template.count("{}") != 1:
                raise UserError(f"the template {template!r} must contain {{}} once, for the text")
        prompts = [template.replace("{}", text) for text in texts for template in templates]
        features = self._features(prompts or texts)
        if templates:
            if self._space.normalized:
                features /= np.linalg.norm(features, axis=1, keepdims=True)
            features = features.reshape(len(texts), len(templates), -1).mean(axis=1)
        return by_blocks(jax.jit(self._space.embed), features)


class SentenceEmbedder(TextEmbedder):
    """Embeds texts by a sentence encoder of another library and the head that was trained on it."""

    def __init__(
        self,
        tower: Embedder,
        params: PyTree,
        space: Space,
        encoder: str,
        trained_on: str | None = None,  # The encoder's `encoder_hash`.
    ) -> None:
        super().__init__(space)
        if trained_on is not None and encoder_hash(encoder) != trained_on:
            problem = f"{encoder} is not the encoder of texts that the model was trained on"
            raise UserError(f"{problem}; put that encoder's files in its place")
        self._tower, self._params, self._encoder = tower, params, encoder

    def _features(self, texts: Sequence[str]) -> Float[np.ndarray, "texts d"]:
        vectors, dim = sentence_encoder(self._encoder).features(texts), self._tower.encoder.dim
        if vectors.shape[1] != dim:
            problem = f"{self._encoder} has {vectors.shape[1]} dimensions"
            raise UserError(f"{problem}, but the model was trained on {dim}; name that encoder")
        outputs = self._tower.apply({"params": self._params}, vectors)
        return np.array(cast(Outputs, outputs).projected)


class TowerEmbedder(TextEmbedder):
    """Embeds texts by a model's own Transformer.

    Where tokens attend to those before them only, whatever follows a text's end does not change its
    embedding. Texts are therefore embedded in the order of their lengths, and batches of short
    texts are cut.
    """

    def __init__(
        self,
        tower: Embedder,
        params: PyTree,
        space: Space,
        tokenizer: Tokenizer,
        engine: tuple[str, str] | None = None,
    ) -> None:
        super().__init__(space)
        self._tower, self._engine = tower, engine  # See `hypjax.experiment.engines.choose`.
        self._programs: dict[int, engines.Program] = {}  # By the number of tokens.
        self._encoder = cast(TextTransformer, tower.encoder)
        self._params, self._tokenizer = params, tokenizer

        def project(params: PyTree, ids: Array) -> Array:
            return cast(Outputs, tower.apply({"params": params}, ids)).projected

        self._project = project
        self._by_jax: Callable[[PyTree, np.ndarray], Array] = jax.jit(project)

    def _features(self, texts: Sequence[str]) -> Float[np.ndarray, "texts d"]:
        """The head's output for each text, float32."""
        ids = self._tokenizer.tokens(texts)
        context = ids.shape[1]
        is_causal = self._encoder.settings.kind == "clip"
        # The end token has the largest number.
        lengths = ids.argmax(axis=1) + 1 if is_causal else np.full(len(ids), context)
        order, features = np.argsort(lengths, kind="stable"), []
        for start in range(0, len(order), _BATCH_SIZE):
            rows = order[start : start + _BATCH_SIZE]
            longest = lengths[rows].max()
            length = min(next((x for x in _LENGTHS if longest <= x), context), context)
            size = 1 << (len(rows) - 1).bit_length()  # A power of two, to compile few programs.
            batch = ids[np.resize(rows, size), :length]
            features.append(np.asarray(self._program(length)(batch))[: len(rows)])
        return np.concatenate(features)[np.argsort(order)]

    def _program(self, length: int) -> engines.Function:
        """The program for texts of `length` tokens: an engine's, where one serves."""
        by_jax, params = functools.partial(self._by_jax, self._params), self._params
        if self._engine is None:
            return by_jax
        if length in self._programs:
            return self._programs[length]
        name = fingerprint((engines.FORMAT, self._tower, length), params)
        example = jax.ShapeDtypeStruct((length,), np.int32)
        function, file = (
            functools.partial(self._project, params),
            cache_folder() / "programs" / name,
        )
        self._programs[length] = engines.Program(self._engine, by_jax, function, example, file)
        return self._programs[length]
