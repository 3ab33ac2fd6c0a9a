"""Tables of images: their cells, names of classes and splits, and what is refused."""

import decimal
import pathlib
import re
import unicodedata

import numpy as np
import pytest
from PIL import Image

from hypjax.data.dataset import stacked
from hypjax.data.photos import find_images, given_images, labelled_images
from hypjax.errors import UserError
from hypjax.galleries.embeddings import read_features
from hypjax.galleries.feature_files import feature_table
from hypjax.types import class_name, coarse_levels, split_name, split_names
from tests.helpers.pictures import write_pictures, write_table

PIXELS = [Image.new("RGB", (4, 4))] * 3


def read(path, text):
    path.write_text(text)
    images = find_images(str(path))
    return [pathlib.Path(name).name for name in images.names], images


@pytest.mark.parametrize(
    ("text", "expected"),
    [  # Classes of a.jpg and b.jpg, or a part of the error.
        ("Path,LABEL\na.jpg,x\nb.jpg,y\n", ["x", "y"]),
        ("label;path\nBoeing 737, red;a.jpg\ny;b.jpg\n", ["Boeing 737, red", "y"]),
        ("path\tlabel\na.jpg\tx,y\n\nb.jpg\ty\n", ["x,y", "y"]),
        ('path, label\na.jpg, "x, y"\nb.jpg, 5" disk\n', ["x, y", '5" disk']),
        ("path,label\na.jpg,3\nb.jpg,3.0\n", ["3", "3"]),
        ("path,label\na.jpg,007\nb.jpg,v3.0\n", ["007", "v3.0"]),
        ("\ufeffFilePath,Class\r\na.jpg,x\r\nb.jpg,y\r\n", ["x", "y"]),
        ("id|file_name|Category\n0|a.jpg|x\n1|b.jpg|y\n", ["x", "y"]),
        ('"","img","y","label"\n"0","a.jpg","3","x"\n"1","b.jpg","4","y"\n', ["x", "y"]),
        ("a.jpg,x\nb.jpg,y\n", ["x", "y"]),  # Without a header.
        ("x,a.jpg\ny,b.jpg\n", "row 1 needs a path and a label"),
        ("a.jpg,x,train\n", "line 1 has more than a path and a label; add a first line"),
        ("path,x,y,kind,txt\na.jpg,7,9,x,a bird\n", "no column label"),  # A box and a caption.
        ("image,filename,label\n", "columns image and filename; name its path by .path=COLUMN"),
        ("path,kind\na.jpg,x\n", "no column label; name it by .label=COLUMN, .* path, kind"),
        ("path,label\na.jpg,x\nb.jpg,Boeing 737, red\n", "2 columns, and row 2 has 3"),
        ("path,label,split\na.jpg,x\n", "row 1 has 2"),
        ("path;label\na.jpg;x;y\n", "row 1 .* contain ';'"),
        ('path,label\na.jpg,"TV 55\nb.jpg,TV 27"\n', "row 1 needs .* without line breaks.*; mend"),
        ('path,label\na.jpg,"TV 55\nb.jpg,y\n', "line 3: .*double quotes"),
        ("path,Label,label\na.jpg,x,y\n", "two columns label"),
        ("", "no column path"),
        ("path,label\n", "no rows"),
        ("path,label,split\na.jpg,a,train\nb.jpg,a,\n", "row 2"),
        ("path,label\na.jpg,x\nb.jpg,\n", "row 2 needs a path and a label"),
        ("path,label,coarse_label\na.jpg,x,z\nb.jpg,y,\n", "row 2 has no coarse label"),
        ("path,label\na.jpg,x\na.jpg,x\n", "row 2: a.jpg is already in row 1"),
        ("path,label\na.jpg,x\nb/../a.jpg,x\n", "row 2: b/../a.jpg is already in row 1"),
        ("path,label,split\na.jpg,x,test\nb.jpg,x,eval\n", "test and eval are both .* split test"),
        ("path,label,is_query\na.jpg,x,perhaps\n", "perhaps"),
        ("path,label,split,is_query\na.jpg,x,train,True\n", "row 1 is a query .* train"),
    ],
)
def test_cells_of_tables(tmp_path, text, expected):
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            read(tmp_path / "t.csv", text)
    else:
        names, images = read(tmp_path / "t.csv", text)
        assert names == ["a.jpg", "b.jpg"] and images.class_names.tolist() == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [  # Names and classes of the images, or a part of the error.
        ("a.jpg\n\nb c.jpg\n", {"a.jpg": "", "b c.jpg": ""}),
        ("a.jpg 0\nb c.jpg 007\n", {"a.jpg": "0", "b c.jpg": "007"}),
        ("a.jpg\tgreat tit\r\nb c.jpg  wren \r\n", {"a.jpg": "great tit", "b c.jpg": "wren"}),
        ('a.jpg,x\n"b, c.jpg","y z"\n', {"a.jpg": "x", "b, c.jpg": "y z"}),
        ("a 0\nb c 1\n", {"a": "0", "b c": "1"}),  # Without the suffix of an image.
        ("image_id class_id path\n1 5 a.jpg\n2 6 b.jpg\n", {"a.jpg": "5", "b.jpg": "6"}),
        ("filename\tlabel\na.jpg\tx\n", {"a.jpg": "x"}),
        ("s3://bucket/a.jpg 0\n", "row 1: s3://bucket/a.jpg is a URL; download"),
    ],
)
def test_lists_of_paths_and_of_labels(tmp_path, text, expected):
    path = tmp_path / "train.txt"
    path.write_bytes(text.encode("utf-8-sig"))
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            find_images(str(path))
    else:
        images = find_images(str(path))
        names = [str(tmp_path / name) for name in expected]
        assert images.names.tolist() == names
        assert images.class_names.tolist() == [*expected.values()]


