"""Tokens of texts: vocabularies in each file format, cut and padded rows, cleaning."""

import gzip
import json

import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from hypjax.errors import UserError
from hypjax.models.tokens import MERGES, find_tokenizer, open_tokenizer
from hypjax.settings import TextSettings

PAIRS = [("a", "n"), ("an", "d</w>"), ("1", "2</w>"), ("p", "l"), ("e", "n"), ("e", "n</w>")]
COUNTED = PAIRS[:5]  # The vocabulary's size says how many of the merges count.
CLIP = TextSettings(8, 1, 2, vocabulary=514 + len(COUNTED), context=7)
SIGLIP = TextSettings(8, 1, 2, vocabulary=12, context=6, kind="siglip")
START, END = CLIP.vocabulary - 2, CLIP.vocabulary - 1


def vocabulary():
    """CLIP's vocabulary by its definition: printable bytes come first, then the others."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(b) for b in printable] + [chr(256 + n) for n in range(256 - len(printable))]
    names = letters + [f"{x}</w>" for x in letters] + ["".join(pair) for pair in COUNTED]
    return {name: i for i, name in enumerate([*names, "<|startoftext|>", "<|endoftext|>"])}


def ids(*names):
    return [vocabulary()[name] for name in names]


def lines(pairs):
    return "\n".join(['"bpe_simple_vocab_16e6.txt#version: 0.2', *map(" ".join, pairs)])


@pytest.fixture(params=[MERGES, "vocab.json", "merges.txt", "tokenizer.json", "folder"])
def clip_file(request, tmp_path):
    """A vocabulary in each of the formats."""
    if request.param == MERGES:
        (tmp_path / MERGES).write_bytes(gzip.compress(lines(PAIRS).encode()))
    elif request.param == "tokenizer.json":  # As Transformers writes it, which only cuts words.
        bpe = models.BPE(vocab=vocabulary(), merges=COUNTED, end_of_word_suffix="</w>")
        theirs = tokenizers.Tokenizer(bpe)
        theirs.normalizer = normalizers.Lowercase()
        theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        theirs.add_special_tokens(["<|startoftext|>", "<|endoftext|>"])
        theirs.enable_truncation(3)
        theirs.save(str(tmp_path / "tokenizer.json"))
    else:
        (tmp_path / "vocab.json").write_text(json.dumps(vocabulary()))
        (tmp_path / "merges.txt").write_text(lines(COUNTED))
    return tmp_path if request.param == "folder" else tmp_path / request.param


def test_rows_of_clip(clip_file):
    tokenizer = open_tokenizer(clip_file, CLIP)
    folder = clip_file if clip_file.is_dir() else clip_file.parent
    texts = ["And  pl\n", "", "12", "Pen", "<|endoftext|>", "l&amp;amp;l ’s", "an and an and"]
    expected = [
        ids("<|startoftext|>", "and</w>", "p", "l</w>", "<|endoftext|>"),
        [START, END],
        ids("<|startoftext|>", "1</w>", "2</w>", "<|endoftext|>"),  # Digits are never merged.
        ids("<|startoftext|>", "p", "e", "n</w>", "<|endoftext|>"),  # The sixth merge is too many.
        ids("<|startoftext|>", "<", "|</w>", "en", "d", "o", "<|endoftext|>"),
        ids("<|startoftext|>", "l</w>", "&</w>", "l</w>", "'", "s</w>", "<|endoftext|>"),
        ids("<|startoftext|>", "a", "n</w>", "and</w>", "a", "n</w>", "<|endoftext|>"),
    ]
    rows, cut = tokenizer.tokenize(texts)
    assert rows.dtype == np.int32 and rows.shape == (len(texts), CLIP.context)
    assert rows.tolist() == [row + [0] * (CLIP.context - len(row)) for row in expected]
    assert cut.tolist() == [False] * 4 + [True, False, True]
    assert all((tokenizer([text]) == row).all() for text, row in zip(texts, rows, strict=True))
    assert tokenizer([]).shape == (0, CLIP.context)
    assert tokenizer(np.array(["pen"])).tolist() == tokenizer(["pen"]).tolist()
    tokenizer.check(rows)
    assert find_tokenizer(folder) in (*tokenizer.files, *folder.glob("tokenizer.json"))
    assert all(file.parent == folder and file.is_file() for file in tokenizer.files)


def unigram():
    """A vocabulary of SigLIP, whose words begin with a blank, written "▁"."""
    pieces = ["<pad>", "</s>", "<unk>", "▁", "▁a", "▁dog", "_", ".", "d", "o", "g", "é"]
    model = models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=2)
    tokenizer = tokenizers.Tokenizer(model)
    steps = [normalizers.Replace(".", ""), normalizers.Replace("_", "")]  # As Transformers does.
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *steps])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    tokenizer.enable_padding()
    return tokenizer, pieces


def test_rows_of_siglip(tmp_path):
    vocabulary, pieces = unigram()
    vocabulary.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "spiece.model").touch()
    tokenizer = open_tokenizer(tmp_path, SIGLIP)
    texts = ["A  DOG.", "", "dog_dog", "a a a a a", "a a a a a a", "É"]
    rows, cut = tokenizer.tokenize(texts)
    names = [[pieces[token] for token in row] for row in rows]
    assert names == [
        ["▁a", "▁dog", ".", *3 * ["</s>"]],
        6 * ["</s>"],
        ["▁dog", "_", "d", "o", "g", "</s>"],
        [*5 * ["▁a"], "</s>"],
        [*5 * ["▁a"], "</s>"],
        ["▁", "é", *4 * ["</s>"]],
    ]
    assert cut.tolist() == [False] * 4 + [True, False]
    assert tokenizer(["\ud800a"]).shape == (1, 6)


def test_siglip_2_pads_with_0(tmp_path):
    model = models.BPE(
        vocab={"<pad>": 0, "<eos>": 1, "a": 2, **{str(i): i for i in range(3, 12)}}, merges=[]
    )
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    assert open_tokenizer(tmp_path, SIGLIP)(["Aa"]).tolist() == [[2, 2, 1, 0, 0, 0]]


def test_other_texts_and_tokens_are_refused(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary()))
    (tmp_path / "merges.txt").write_text(lines(COUNTED))
    tokenizer = open_tokenizer(tmp_path, CLIP)
    with pytest.raises(UserError, match="texts are one string; pass a list"):
        tokenizer("a dog")
    with pytest.raises(UserError, match=r"texts\[1\] is of type NoneType; pass strings"):
        tokenizer(np.array(["a dog", None]))
    rows = tokenizer(["a dog", "p p p p p p p"])
    rows[1, -1] = 5
    with pytest.raises(UserError, match=rf"row 1 .* no end token \({END}\); cut .* to 6 tokens"):
        tokenizer.check(rows)
    rows[1, -1] = CLIP.vocabulary
    with pytest.raises(UserError, match="tokens must be from 0 to 518"):
        tokenizer.check(rows)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        (None, b"", "no vocabulary in .*; put tokenizer.json, vocab.json with merges.txt"),
        ("spiece.model", b"x", r"SentencePiece's; put the model's tokenizer.json .*--tokenizer="),
        ("vocab.json", b"{}", r"vocab.json \(No such file .*put tokenizer.json"),
        ("tokenizer.json", b"{", r"tokenizer.json \(Expecting property name"),
        ("tokenizer.json", b"{}", "its content is that of no vocabulary"),
        (MERGES, b"\x1f\x8bx", "cannot read the vocabulary .*gz"),
        (MERGES, gzip.compress(b"#\na b c", mtime=0), "cannot read the vocabulary .*gz"),
        (
            MERGES,
            gzip.compress(lines(COUNTED[:4]).encode(), mtime=0),
            "has 518 tokens of clip, but the model 519 of clip",
        ),
        (
            "tokenizer.json",
            lambda: unigram()[0].to_str().encode(),
            "has 12 tokens of siglip, but the model 519 of clip",
        ),
    ],
)
def test_files_that_are_no_vocabulary_of_the_model_are_refused(tmp_path, name, content, problem):
    if name is not None:
        (tmp_path / name).write_bytes(content() if callable(content) else content)
    with pytest.raises(UserError, match=problem) as error:
        open_tokenizer(tmp_path, CLIP)
    assert "--tokenizer=FILE" in str(error.value)
    with pytest.raises(UserError, match="no file .*absent.json; put tokenizer.json"):
        open_tokenizer(tmp_path / "absent.json", CLIP)
