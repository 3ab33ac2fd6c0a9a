"""Datasets in Parquet, Arrow and tar files: the same images and classes as in folders."""

import io
import json
import tarfile

import huggingface_hub
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from benchmarks import input
from benchmarks.measure import Options
from hypjax.data import shards, stored_images
from hypjax.data.image_set import open_images
from hypjax.data.photos import list_folder
from hypjax.data.shards import find_shards
from hypjax.errors import UserError
from tests.data.test_photos import open_at
from tests.helpers.fake_hub import serving
from tests.helpers.pictures import encode_png, write_pictures, write_table

SPLIT_NAMES = ["train", "test"]
PICTURE = encode_png(np.zeros((8, 9, 3), np.uint8))


@pytest.fixture
def rows(photos_folder):
    """The images of a folder as rows."""
    return [{"image": p.path.read_bytes(), "label": p.label} for p in list_folder(photos_folder)]


def write_rows(path, rows, features=None, **options):
    """Writes a .parquet or .arrow file, with the types of `datasets` if they are given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = rows if isinstance(rows, pyarrow.Table) else pyarrow.Table.from_pylist(rows)
    if features:
        facts = json.dumps({"info": {"features": features}})
        table = table.replace_schema_metadata({"huggingface": facts})
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, **options)
    else:
        with pyarrow.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    return path


def write_tar(path, samples):
    """Writes a tar file of samples {key: {suffix: content}}."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for key, sample in samples.items():
            for suffix, content in sample.items():
                add_member(archive, f"{key}.{suffix}", content)
    return path


