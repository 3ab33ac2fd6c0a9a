"""A small encoder of sentences in an ONNX file, and its tokenizer: it adds up vectors of words."""

import numpy as np

WORDS = ["[UNK]", "a", "red", "blue", "green", "gold", "round", "flat", "stone", "leaf"]
DIM = 6
TABLE = np.random.default_rng(7).normal(size=(len(WORDS), DIM)).astype(np.float32)


def write_encoder(folder, length=4):
    """Writes onnx:FILE, which reads `length` words, and returns the file."""
    import onnx

    ids = onnx.helper.make_tensor_value_info("input_ids", onnx.TensorProto.INT64, ["b", "t"])
    shape = ["b", "t", DIM]
    out = onnx.helper.make_tensor_value_info("tokens", onnx.TensorProto.FLOAT, shape)
    gather = onnx.helper.make_node("Gather", ["table", "input_ids"], ["tokens"])
    weights = [onnx.numpy_helper.from_array(TABLE, "table")]
    graph = onnx.helper.make_graph([gather], "words", [ids], [out], weights)
    opset = [onnx.helper.make_opsetid("", 17)]
    model = onnx.helper.make_model(graph, opset_imports=opset, ir_version=8)
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / "model.onnx")
    tokenizer_of(length).save(str(folder / "tokenizer.json"))
    return folder / "model.onnx"


def tokenizer_of(length):
    """A tokenizer of `WORDS` that cuts texts."""
    import tokenizers

    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=9)  # Which callers must undo.
    return tokenizer


def expected(text, length=4):
    """The vector of a text: the mean of its words', of length 1."""
    rows = [WORDS.index(word) if word in WORDS else 0 for word in text.split()[:length]]
    mean = TABLE[rows].mean(axis=0)
    return mean / np.linalg.norm(mean)
