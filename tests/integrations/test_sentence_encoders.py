"""Vectors of texts by encoders of other libraries."""

import numpy as np
import pytest

from hypjax.data.sentences import encoder_hash, sentence_encoder, text_vectors
from hypjax.errors import UserError
from tests.helpers import sentences

pytest.importorskip("onnxruntime", reason="needs the parity extra: onnxruntime")
pytest.importorskip("onnx", reason="needs the parity extra: onnx")
TEXTS = ["a red round stone", "a leaf", "blue blue flat stone leaf"]


def test_an_onnx_file_averages_its_tokens(tmp_path, capsys):
    spec = f"onnx:{sentences.write_encoder(tmp_path / 'm')}"
    found = sentence_encoder(spec).features(TEXTS)
    np.testing.assert_allclose(found, [*map(sentences.expected, TEXTS)], atol=1e-6)
    assert "1 of 3 texts cut to 4 tokens" in capsys.readouterr().err
    (alone,) = sentence_encoder(spec).features(TEXTS[1:2])
    np.testing.assert_array_equal(alone, found[1])  # Whatever texts it is embedded with.


def test_vectors_are_kept_for_later_runs(tmp_path, monkeypatch):
    spec = f"onnx:{sentences.write_encoder(tmp_path / 'm')}"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("hypjax.data.sentences.cache_folder", lambda: tmp_path)
    first = text_vectors(spec, TEXTS)
    monkeypatch.setattr(type(sentence_encoder(spec)), "features", None)
    for text, vector in text_vectors(spec, TEXTS).items():
        np.testing.assert_array_equal(vector, first[text])
    other = f"onnx:{sentences.write_encoder(tmp_path / 'o', length=3)}"
    assert encoder_hash(other) != encoder_hash(spec)


def test_sentence_transformers_embeds_as_itself(tmp_path):
    library = pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
    from sentence_transformers.sentence_transformer import modules

    static = modules.StaticEmbedding(sentences.tokenizer_of(4), embedding_dim=5)
    model = library.SentenceTransformer(modules=[static])
    model.save(str(tmp_path / "model"))
    spec = f"st:{tmp_path / 'model'}"
    np.testing.assert_allclose(sentence_encoder(spec).features(TEXTS), model.encode(TEXTS))
    model.prompts = {"query": "find "}
    model.save(str(tmp_path / "prompted"))
    static.tokenizer = sentences.tokenizer_of(3)
    model.save(str(tmp_path / "cut"))
    hashes = {encoder_hash(f"st:{tmp_path / name}") for name in ("model", "prompted", "cut")}
    assert len(hashes) == 3


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("minilm", "must be st:NAME or onnx:FILE"),
        ("timm:minilm", "must be st:NAME or onnx:FILE"),
        ("onnx:{}/none.onnx", "there is no file .*none.onnx"),
        ("onnx:{}/alone/model.onnx", "no file .*tokenizer.json; .* needs tokenizer.json beside it"),
        ("onnx:{}/text.onnx", "cannot load .*text.onnx"),
        ("st:{}", "cannot load st:"),
    ],
)
def test_mistakes_are_one_sentence(spec, sentence, tmp_path):
    sentences.write_encoder(tmp_path / "alone").with_name("tokenizer.json").unlink()
    for name in ("text.onnx", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=sentence):
        sentence_encoder(spec.format(tmp_path))