def test_options_name_the_columns_of_tables(tmp_path):
    rows = [{"file": "a.jpg", "label": "x", "Species": "robin", "family": "chat"}]
    for table in (write_table(tmp_path / name, rows) for name in ("t.csv", "t.parquet")):
        images = find_images(f"{table}?path=file&label=species&coarse_label=family")
        assert images.names.tolist() == [str(tmp_path / "a.jpg")]
        assert images.class_names.tolist() == ["robin"]
        assert images.coarse_labels.tolist() == ["chat"]
        for option, message in (
            ("label=genus", "no column genus; its columns are file, label, species, family"),
            ("lable=species", "lable is none of the options path"),
            ("split=train", "split is none of the options path, label, coarse_label"),
        ):
            with pytest.raises(UserError, match=message):
                find_images(f"{table}?{option}")


@pytest.mark.parametrize(
    ("path", "expected"),
    [  # The file below the table's folder, or a part of the error.
        (r"sub\a b.jpg", "sub/a b.jpg"),
        ("sub/a b.jpg ", "sub/a b.jpg"),
        ("~/a b.jpg", "sub/a b.jpg"),
        ("file://FOLDER/sub/a%20b.jpg", "sub/a b.jpg"),
        (r"odd\name.jpg", r"odd\name.jpg"),
        (r"missing\a.jpg", "missing/a.jpg"),
        (r"C:\photos\a.jpg", "row 1: C:.photos.a.jpg is a path on Windows; write it relative to"),
        ("https://host/a.jpg", "row 1: https://host/a.jpg is a URL; download the images"),
    ],
)
def test_paths_in_tables_may_be_of_other_programs(tmp_path, monkeypatch, path, expected):
    write_pictures(tmp_path, ["sub/a b.jpg", r"odd\name.jpg"])
    monkeypatch.setenv("HOME", str(tmp_path / "sub"))
    rows = [{"path": path.replace("FOLDER", str(tmp_path)), "label": "x"}]
    table = write_table(tmp_path / "t.csv", rows)
    if expected.startswith("row"):
        with pytest.raises(UserError, match=expected):
            find_images(str(table))
    else:
        assert find_images(str(table)).names.tolist() == [str(tmp_path / expected)]


def test_links_and_repeated_paths_are_images_of_their_own(tmp_path):
    write_pictures(tmp_path, ["a.png"])
    (tmp_path / "b.png").symlink_to(tmp_path / "a.png")
    rows = "path,label,split\na.png,x,query\na.png,x,gallery\na.png,y,gallery\nb.png,x,query\n"
    _, images = read(tmp_path / "t.csv", rows)
    assert images.names.tolist() == [str(tmp_path / f"{name}.png") for name in "aaab"]
    assert images.splits.tolist() == ["query", "gallery", "gallery", "query"]


