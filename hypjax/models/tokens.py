"""Tokens of texts: the numbers that a text tower embeds, as the released models were trained on.

CLIP, and MERU and its successors, clean texts by ftfy, by unescaping HTML twice, by turning each
run of whitespace into one blank, and to lower case. Words are letters, single digits or the rest;
the library `tokenizers` merges their bytes into tokens. A row is [start] … [end], padded with 0. A
text that is too long loses its last tokens, but keeps the end token, whose row the tower reads:
without it, all long texts would have one embedding. Transformers pads with the end token, which
gives the same embedding, since a tower reads the first one, and no token attends to later ones. It
skips ftfy and unescaping, so "&amp;" and curly apostrophes become other tokens; here, only the
vocabulary of a tokenizer.json of CLIP's counts. A text "<|endoftext|>" is ordinary text.

SigLIP's texts are put to lower case and keep their punctuation and underscores, as in training
(big_vision, `preprocess_ops.tokenize` with lower=True, eos="sticky"; its evaluators remove
punctuation from the names of classes only). Transformers deletes both in SigLIP's texts, but not in
SigLIP 2's; open_clip deletes punctuation and makes underscores blanks in both. A row is … [end],
always padded to the full context, without a mask: with the end token, or with 0 in SigLIP 2.
"""

import dataclasses
import gzip
import html
import json
import pathlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from hypjax.errors import UserError, counted, explained, require_package
from hypjax.settings import TextSettings
from hypjax.system import console

MERGES = "bpe_simple_vocab_16e6.txt.gz"  # As CLIP's repository publishes it.
_START, _END = "<|startoftext|>", "<|endoftext|>"
# Of CLIP's words, in lower case.
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+"
# By preference. The last is refused, with a sentence that says what to put in its place.
_FILES = ("tokenizer.json", "vocab.json", MERGES, "spiece.model")
_REMEDY = f"put tokenizer.json, vocab.json with merges.txt, or {MERGES} there"
_FLAG = "or name such a file by --tokenizer=FILE"


class Tokens(NamedTuple):
    """Texts as rows of tokens."""

    ids: Int[np.ndarray, "texts context"]  # int32.
    cut: Bool[np.ndarray, " texts"]  # Marks texts that lost tokens.


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Turns texts into rows of tokens."""

    files: list[pathlib.Path]  # The vocabulary's, to be copied beside a model's weights.
    settings: TextSettings
    splitter: Any  # A `tokenizers.Tokenizer` that adds no special tokens.
    clean: Callable[[str], str]
    start: tuple[int, ...]  # Tokens before a text.
    end: int
    padding: int

    def __call__(self, texts: Iterable[str]) -> Int[np.ndarray, "texts context"]:
        """Tokens of texts, int32; raises a `UserError` for anything but strings in a list."""
        return self.tokenize(texts).ids

    def tokenize(self, texts: Iterable[str]) -> Tokens:
        """Tokens of texts, with a mark for each text that is too long and was cut."""
        if isinstance(texts, str):
            raise UserError("texts are one string; pass a list of strings")
        texts = list(texts)
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise UserError(f"texts[{index}] is of type {type(text).__name__}; pass strings")
        encodings = self.splitter.encode_batch_fast(
            [self.clean(text) for text in texts], add_special_tokens=False
        )
        context = self.settings.context
        room = context - len(self.start) - 1
        ids = np.full((len(encodings), context), self.padding, np.int32)
        for row, encoding in zip(ids, encodings, strict=True):
            tokens = (*self.start, *encoding.ids[:room], self.end)
            row[: len(tokens)] = tokens
        return Tokens(ids, np.array([len(encoding) > room for encoding in encodings], bool))

    def tokens(self, texts: Iterable[str]) -> Int[np.ndarray, "texts context"]:
        """Tokens of texts, int32; a warning counts the texts that were cut."""
        ids, cut = self.tokenize(texts)
        if cut.any():
            number = f"{int(cut.sum()):,} of {counted(len(cut), 'text')}"
            console.warn(f"{number} cut to {ids.shape[1]} tokens, all that the model reads")
        return ids

    def check(self, ids: Int[np.ndarray, "texts context"]) -> None:
        """Raises a `UserError` for rows that another tokenizer cut without an end token."""
        if ids.min(initial=0) < 0 or ids.max(initial=0) >= self.settings.vocabulary:
            raise UserError(f"tokens must be from 0 to {self.settings.vocabulary - 1:,}")
        if len(invalid := np.flatnonzero(~(ids == self.end).any(axis=1))):
            problem = f"row {invalid[0]} of the tokens has no end token ({self.end})"
            raise UserError(f"{problem}; cut longer texts to {ids.shape[1] - 1} tokens and add it")


def find_tokenizer(folder: pathlib.Path) -> pathlib.Path | None:
    """The file of a vocabulary in a folder, such as that of a model's weights, if there is one."""
    return next((path for name in _FILES if (path := folder / name).is_file()), None)