def add_member(archive, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def as_samples(rows):
    return {
        f"{i:03}": {"png": row["image"], "cls": row["label"].encode()} for i, row in enumerate(rows)
    }


def labels_of(where):
    return open_images(str(where)).labels.tolist()


@pytest.mark.parametrize("kind", ["parquet", "arrow", "tar", "shards"])
def test_it_is_the_dataset_of_the_folder_with_these_images(kind, rows, photos_folder, tmp_path):
    path = tmp_path / f"a.{kind}"
    if kind == "shards":
        for i in range(2):
            write_tar(tmp_path / f"a-{i:03}.tar", as_samples(rows[30 * i : 30 * (i + 1)]))
        path = tmp_path / "a-{000..001}.tar"
    elif kind == "tar":
        write_tar(path, as_samples(rows))
    else:
        write_rows(path, rows)
    held_out = {"test_classes": 0.3, "validation_classes": 2, "split_seed": 1}
    expected, found = open_at(photos_folder, **held_out), open_at(path, **held_out)
    for own, part in zip(expected[:3], found[:3], strict=True):
        np.testing.assert_array_equal(own.labels, part.labels)
        np.testing.assert_array_equal(own.sizes, part.sizes)
        assert [own.class_name(i) for i in range(5)] == [part.class_name(i) for i in range(5)]
        for i in range(0, len(own), 5):
            np.testing.assert_array_equal(own.image(i, 3), part.image(i, 3))
    images = open_images(str(path))
    first = "a-000.tar/000" if kind == "shards" else "a.tar/000" if kind == "tar" else f"a.{kind}/0"
    assert images.ids[0] == f"{tmp_path}/{first}" and len(images) == len(rows)
    assert images.labels.tolist() == [row["label"] for row in rows]


def test_it_is_copied_once_until_a_file_changes(rows, tmp_path, monkeypatch, capsys):
    path = write_rows(tmp_path / "a.parquet", rows)
    first = open_at(path, test_classes=0.3)
    assert "into" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(stored_images, "_store", None)
        assert open_at(path, test_classes=0.3).fingerprint == first.fingerprint
    moved = write_rows(tmp_path / "b" / "a.parquet", rows)
    assert open_at(moved, test_classes=0.3).fingerprint == first.fingerprint
    write_rows(path, rows[::-1])
    assert open_at(path, test_classes=0.3).fingerprint != first.fingerprint


def test_an_interrupted_copy_is_begun_again(rows, tmp_path, monkeypatch):
    path = write_rows(tmp_path / "a.parquet", rows)

    def interrupted(self):
        yield from list(read(self))[:3]
        raise KeyboardInterrupt

    read = stored_images.ShardedDataset.rows
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(stored_images.ShardedDataset, "rows", interrupted)
        open_images(str(path))
    assert len(open_images(str(path))) == len(rows)


def test_a_damaged_copy_is_named(rows, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_rows(tmp_path / "a.parquet", rows)
    images = open_images(str(path)).dataset
    (index,) = tmp_path.glob("cache/hypjax/datasets/*/index.parquet")
    (stored,) = tmp_path.glob("cache/hypjax/datasets/*/images.array_record")
    content = bytearray(stored.read_bytes())
    content[content.index(rows[0]["image"]) + 20] ^= 1
    stored.write_bytes(content)
    with pytest.raises(UserError, match=r"cannot read .*a\.parquet/0 \("):
        images.image(0, 3)
    index.write_bytes(index.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"the copy of .* is damaged .*; remove that folder"):
        open_images(str(path))


def test_columns_are_those_that_datasets_declares(tmp_path):
    rows = [
        {"mask": PICTURE, "photo": {"bytes": PICTURE, "path": None}, "kind": 1, "coarse_label": 0},
        {
            "mask": PICTURE,
            "photo": {"bytes": PICTURE, "path": "a.png"},
            "kind": -1,
            "coarse_label": 1,
        },
    ]
    features = {
        "photo": {"_type": "Image"},
        "kind": {"_type": "ClassLabel", "names": ["robin", "wren"]},
        "coarse_label": {"_type": "ClassLabel", "names": ["bird", "unknown"]},
    }
    images = open_images(str(write_rows(tmp_path / "a.arrow", rows, features)))
    assert images.labels.tolist() == ["wren", ""]
    assert images.superlabels.tolist() == ["bird", "unknown"]
    plain = write_rows(tmp_path / "b.parquet", rows)
    with pytest.raises(UserError, match=r"name one of mask, photo by \?image="):
        open_images(f"{plain}?label=kind")
    assert labels_of(f"{plain}?label=kind&image=mask") == ["1", "-1"]
    assert labels_of(f"{plain}?image=photo") == ["", ""]


def write_paths(path, names):
    """Writes a dataset that names its images by their paths."""
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    images = pyarrow.array([{"bytes": None, "path": name} for name in names], kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({"image": images, "label": names}), path)


def test_images_of_a_structure_may_lie_beside_it(tmp_path):
    write_pictures(tmp_path, ["pictures/1.png"])
    write_paths(tmp_path / "a.parquet", ["pictures/1.png"])
    images = open_images(f"{tmp_path / 'a.parquet'}")
    expected = (tmp_path / "pictures/1.png").read_bytes()
    assert images.dataset.records[0]["image"] == expected


@pytest.mark.parametrize("name", ["../secret.png", "link.png", "{root}/secret.png"])
def test_a_dataset_reads_no_file_outside_of_it(name, tmp_path):
    write_pictures(tmp_path, ["secret.png"])
    write_paths(tmp_path / "set/a.parquet", [name.format(root=tmp_path)])
    (tmp_path / "set/link.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(UserError, match=r"a\.parquet names the image .* leads out of the dataset;"):
        open_images(str(tmp_path / "set/a.parquet"))


def test_classes_of_tar_files(tmp_path):
    """They are in .cls, in a field of .json, or in .txt, in this order."""
    described = json.dumps({"label": "wren", "species": 7, "coarse_label": "bird"}).encode()
    cases = {
        "a": {"jpg": PICTURE, "cls": b"robin\n", "json": described, "txt": b"a bird"},
        "b": {"json": described, "left.PNG": PICTURE, "txt": b"a bird"},
        "c": {"png": PICTURE, "txt": b"a bird"},
        "d": {"png": PICTURE},
    }
    for key, label in zip("abcd", ("robin", "wren", "a bird", ""), strict=True):
        path = write_tar(
            tmp_path / f"{key}.tar", {f"deep/{key}": cases[key], "__meta__": {"x": b""}}
        )
        images = open_images(str(path))
        assert images.labels.tolist() == [label] and images.ids[0].endswith(f"{key}.tar/deep/{key}")
    assert labels_of(tmp_path / "{a,b}.tar?label=species") == ["7", "7"]
    assert open_images(str(tmp_path / "b.tar")).superlabels.tolist() == ["bird"]


def test_names_in_tar_files_that_are_not_utf8_stay_different(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", encoding="latin-1", format=tarfile.GNU_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("README"))
        for name, label in (("café", b'"\\ud800"'), ("cafè", b'"b"')):
            add_member(archive, f"{name}.png", PICTURE)
            add_member(archive, f"{name}.json", b'{"label": %s}' % label)
    images = open_images(str(path))
    assert images.labels.tolist() == ["\\ud800", "b"]
    assert [name.rpartition("/")[2] for name in images.ids] == ["caf\\udce9", "caf\\udce8"]


def test_members_of_tar_files_are_bounded(tmp_path, monkeypatch):
    """Those that matter; others may be of any size."""
    monkeypatch.setattr(shards, "LARGEST_FILE", 200)
    assert len(PICTURE) < 100
    sample = {"png": PICTURE, "cls": b"a", "mp4": bytes(300)}
    path = write_tar(tmp_path / "a.tar", {"1": sample, "2": sample})
    assert labels_of(path) == ["a", "a"]
    for extra in ({"txt": bytes(300)}, {"jpg": bytes(150)}):
        write_tar(path, {"1": sample | extra})
        with pytest.raises(UserError, match=r"a\.tar: 1\.(txt|jpg) is larger than 200 bytes"):
            open_images(str(path))
    write_tar(path, {"1": {"png": PICTURE, "PNG": PICTURE}})
    with pytest.raises(UserError, match=r"a\.tar: 1\.PNG comes twice in a sample"):
        open_images(str(path))
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("1.png")
        member.pax_headers = {"GNU.sparse.map": "0,1", "GNU.sparse.size": "150"}
        archive.addfile(member)
    with pytest.raises(UserError, match=r"a\.tar: 1\.png is a sparse file; write it in full"):
        open_images(str(path))
    rows = write_rows(tmp_path / "a.parquet", [{"image": bytes(300), "label": "a"}])
    with pytest.raises(UserError, match=r"a\.parquet/0 is larger than 200 bytes"):
        open_images(str(rows))


@pytest.mark.parametrize("kind", ["large_binary", "binary_view", "dictionary"])
def test_columns_of_images_have_any_type_of_bytes(kind, tmp_path):
    images = pyarrow.array([PICTURE, PICTURE])
    is_dictionary = kind == "dictionary"
    images = images.dictionary_encode() if is_dictionary else images.cast(getattr(pyarrow, kind)())
    table = pyarrow.table({"image": images, "label": [1.0, None]})
    features = {"label": {"_type": "ClassLabel", "names": ["robin", "wren"]}}
    assert labels_of(write_rows(tmp_path / "a.parquet", table, features)) == ["wren", ""]
    path = write_rows(tmp_path / "b.parquet", [{"image": PICTURE, "label": 2}], features)
    with pytest.raises(UserError, match="label is 2 in a row, but names only 2 classes"):
        open_images(str(path))


def test_files_of_splits_are_splits(rows, tmp_path, capsys):
    """Unless one alone, or several as one, are named: then classes are held out."""
    parts = {"train": rows[:36], "val": rows[36:48], "test": rows[48:]}
    for name, part in parts.items():
        write_rows(tmp_path / f"data/{name}-00000-of-00001.parquet", part)
    splits = open_at(tmp_path, test_classes=0.3)
    assert [len(part) for part in splits[:3]] == [36, 12, 12]
    images = open_images(str(tmp_path))
    assert np.unique(images.splits).tolist() == ["test", "train", "validation"]
    one = open_images(f"{tmp_path}?split=val")
    assert len(one) == 12 and one.splits is None
    splits = open_at(f"{tmp_path}?split=train+test", test_classes=0.5, validation_classes=0)
    assert len(splits.train) + len(splits.test) == 48 and splits.test.num_classes == 4
    with pytest.raises(UserError, match="no split dev2; the splits are test, train, validation"):
        open_images(f"{tmp_path}?split=dev2")


def test_a_column_tells_splits_too(rows, tmp_path):
    rows = [row | {"split": "query" if i % 2 else "val"} for i, row in enumerate(rows)]
    path = write_rows(tmp_path / "a.parquet", rows)
    assert open_images(str(path)).splits.tolist() == 30 * ["validation", "query"]
    assert len(open_images(f"{path}?split=query")) == 30
    write_rows(path, [row | {"split": f"s{i % 2}"} for i, row in enumerate(rows)])
    with pytest.raises(UserError, match=r"a split s0; name splits by \?split="):
        open_images(str(path))


@pytest.mark.parametrize("kind", ["large_string", "string_view", "dictionary", "ClassLabel"])
def test_a_column_of_splits_has_any_type_of_names(kind, rows, tmp_path):
    values = pyarrow.array(["train", "test"] * 30)
    features = None
    if kind == "dictionary":
        values = values.dictionary_encode()
    elif kind == "ClassLabel":
        values = pyarrow.array([0, 1] * 30)
        features = {"image": {"_type": "Image"}, "split": {"_type": kind, "names": SPLIT_NAMES}}
    else:
        values = values.cast(getattr(pyarrow, kind)())
    table = pyarrow.Table.from_pylist(rows).append_column("split", values)
    path = write_rows(tmp_path / "a.parquet", table, features)
    assert open_images(str(path)).splits.tolist() == ["train", "test"] * 30


def test_numbers_are_classes_by_their_values(tmp_path):
    """Whole ones by one name, of whatever type, and none is rounded."""
    numbers = [1234567.0, 1234568.0, None, 3.0, 0.5]
    path = write_rows(tmp_path / "a.parquet", [{"image": PICTURE, "label": n} for n in numbers])
    assert labels_of(path) == ["1234567", "1234568", "", "3", "0.5"]
    samples = {
        f"{i}": {"png": PICTURE, "json": b'{"label": %s}' % label}
        for i, label in enumerate((b"1", b"1.0", b'"1"'))
    }
    assert labels_of(write_tar(tmp_path / "a.tar", samples)) == ["1", "1", "1"]


@pytest.mark.parametrize("folder", ["set[1]", "a{x,y}", "a?split=b", "a*"])
def test_what_exists_is_no_pattern_and_has_no_options(folder, rows, tmp_path):
    path = write_rows(tmp_path / folder / "b.parquet", rows)
    assert len(open_images(str(path))) == len(open_images(str(path.parent))) == len(rows)
    assert len(open_images(f"{path}?label=label")) == len(rows)
    pictures = tmp_path / f"{folder}-of-pictures?label=x"
    write_pictures(pictures, ["a/1.png"])
    assert find_shards(str(pictures)) is None


def test_folders_of_images_and_tables_stay_what_they_are(rows, photos_folder, tmp_path):
    write_pictures(tmp_path, ["photos/a/1.png", "photos/b/1.png"])
    write_tar(tmp_path / "photos/all.tar", as_samples(rows))
    assert find_shards(str(tmp_path / "photos")) is None
    table = [{"path": str(p.path), "label": p.label} for p in list_folder(photos_folder)]
    path = write_table(tmp_path / "a.parquet", [row | {"image": b"thumbnail"} for row in table])
    assert find_shards(str(path)) is None and len(open_images(str(path))) == 60


MISTAKES = {
    "no column of images": (
        [{"text": "a", "label": "b"}],
        "/*.parquet",
        r"has no column of images; its columns are text, label",
    ),
    "a column that is not there": (
        [{"image": PICTURE, "label": "b"}],
        "?label=species",
        r"has the columns image, label, and no species \(\?label=species\)",
    ),
    "no label": ([{"image": PICTURE}], "", r"a.parquet/0 has no label; name .* by \?label="),
    "two labels": (
        [{"image": PICTURE, "label": 1, "fine_label": 2}],
        "",
        r"name one of label, fine_label by \?label=",
    ),
    "many labels": (
        [{"image": PICTURE, "label": [1, 2]}],
        "",
        r"label is list<.*>; classes are names or whole numbers",
    ),
    "a picture that is none": (
        [{"image": PICTURE, "label": "a"}, {"image": b"GIF", "label": "b"}],
        "",
        r"cannot read 1 of 2 images: .*a.parquet/1 \(.*\); fix or remove",
    ),
    "a split where there are none": (
        [{"image": PICTURE, "label": "a"}],
        "?split=train",
        "there is no split train; the splits are not known",
    ),
    "an unknown option": (
        [{"image": PICTURE, "label": "a"}],
        "?lable=a",
        "has no option lable; the options are image, label",
    ),
    "a label in two groups": (
        [{"image": PICTURE, "label": "a", "superlabel": group} for group in "xy"],
        "",
        "a.parquet/1: label a has the superlabel y here, but x before",
    ),
    "no rows": (
        pyarrow.table({"image": pyarrow.array([], pyarrow.binary()), "label": []}),
        "",
        "has no images",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_tables_are_one_sentence(mistake, tmp_path):
    rows, suffix, message = MISTAKES[mistake]
    path = tmp_path / "a.parquet"
    write_rows(path, rows)
    where = str(tmp_path) + suffix if suffix.startswith("/") else str(path) + suffix
    with pytest.raises(UserError, match=message):
        open_at(where)


def test_damaged_files_are_named(rows, tmp_path):
    tar = write_tar(tmp_path / "a.tar", as_samples(rows))
    whole = tar.read_bytes()
    with tarfile.open(tar) as archive:
        members = archive.getmembers()
    middle = members[40].offset_data
    for end in (middle + 100, middle - 100, members[40].offset, members[41].offset + 10, 100):
        tar.write_bytes(whole[:end])
        with pytest.raises(UserError, match=r"a\.tar (is cut off after|\(.*\); fetch it again)"):
            open_images(str(tar))
    write_tar(tar, {"1": {"txt": b"a", "json": b"{}"}})
    with pytest.raises(UserError, match=r"a.tar/1 has no image; its members are txt, json"):
        open_images(str(tar))
    arrow = write_rows(tmp_path / "a.arrow", rows)
    arrow.write_bytes(arrow.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"cannot read .*a\.arrow \(.*\); fetch it again"):
        open_images(str(arrow))
    with pytest.raises(UserError, match=r"there is no file .*a-001\.tar"):
        open_images(str(tmp_path / "a-{001..003}.tar"))
    with pytest.raises(UserError, match="is no dataset of Parquet, Arrow or tar files; leave out"):
        open_images(f"{tmp_path}/photos?label=a")


CARD = """---
configs:
- config_name: small
  data_files:
  - split: train
    path: parts/a-*
  - split: test
    path: [parts/b-0.parquet]
- config_name: other
  data_files: parts/b-*
---
"""


def test_a_picture_beside_the_files_that_a_card_lists_hides_nothing(rows, tmp_path):
    clone = tmp_path / "clone"
    write_rows(clone / "data/train-0.parquet", rows)
    write_pictures(clone, ["assets/banner.png"])
    assert find_shards(str(clone)) is None
    card = "---\nconfigs:\n- config_name: all\n  data_files: {}\n---\n"
    (clone / "README.md").write_text(card.format("data/**/*.parquet"))
    assert len(open_images(str(clone))) == len(rows)
    (clone / "README.md").write_text(card.format('"**"'))  # As of a folder of images.
    assert find_shards(str(clone)) is None
    (clone / "README.md").unlink()
    with serving(tmp_path / "hub") as hub:
        hub.put("datasets/me/birds", clone)
        huggingface_hub.snapshot_download("me/birds", repo_type="dataset")
        assert len(open_images("hf://me/birds")) == len(rows)


def test_a_folder_of_links_to_classes_is_one_of_images(rows, photos_folder, tmp_path):
    for name in ("class0", "class1"):
        (tmp_path / name).symlink_to(photos_folder / name)
    write_rows(tmp_path / "meta.parquet", rows)
    assert find_shards(str(tmp_path)) is None


@pytest.mark.parametrize("files", ["[1, {a: 2}]", "[{path: 1}]", "{train: a.parquet}"])
def test_a_card_that_cannot_be_understood_is_named(files, rows, tmp_path):
    write_rows(tmp_path / "a.parquet", rows)
    (tmp_path / "README.md").write_text("---\nconfigs: []\n---\n")
    assert len(open_images(str(tmp_path))) == len(rows)
    card = f"---\nconfigs:\n- config_name: all\n  data_files: {files}\n---\n"
    (tmp_path / "README.md").write_text(card)
    with pytest.raises(UserError, match=r"README\.md lists the data_files of all in a form that"):
        open_images(str(tmp_path))


def test_the_benchmark_of_input_reads_files_of_images(rows, tmp_path):
    path = write_rows(tmp_path / "a.parquet", rows)
    with pytest.raises(UserError, match="a.parquet holds no files of single images"):
        next(input.tasks(Options(quick=True, images=str(path))))


def test_a_repository_is_downloaded_once(rows, tmp_path):
    repository = tmp_path / "hub/me/birds"
    write_rows(repository / "parts/a-0.parquet", rows[:30])
    write_rows(repository / "parts/b-0.parquet", rows[30:])
    write_pictures(repository, ["teaser.png"])
    with serving(tmp_path / "cache") as hub:
        hub.put("datasets/me/birds", repository)
        images = open_images("hf://me/birds")
        assert images.labels.tolist() == [row["label"] for row in rows] and images.splits is None
        assert images.ids[0] == "hf://me/birds/parts/a-0.parquet/0"
        assert images.dataset.records[0]["image"] == rows[0]["image"]
        (repository / "README.md").write_text(CARD)
        hub.put("datasets/me/birds", repository)
        with pytest.raises(UserError, match=r"has the subsets small, other; name one by \?subset="):
            open_images("hf://me/birds")
        splits = open_images("hf://me/birds?subset=small").splits
        assert splits.tolist() == 30 * ["train"] + 30 * ["test"]
        assert len(open_images("hf://me/birds?subset=other")) == 30
        with pytest.raises(UserError, match="there is no repository me/bees on the hub that you"):
            open_images("hf://me/bees")
        write_paths(tmp_path / "paths/a.parquet", ["a.parquet"])
        hub.put("datasets/me/paths", tmp_path / "paths")
        with pytest.raises(UserError, match="names the image a.parquet by a path that leads out"):
            open_images("hf://me/paths")
        (tmp_path / "empty").mkdir()
        hub.put("datasets/me/empty", tmp_path / "empty")
        with pytest.raises(UserError, match="no Parquet, Arrow or tar files; the hub may have"):
            open_images("hf://me/empty")
        with pytest.raises(UserError, match="names no repository; write hf://OWNER/NAME"):
            open_images("hf://birds")
        write_rows(tmp_path / "two/x/train-0.parquet", rows[:20])
        write_rows(tmp_path / "two/y/train-0.parquet", rows[20:])
        hub.put("datasets/me/two", tmp_path / "two")
        with pytest.raises(UserError, match=r"the folders x, y, and no card .*\?subset="):
            open_images("hf://me/two")
        assert len(open_images("hf://me/two?subset=x")) == 20
        assert len(open_images("hf://me/two?subset=*")) == len(rows)
        hub.close()
        assert len(open_images("hf://me/birds?subset=other")) == 30
        with pytest.raises(UserError, match="not in this machine's cache, and the hub cannot be"):
            open_images("hf://me/birds@v2")
