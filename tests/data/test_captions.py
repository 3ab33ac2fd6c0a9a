"""Images with captions: in tables, beside images, in COCO's files, in lists of classes."""

import functools
import json
import pathlib

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from hypjax.assemble import choose_dataset
from hypjax.config import load_config
from hypjax.data.captions import (
    captioned_features,
    captioned_images,
    captioned_pairs,
    class_texts,
)
from hypjax.data.dataset import Decoding
from hypjax.data.opening import open_photos
from hypjax.data.splits import HeldOutClasses
from hypjax.errors import UserError
from tests.helpers.pictures import write_pictures


@pytest.fixture(autouse=True)
def photos(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_pictures(pathlib.Path("photos"), ["a.png", "b.png"])


def boxes(cell, of="a.png"):
    """A table with a box."""
    rows = f'photos/a.png,a dog,\nphotos/{of},an ear,"{cell}"\n'
    return write("boxes.csv", f"path,caption,box\n{rows}")


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


def test_pairs_from_python_describe_the_images():
    pictures = np.arange(4 * 5 * 5 * 3, dtype=np.uint8).reshape(4, 5, 5, 3)
    captions = ["a dog => a pup", ["a cat", "a dog"], ("a fish",), "a cow"]
    images = captioned_pairs((pictures, captions))
    expected = [("a dog", "a pup"), ("a cat", "a dog"), ("a fish",), ("a cow",)]
    assert images.captions.tolist() == expected
    assert images.labels.tolist() == [0, 0, 1, 2]  # The first two share a caption.
    split = {"train": (pictures[:2], captions[:2]), "test": (pictures[2:], captions[2:])}
    images = captioned_pairs(split)
    assert images.captions.tolist() == expected and images.splits[2] == "test"
    for dataset, sentence in (
        ((pictures, captions[:2]), "has 4 images, but 2 captions"),
        ((pictures[:1], [None]), "image 0 has an empty caption; add a text"),
        ((pictures[:1], [[]]), "image 0 has no caption; add a text"),
        (pictures, r"is no dataset; give \(images, captions\)"),
    ):
        with pytest.raises(UserError, match=sentence):
            captioned_pairs(dataset)


def test_paths_from_python_become_a_table(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = load_config("configs/captions.py", ["data.path=x", "model.text.encoder=st:words"])
    pairs = [("photos/a.png", ["a dog", "a pup"]), (pathlib.Path("photos/b.png"), "a cat")]
    assert choose_dataset(config, pairs) is None
    assert described(captioned_images(config.data.path, None)) == EXPECTED


def test_texts_of_classes_describe_their_images():
    write_pictures(pathlib.Path("kinds"), ["dog/1.png", "dog/2.png", "cat/3.png"])
    images = captioned_images("kinds", write("classes", "dog\ta dog\ta pup\ncat\ta cat\n"))
    assert described(images)["2.png"] == ("a dog", "a pup") and images.num_classes == 2


def no_annotation():
    where, file = coco()
    content = json.loads(pathlib.Path(file).read_text())
    content["annotations"] = content["annotations"][:1]
    return where, write(file, json.dumps(content))


def same_names():
    where, file = coco()
    write_pictures(pathlib.Path("photos"), ["other/a.png"])
    return where, file


CLASSES = "path,caption,label\nphotos/a.png,a dog,dog\nphotos/b.png,a cat,\n"
MISTAKES = [
    (lambda: ("photos", None), "a.png has no caption; write "),
    (lambda: (beside()[0], write("photos/a.txt", " \n") and None), "a.txt holds no texts"),
    (lambda: (write("t.csv", "path,caption\nphotos/a.png,\n"), None), "row 1 needs a path and a"),
    (
        lambda: (write("t.csv", "path,label\nphotos/a.png,dog\n"), None),
        "needs the columns path and",
    ),
    (no_annotation, "b.png has no caption; add a text, or leave the image out"),
    (same_names, "several images are named a.png, which their captions in captions.json cannot"),
    (
        lambda: (write("t.csv", CLASSES + "photos/a.png,a pup,cat\n"), None),
        "a.png have 'dog' and 'cat' in label; give all of them one value",
    ),
    (lambda: (boxes("1,2,9"), None), "row 2: the box 1,2,9 is not left, top, right and bottom"),
    (lambda: (boxes("9,2,3,8"), None), "the box 9,2,3,8 is not .*it is empty"),
    (lambda: (boxes("1,1,5,5", of="b.png"), None), "has only boxes of .*b.png; add a row for"),
    (lambda: ("photos", write("c.json", "{}")), "cannot read c.json"),
    (lambda: ("photos", write("classes", "dog\n")), "each image needs a class"),
]


@pytest.mark.parametrize(("mistake", "sentence"), MISTAKES)
def test_mistakes_are_one_sentence(mistake, sentence):
    with pytest.raises(UserError, match=sentence):
        captioned_images(*mistake())


def test_rows_of_features_are_pairs():
    vectors = np.arange(8.0).reshape(4, 2)[[0, 1, 0, 3]]
    arrays = dict(features=np.eye(4)[[0, 1, 0, 3]], ids=["x", "y", "x", "z"], text_features=vectors)
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
        ({}, "needs an array texts or text_features.* store all arrays in an .npz or .pt file"),
        ({"texts": ["a"] * 3, "ids": [1, 2, 1]}, "features of f.npz: row 2 differs from row 0"),
        ({"texts": ["a"] * 3, "text_features": np.eye(3)}, "row 1 differs from row 0 of the same"),
        ({"text_features": np.full((3, 2), np.nan)}, "text_features of f.npz: row 0 is not finite"),
        ({"texts": ["a", "b"]}, r"texts of f.npz has the shape \[2\], not \[3\], a row for each"),
        ({"text_features": np.ones(3)}, r"has the shape \[3\], not \[3, dimension\]"),
        ({"texts": ["a", " ", "c"]}, "1 has an empty caption; add a text"),
    ],
)
def test_wrong_arrays_are_one_sentence(arrays, sentence):
    np.savez("f.npz", features=np.eye(3), **arrays)
    with pytest.raises(UserError, match=sentence):
        captioned_features("f.npz", None)


