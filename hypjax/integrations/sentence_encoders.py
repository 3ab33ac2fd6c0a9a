"""Encoders of texts: models of sentence-transformers, and ONNX files with a tokenizer."""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32

from hypjax.errors import UserError, counted, explained
from hypjax.system import console
from hypjax.system.files import sha256

_CONTEXT = 512  # Tokens of BERT's position embeddings, unless the tokenizer's file says less.


class OnnxSentences:
    """A Transformer in an ONNX file, beside the tokenizer.json with which it was trained.

    If the output has a vector for each token, they are averaged and scaled to length 1, as in
    all-MiniLM-L6-v2 (Reimers and Gurevych, Sentence-BERT, EMNLP 2019, Section 3).
    """

    def __init__(self, name: str) -> None:
        import onnxruntime
        import tokenizers

        self._path = path = pathlib.Path(name).expanduser()
        vocabulary = path.with_name("tokenizer.json")
        for file in (path, vocabulary):
            if not file.is_file():
                raise UserError(f"there is no file {file}; {path} needs tokenizer.json beside it")
        with explained(f"cannot load {path}"):
            self._session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            self._tokenizer = tokenizers.Tokenizer.from_file(str(vocabulary))
        self._tokenizer.no_padding()
        self._context = (self._tokenizer.truncation or {}).get("max_length", _CONTEXT)
        self._tokenizer.enable_truncation(self._context)
        self._inputs = [x.name for x in self._session.get_inputs()]
        if unknown := {*self._inputs} - {"input_ids", "attention_mask", "token_type_ids"}:
            raise UserError(f"{path} takes {min(unknown)}; it must take input_ids of texts")
        self.facts = ["onnx", sha256(path), sha256(vocabulary)]

    def features(self, texts: Sequence[str]) -> Float32[np.ndarray, "texts dim"]:
        """Embeds texts one by one: files of int8 round a text by what else is in its batch."""
        encodings = self._tokenizer.encode_batch([*texts])
        _report_cut(sum(bool(x.overflowing) for x in encodings), texts, self._context)
        rows = []
        with explained(f"{self._path} cannot embed texts"):
            for encoding in encodings:
                columns = {
                    "input_ids": encoding.ids,
                    "attention_mask": encoding.attention_mask,
                    "token_type_ids": encoding.type_ids,
                }
                feed = {name: np.array([columns[name]], np.int64) for name in self._inputs}
                output = np.asarray(self._session.run(None, feed)[0], np.float32)[0]
                if output.ndim == 2:
                    output = output.mean(axis=0)
                    output /= np.linalg.norm(output)
                rows.append(output)
        return np.stack(rows)


class SentenceTransformers:
    """A model of sentence-transformers, by its name on the hub or its folder."""

    def __init__(self, name: str) -> None:
        from hypjax.integrations.torch_encoders import hash_weights

        with explained(f"cannot load st:{name}"):
            import sentence_transformers

            path = pathlib.Path(name).expanduser()
            found = str(path) if path.is_dir() else name
            self._model = sentence_transformers.SentenceTransformer(found)
        weights, prompts = hash_weights(self._model.state_dict()), self._model.prompts
        tokens = _facts_of(self._model.tokenizer)
        default = self._model.default_prompt_name
        self.facts = ["st", str(self._model), weights, sorted(prompts.items()), default, tokens]

    def features(self, texts: Sequence[str]) -> Float32[np.ndarray, "texts dim"]:
        """Embeds texts; the library cuts long ones."""
        context, tokenizer = self._model.max_seq_length, self._model.tokenizer
        if context and callable(tokenizer):  # Static embeddings read texts of any length.
            lengths = [len(ids) for ids in tokenizer([*texts])["input_ids"]]
            _report_cut(sum(length > context for length in lengths), texts, context)
        return np.asarray(self._model.encode([*texts], show_progress_bar=False), np.float32)


def _facts_of(tokenizer: Any) -> object:
    """What determines the tokens of a text."""
    fast = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if hasattr(fast, "to_str"):
        return fast.to_str()
    return sorted(tokenizer.get_vocab().items()) if hasattr(tokenizer, "get_vocab") else ""


def _report_cut(count: int, texts: Sequence[str], context: int) -> None:
    if count:
        number = f"{count:,} of {counted(len(texts), 'text')}"
        console.warn(f"{number} cut to {context} tokens, all that the model reads")