@pytest.mark.parametrize(
    ("roles", "splits"),
    [  # Of training image a and of b, c.
        (("True,True", "1,1.0"), {"a": ["train"], "b": ["test"], "c": ["test"]}),
        (("True,False", "False,True"), {"a": ["train"], "b": ["query"], "c": ["gallery"]}),
        (("True,True", ",True"), {"a": ["train"], "b": ["query", "gallery"], "c": ["gallery"]}),
    ],
)
def test_columns_of_open_metric_learning(tmp_path, capsys, roles, splits):
    text = "label,path,split,is_query,is_gallery\n1,a,train,,\n"
    text += "".join(f"2,{name},validation,{role}\n" for name, role in zip("bc", roles, strict=True))
    names, images = read(tmp_path / "t.csv", text)
    expected = [(name, split) for name, chosen in splits.items() for split in chosen]
    assert [*zip(names, images.splits, strict=True)] == expected
    assert not capsys.readouterr().err
    without = re.sub(r",(train|split|validation)\b", "", text).replace(",", "\t")
    names, images = read(tmp_path / "t.tsv", without)
    assert [*zip(names, images.splits, strict=True)] == expected
    read(tmp_path / "t.csv", "path,label,x_1,x_2,y_1,y_2\na,1,,,,\nb,1,0,9,0,9\n")
    assert "boxes (x_1, y_1, x_2, y_2), which are not used" in capsys.readouterr().err


def test_names_of_classes_and_splits():
    for names, labels in {
        "3": (3, 3.0, "3", "3.0", " 3 ", np.float32(3), np.int64(3), b"3", decimal.Decimal("3.0")),
        "1" + 16 * "0": (1e16, 10**16),
        "": (None, float("nan"), np.float32("nan"), np.datetime64("NaT"), "", np.ma.masked),
        "0.5": ("0.5", b"0.5"),
        "True": (True, np.True_),
        "-1": (-1, -1.0, "-1"),
        "nan": ("nan",),
    }.items():
        assert {class_name(label) for label in labels} == {names}
    for split, names in {
        "train": ("train", "Training", "TRAIN", "training_set", "train-images"),
        "validation": ("val", "Valid", "validation", "dev"),
        "test": ("Test", "testing", "eval", "TestSet"),
        "query": ("Query", "queries"),
        "holdout": ("holdout",),
        "": ("", None, float("nan")),
    }.items():
        assert {split_name(name) for name in names} == {split}
    assert split_names(["Train", "train", "val"]) == ["train", "train", "validation"]


def test_a_class_in_two_unicode_forms_is_one_as_it_was_first_written(tmp_path, capsys):
    composed, decomposed = (unicodedata.normalize(form, "Café") for form in ("NFC", "NFD"))
    names = [decomposed, composed, decomposed, "cafe"]
    write_pictures(tmp_path / "photos", [f"{name}/{i}.png" for i, name in enumerate(names)])
    write_pictures(tmp_path / "splits/train", [f"{composed}/1.png", "Crème/2.png"])
    write_pictures(tmp_path / "splits/test", [f"{decomposed}/1.png", "crème/3.png"])
    rows = [{"path": f"{i}", "label": x, "coarse_label": x} for i, x in enumerate(names)]
    arrays = {"features": np.eye(4), "labels": names}
    np.savez(tmp_path / "f.npz", **arrays)
    tables = [
        find_images(str(write_table(tmp_path / "t.csv", rows))),
        find_images(str(tmp_path / "f.npz")),
        labelled_images((PIXELS[:1] * 4, names)),
        stacked([labelled_images((PIXELS[:2], x)) for x in (names[:2], names[2:])]),
    ]
    for table in tables:
        assert table.class_names.tolist() == [decomposed] * 3 + ["cafe"]
        assert len(set(table.labels[:3])) == 1 and table.num_classes == 2
    assert tables[0].coarse_labels.tolist() == [decomposed] * 3 + ["cafe"]
    assert feature_table(arrays, "x").labels.tolist() == [decomposed] * 3 + ["cafe"]
    assert coarse_levels([f"{x}/{i}" for i, x in enumerate(names)])[1].tolist()[1] == decomposed
    photos = find_images(str(tmp_path / "photos"))
    assert {*photos.class_names} == {"cafe", min(names[:2])} and photos.num_classes == 2
    assert "case" not in capsys.readouterr().err
    assert {*find_images(str(tmp_path / "splits")).class_names[:2]} == {"crème", decomposed}
    note = "classes that differ only in case: 1, such as Crème and crème"
    assert note in capsys.readouterr().err