def test_labels_of_rows_of_one_image_agree():
    features = np.eye(3)[[0, 0, 2]]
    arrays = dict(features=features, ids=[1, 1, 2], texts=np.array(["a", "b", "c"], "S"))
    np.savez("f.npz", **arrays, labels=["", "dog", "cat"])
    images = captioned_features("f.npz", None)
    assert images.class_names.tolist() == ["dog", "cat"]
    assert images.captions.tolist() == [("a", "b"), ("c",)]
    np.savez("f.npz", **arrays, labels=["cow", "dog", "cat"])
    with pytest.raises(UserError, match="image 1 have 'cow' and 'dog' in class_names"):
        captioned_features("f.npz", None)


def test_images_linked_by_equal_captions_are_one_class():
    texts, ids = ["a", "b", "b", "c", "d", "c", "a"], [0, 0, 1, 1, 2, 3, 4]
    np.savez("f.npz", features=np.eye(5)[ids], ids=ids, texts=texts)
    labels = captioned_features("f.npz", None).labels
    assert labels.tolist() == [0, 0, 1, 0, 0]


def test_further_texts_beside_images_are_left_out(capsys):
    beside()
    write("photos/list.txt", "a.png\n")
    assert described(captioned_images("photos/list.txt", None)) == {"a.png": ("a dog", "a pup")}
    assert "describes no image" not in capsys.readouterr().err
    assert described(captioned_images("photos", None, ["b.png"])) == {"a.png": ("a dog", "a pup")}
    assert "list.txt describes no image beside it; it is left out" in capsys.readouterr().err


def test_columns_of_classes_are_those_of_tables_of_images():
    cells = "path,caption,x,y,txt\nphotos/a.png,a dog,1,7,dog\nphotos/b.png,a cat,2,7,dog\n"
    images = captioned_images(write("t.csv", cells), None)
    assert images.class_names.tolist() == images.names.tolist()


def test_a_box_is_a_square_of_its_part_of_the_image_on_white():
    pixels = np.random.default_rng(0).integers(0, 200, (90, 120, 3), np.uint8)
    Image.fromarray(pixels).save("photos/a.png")
    images = captioned_images(boxes("10 50.2 60 140"), None)
    assert images.captions.tolist() == [("a dog",), ("an ear",)]
    assert images.owners.tolist() == [images.names[0]] * 2
    assert images.names[1] == f"{images.names[0]}[10, 50, 60, 140]"
    assert images.labels.tolist() == [0, 0]
    region = np.array(images.image(1, channels=3))
    assert region.shape == (50, 50, 3)
    np.testing.assert_array_equal(region[5:45], pixels[50:90, 10:60])
    assert (region[:5] == 255).all() and (region[45:] == 255).all()
    small = captioned_images(boxes("118,2,119,4"), None).image(1, channels=3)
    np.testing.assert_array_equal(np.array(small), pixels[:32, 88:])
    with pytest.raises(UserError, match=r"its box \[200, 0, 210, 9\] is not in the image"):
        captioned_images(boxes("200,0,210,9"), None).image(1, channels=3)


def test_boxes_of_training_images_are_trained_on():
    names = [f"{i}.png" for i in range(10)]
    write_pictures(pathlib.Path("photos"), names)
    rows = [f"photos/{x},picture {x}," for x in names]
    rows += [f'photos/{x},part of {x},"0,0,5,{5 + i}"' for x in names for i in (0, 1)]
    table = write("t.csv", "\n".join(["path,caption,box", *rows]))
    splits = open_photos(
        table,
        Decoding(),
        HeldOutClasses(test=3, validation=2),
        list_images=functools.partial(captioned_images, captions=None),
    )
    train, others = splits.train, [splits.validation, splits.test]
    assert [len(images) for images in (train, *others)] == [15, 2, 3]
    assert all(images.owners is None for images in others)
    assert (train.owners[:5] == train.names[:5]).all()
    assert {*train.owners} == {*train.names[:5]}
    label_of = dict(zip(train.names, train.labels, strict=True))
    assert train.labels.tolist() == [label_of[owner] for owner in train.owners]
    assert train.sizes[5:].min() >= 10


def test_lines_of_one_class_add_up():
    texts = class_texts(write("classes", "dog\ta dog\ncat\ndog\ta pup\n"), ["dog", "cat"])
    assert texts == {"dog": ["a dog", "a pup"], "cat": ["cat"]}
