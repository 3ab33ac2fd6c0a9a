"""Images with captions: in tables, beside images, in COCO's files, in lists of classes."""

import json
import pathlib

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from hypjax.data.captions import captioned_features, captioned_images
from hypjax.errors import UserError
from tests.helpers.pictures import write_pictures


@pytest.fixture(autouse=True)
def photos(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_pictures(pathlib.Path("photos"), ["a.png", "b.png"])


def described(images):
    names = [pathlib.PurePath(name).name for name in images.names]
    return dict(zip(names, images.captions, strict=True))


def write(name, text):
    pathlib.Path(name).write_text(text)
    return name


EXPECTED = {"a.png": ("a dog", "a pup"), "b.png": ("a cat",)}


def csv():
    rows = "photos/a.png,a dog,test\nphotos/b.png,a cat,train\nphotos/a.png,a pup,test\n"
    return write("t.csv", f"path,caption,split\n{rows}"), None


def parquet():
    texts = [["a dog", "a pup"], ["a cat"]]
    table = pyarrow.table({"path": ["photos/a.png", "photos/b.png"], "captions": texts})
    pyarrow.parquet.write_table(table, "t.parquet")
    return "t.parquet", None


def beside():
    write("photos/a.txt", "a dog\n\n a pup \na dog\n")
    write("photos/b.txt", "a cat")
    return "photos", None


def coco():
    files = enumerate(["a.png", "b.png", "gone.png"])
    texts = (0, "a dog"), (1, "a cat"), (0, "a pup "), (2, "a fish")
    content = {
        "images": [{"id": number, "file_name": f"val2017/{name}"} for number, name in files],
        "annotations": [{"image_id": number, "caption": text} for number, text in texts],
    }
    return "photos", write("captions.json", json.dumps(content))


@pytest.mark.parametrize("form", [csv, parquet, beside, coco])
def test_each_form_describes_the_images(form):
    images = captioned_images(*form())
    assert described(images) == EXPECTED
    assert images.num_classes == 2  # Each image is a class of its own.
    if form is csv:
        assert images.splits.tolist() == ["test", "train"]


def test_texts_of_classes_describe_their_images():
    write_pictures(pathlib.Path("kinds"), ["dog/1.png", "dog/2.png", "cat/3.png"])
    images = captioned_images("kinds", write("classes", "dog\ta dog\ta pup\ncat\ta cat\n"))
    assert described(images)["2.png"] == ("a dog", "a pup") and images.num_classes == 2


def no_annotation():
    where, file = coco()
    content = json.loads(pathlib.Path(file).read_text())
    content["annotations"] = content["annotations"][:1]
    return where, write(file, json.dumps(content))


MISTAKES = [
    (lambda: ("photos", None), "a.png has no caption; write "),
    (lambda: (beside()[0], write("photos/c.txt", "a fish") and None), "c.txt describes no image"),
    (lambda: (beside()[0], write("photos/a.txt", " \n") and None), "a.txt holds no texts"),
    (lambda: (write("t.csv", "path,caption\nphotos/a.png,\n"), None), "row 1 needs a path and a"),
    (
        lambda: (write("t.csv", "path,label\nphotos/a.png,dog\n"), None),
        "needs the columns path and",
    ),
    (no_annotation, "b.png has no caption; add a text, or leave the image out"),
    (lambda: ("photos", write("c.json", "{}")), "cannot read c.json"),
    (lambda: ("photos", write("classes", "dog\n")), "each image needs a class"),
]


@pytest.mark.parametrize(("mistake", "sentence"), MISTAKES)
def test_mistakes_are_one_sentence(mistake, sentence):
    with pytest.raises(UserError, match=sentence):
        captioned_images(*mistake())


def test_rows_of_features_are_pairs():
    vectors = np.arange(8.0).reshape(4, 2)[[0, 1, 0, 3]]
    arrays = dict(features=np.eye(4), ids=["x", "y", "x", "z"], text_features=vectors)
    np.savez("f.npz", **arrays)
    images = captioned_features("f.npz", None)
    assert images.names.tolist() == ["x", "y", "z"] and len(images.captions[0]) == 1
    np.testing.assert_array_equal(images.caption_vectors[images.captions[2][0]], vectors[3])
    np.savez("f.npz", **arrays, texts=["a dog", "a cat", "a pup", "a fish"])
    images = captioned_features("f.npz", None)
    assert images.captions.tolist() == [("a dog", "a pup"), ("a cat",), ("a fish",)]
    np.testing.assert_array_equal(images.caption_vectors["a fish"], vectors[3])


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({}, "needs an array texts or text_features"),
        ({"texts": ["a", "b"]}, r"texts of f.npz has the shape \[2\], not \[3\], a row for each"),
        ({"text_features": np.ones(3)}, r"has the shape \[3\], not \[3, dimension\]"),
        ({"texts": ["a", " ", "c"]}, "1 has an empty caption; add a text"),
    ],
)
def test_wrong_arrays_are_one_sentence(arrays, sentence):
    np.savez("f.npz", features=np.eye(3), **arrays)
    with pytest.raises(UserError, match=sentence):
        captioned_features("f.npz", None)