def open_tokenizer(path: pathlib.Path, settings: TextSettings) -> Tokenizer:
    """Opens the vocabulary in a file, or in a folder, for a tower with these settings.

    Files are known by their content: CLIP's list of merges, Transformers' vocab.json with
    merges.txt beside it, and CLIP's or SigLIP's tokenizer.json. Raises a `UserError` for missing
    and damaged files, and for the vocabulary of another model.
    """
    require_package("tokenizers", "reading texts", "hypjax[text]")
    require_package("ftfy", "reading texts", "hypjax[text]")
    file = find_tokenizer(path) if path.is_dir() else path
    if file is None or not file.is_file():
        missing = f"no vocabulary in {path}" if file is None else f"no file {path}"
        raise UserError(f"{missing}; {_REMEDY}, {_FLAG}")
    if file.suffix == ".model":
        raise UserError(f"{file} is SentencePiece's; put the model's tokenizer.json there, {_FLAG}")
    with explained(f"cannot read the vocabulary {file}", f"; {_REMEDY}, {_FLAG}"):
        files, content = _read(file, settings)
        is_clip = content["model"].get("end_of_word_suffix") == "</w>"
        tokenizer = (_clip if is_clip else _siglip)(files, settings, content)
    size, kind = tokenizer.splitter.get_vocab_size(), "clip" if is_clip else "siglip"
    # SigLIP's multilingual vocabulary has 100 more tokens than its towers; no text has them.
    fits = size - (0 if is_clip else 100) <= settings.vocabulary <= size
    if kind != settings.kind or not fits:
        problem = f"{file} has {size:,} tokens of {kind}, but the model {settings.vocabulary:,}"
        advice = "name the model's own vocabulary by --tokenizer=FILE"
        raise UserError(f"{problem} of {settings.kind}; {advice}")
    return tokenizer


def _read(file: pathlib.Path, settings: TextSettings) -> tuple[list[pathlib.Path], dict[str, Any]]:
    """The files of a vocabulary, and their content in the form of a tokenizer.json."""
    data = file.read_bytes()
    if data[:1] == b"{" and "model" in (content := json.loads(data)):
        return [file], content
    if data[:2] == b"\x1f\x8b":
        from tokenizers import pre_tokenizers

        merges = _merges(gzip.decompress(data))[: settings.vocabulary - 514]
        # The order of code points is CLIP's: printable bytes, then the others, from U+0100.
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        ends = [f"{letter}</w>" for letter in letters]
        names = (*letters, *ends, *map("".join, merges), _START, _END)
        files = [file]
        vocabulary = {name: token for token, name in enumerate(names)}
    elif file.name in ("vocab.json", "merges.txt"):
        files = [file.with_name("vocab.json"), file.with_name("merges.txt")]
        vocabulary, merges = json.loads(files[0].read_bytes()), _merges(files[1].read_bytes())
    else:
        raise ValueError("its content is that of no vocabulary")
    return files, {"model": {"vocab": vocabulary, "merges": merges, "end_of_word_suffix": "</w>"}}


def _merges(data: bytes) -> list[list[str]]:
    """The pairs of a list of merges, most frequent first; the first line names the format."""
    return [line.split() for line in data.decode().split("\n")[1:] if line]


def _clip(files: list[pathlib.Path], settings: TextSettings, content: dict[str, Any]) -> Tokenizer:
    import tokenizers
    from tokenizers import models, pre_tokenizers

    vocabulary, merges = content["model"]["vocab"], content["model"]["merges"]
    pairs = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in merges]
    splitter = tokenizers.Tokenizer(models.BPE(vocabulary, pairs, end_of_word_suffix="</w>"))
    word_splitter = pre_tokenizers.Split(tokenizers.Regex(_WORDS), behavior="removed", invert=True)
    byte_splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splitter.pre_tokenizer = pre_tokenizers.Sequence([word_splitter, byte_splitter])
    start, end = vocabulary[_START], vocabulary[_END]
    return Tokenizer(files, settings, splitter, _clean_clip, (start,), end, padding=0)


def _clean_clip(text: str) -> str:
    # ftfy takes most of the time, and leaves such texts as they are.
    if not (text.isascii() and text.isprintable() and "&" not in text):
        import ftfy

        text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return " ".join(text.split()).lower()


def _siglip(
    files: list[pathlib.Path], settings: TextSettings, content: dict[str, Any]
) -> Tokenizer:
    import tokenizers

    normalizer = content.get("normalizer") or {}
    if "normalizers" in normalizer:  # Without the steps that delete punctuation.
        steps = [step for step in normalizer["normalizers"] if step.get("content") != ""]
        content = {**content, "normalizer": {**normalizer, "normalizers": steps}}
    splitter = tokenizers.Tokenizer.from_str(json.dumps(content))
    splitter.no_padding()
    splitter.no_truncation()
    end, end_of_gemma = splitter.token_to_id("</s>"), splitter.token_to_id("<eos>")
    if end_of_gemma is not None:  # SigLIP 2 has Gemma's vocabulary.
        return Tokenizer(files, settings, splitter, _clean_siglip, (), end_of_gemma, padding=0)
    if end is None:
        raise ValueError("it is neither CLIP's nor SigLIP's")
    return Tokenizer(files, settings, splitter, _clean_siglip, (), end, padding=end)


def _clean_siglip(text: str) -> str:
    import ftfy

    return " ".join(ftfy.fixes.fix_surrogates(text).split()).lower()