@pytest.mark.parametrize(
    "label", [0.5, np.float32(2.5), float("inf"), ["a"], ("a", "b"), {}, np.array([3]), b"caf\xe9"]
)
def test_labels_that_name_no_class_are_refused_with_their_row(tmp_path, label):
    labels = np.array(["a", None, "b"], object)
    labels[1] = label
    with pytest.raises(UserError, match="label of image 1: .* neither a name nor a whole number"):
        labelled_images((PIXELS, labels))
    with pytest.raises(UserError, match="labels of x, row 1: "):
        feature_table({"features": np.eye(3), "labels": labels}, "x")
    if not isinstance(label, dict | np.ndarray | np.float32):
        rows = [{"path": name, "label": label} for name in "ab"]
        with pytest.raises(UserError, match="t.parquet, row 1: "):
            find_images(str(write_table(tmp_path / "t.parquet", rows)))


@pytest.mark.parametrize("missing", [None, float("nan"), "", np.ma.masked])
def test_missing_labels_are_no_class(tmp_path, missing):
    with pytest.raises(UserError, match="1 of the 3 images have no label, such as image 1"):
        labelled_images({"Training": (PIXELS, ["a", missing, "b"])})
    labels = np.array(["a", None, "b"], object)
    labels[1] = missing
    table = feature_table({"features": np.eye(3), "labels": labels}, "x")
    assert table.labels.tolist() == ["a", "", "b"]
    rows = [{"path": "a", "label": 1.0}, {"path": "b", "label": None}]
    with pytest.raises(UserError, match="row 2 needs"):
        find_images(str(write_table(tmp_path / "t.parquet", rows)))


def test_classes_of_datasets_have_names_in_tables(tmp_path):
    datasets = pytest.importorskip("datasets", reason="needs datasets")
    path = tmp_path / "t.parquet"
    columns = {"path": ["a", "b"], "label": [1, -1], "features": [[1.0, 2.0], [3.0, 4.0]]}
    made = datasets.Dataset.from_dict(columns)
    made = made.cast_column("label", datasets.ClassLabel(names=["robin", "wren"]))
    made.to_parquet(path)
    assert read_features(path).labels.tolist() == ["wren", ""]
    made.remove_columns("features").to_parquet(path)
    with pytest.raises(UserError, match="row 2 needs"):
        find_images(str(path))


def test_an_image_with_two_labels_is_counted(tmp_path, capsys):
    read(tmp_path / "t.csv", "path,label\na.jpg,x\nb.jpg,y\na.jpg,y\n")
    assert "has 1 image with several labels, such as " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "expected"),
    [  # Splits of the files in alphabetical order, None for classes, or a part of the error.
        ("Test/b/2 Train/a/1", ["test", "train"]),
        ("Training/a/1 val/c/3 valid/b/2", "val and valid are both names of the split validation"),
        ("eval/c/3 test/b/2 train/a/1", "eval and test are both names of the split test"),
        ("Test/2 Training/1", ["test", "train"]),
        ("a/1 train/1", None),
        ("a/1 gallery/x/1", "has a beside folders of splits"),
        ("Test/b/2 Train/a/1 holdout/c/3", r"holdout beside folders of splits \(train, validation"),
    ],
)
def test_folders_with_names_of_splits(tmp_path, names, expected):
    write_pictures(tmp_path, [f"{name}.png" for name in names.split()])
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            find_images(str(tmp_path))
        return
    images = find_images(str(tmp_path))
    classes = ["".join(name.split("/")[expected is not None : -1]) for name in names.split()]
    assert images.class_names.tolist() == classes
    assert (None if images.splits is None else images.splits.tolist()) == expected


def test_arrays_of_paths_are_paths_and_splits_of_dictionaries_have_usual_names(tmp_path):
    paths = [str(write_pictures(tmp_path, ["1.png", "2.png"]) / f"{i}.png") for i in (1, 2)]
    for images in (np.array(paths), np.array([paths]), np.array(paths, object)):
        assert given_images(images).names.tolist() == paths
    assert given_images(np.array(paths)[0]).names.tolist() == paths[:1]
    images = labelled_images({"Training": (PIXELS, "aab"), "val": (PIXELS, "ccd")})
    assert images.splits.tolist() == ["train"] * 3 + ["validation"] * 3
