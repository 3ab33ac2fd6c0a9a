"""Datasets that `datasets` reads, and galleries that it reads."""

import pickle
import re

import numpy as np
import pytest
from PIL import Image

import hypjax
from hypjax.assemble import choose_dataset, open_splits
from hypjax.data.captions import captioned_images, captioned_pairs
from hypjax.data.opening import measured
from hypjax.data.photos import find_images, labelled_images, list_folder
from hypjax.errors import UserError
from hypjax.galleries.embeddings import Embeddings, find_export
from hypjax.geometry import Lorentz, PoincareBall, Sphere
from hypjax.retrieval.neighbors import search
from tests.data.test_photos import open_at
from tests.helpers import commands, small_runs
from tests.helpers.fake_hub import serving
from tests.helpers.galleries import clusters, embeddings

datasets = pytest.importorskip("datasets", reason="needs datasets")

BALL = PoincareBall(0.1, 2.3)
CARD = """---
configs:
- {config_name: default, data_files: [{split: train, path: data/train-*}]}
- config_name: small
  data_files: [{split: train, path: data/train-00000*}, {split: test, path: data/train-00001*}]
---
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))


@pytest.fixture(scope="module")
def written(photos_folder, tmp_path_factory):
    """Writes the images of the folder in each way; returns the locations."""
    root = tmp_path_factory.mktemp("written")
    dataset = datasets.load_dataset("imagefolder", data_dir=str(photos_folder), split="train")
    halves = {"train": dataset.select(range(30)), "val": dataset.select(range(30, 60))}
    datasets.DatasetDict(halves).save_to_disk(str(root / "saved splits"))
    # What was saved holds the images themselves.
    stored = datasets.concatenate_datasets(
        [*datasets.load_from_disk(f"{root}/saved splits").values()]
    )
    stored.to_parquet(str(root / "photos.parquet"), batch_size=7)
    wds = pytest.importorskip("webdataset", reason="needs webdataset")
    with wds.ShardWriter(str(root / "photos-%03d.tar"), maxcount=25, verbose=0) as writer:
        photos = list_folder(photos_folder)
        for i in range(len(photos)):
            content = {"png": photos.content(i), "json": {"label": photos.class_name(i)}}
            writer.write({"__key__": f"{i:04}", **content})
    repository = root / "hub/me/photos"
    (repository / "data").mkdir(parents=True)
    (repository / "README.md").write_text(CARD)
    for i in range(2):
        shard = stored.shard(2, i, contiguous=True)
        shard.to_parquet(f"{repository}/data/train-0000{i}-of-00002.parquet")
    with serving(root / "cache") as hub, pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_ENDPOINT", hub.address)
        hub.put("datasets/me/photos", repository)
        yield {
            "saved splits": root / "saved splits?split=train+val",
            "parquet": root / "phot*.parquet",
            "hub": "hf://me/photos",
            "webdataset": root / "photos-*.tar",
        }


@pytest.mark.parametrize("kind", ["saved splits", "parquet", "hub", "webdataset"])
def test_it_has_the_images_and_classes_of_the_folder(kind, written, photos_folder):
    held_out = {"test_classes": 0.3, "validation_classes": 2, "split_seed": 1}
    expected, found = open_at(photos_folder, **held_out), open_at(written[kind], **held_out)
    for wanted, part in zip(expected[:3], found[:3], strict=True):
        part = pickle.loads(pickle.dumps(part))  # As worker processes receive it.
        for name in ("labels", "sizes", "class_names"):
            np.testing.assert_array_equal(getattr(wanted, name), getattr(part, name))
        for i in range(len(wanted)):
            np.testing.assert_array_equal(wanted.image(i, 3), part.image(i, 3))
    assert open_at(written[kind], **held_out).fingerprint == found.fingerprint


def test_a_repository_is_trained_on_embedded_and_searched(written, photos_folder, tmp_path):
    run, gallery = tmp_path / "run", tmp_path / "gallery.npz"
    fields = [*small_runs.SMALL, f"data.path={written['hub']}?split=train", "train.total_steps=4"]
    fields = [f"--config.{field}" for field in fields]
    commands.call("main", f"--config={small_runs.CONFIG}", f"--workdir={run}", *fields)
    where = f"--workdir={run}", f"--images={written['hub']}"
    commands.call("embed", *where, f"--output={gallery}")
    model, stored = hypjax.load(run), Embeddings.load(gallery)
    np.testing.assert_array_equal(stored.vectors, model.embed(str(photos_folder)))
    assert stored.labels.tolist() == list_folder(photos_folder).class_names.tolist()
    assert stored.ids[[0, 59]].tolist() == ["hf://me/photos/train/0", "hf://me/photos/train/59"]
    hits = model.search(gallery, written["hub"], k=3)
    assert len(hits) == 60 and all(hit.query not in hit.paths for hit in hits)


def test_subsets_and_splits_of_a_repository(written):
    splits = find_images("hf://me/photos?subset=small").splits
    assert splits.tolist() == 30 * ["train"] + 30 * ["test"]
    images = find_images("hf://me/photos?subset=small&split=test")
    assert images.splits is None and images.names[0] == "hf://me/photos/test/0"
    for where in ("hf://me/photos?split=dev", "hf://me/photos?subset=large", "hf://birds"):
        with pytest.raises(UserError, match=where[-3:]):
            find_images(where)


def test_splits_and_coarse_classes_of_a_dataset_from_python_are_used():
    pictures = [Image.new("RGB", (20, 20), (i, 0, 0)) for i in range(8)]
    columns = {"label": list("aabbccdd"), "coarse_label": list("xxyyzzzz")}
    splits = {"split": ["train"] * 4 + ["test"] * 4}
    made = datasets.Dataset.from_dict({"image": pictures, **columns, **splits})
    config = small_runs.load("unused", "data.validation_classes=0")
    images = choose_dataset(config, made.cast_column("image", datasets.Image()))
    splits = open_splits(config, images)
    assert splits.train.class_names.tolist() == list("aabb")
    assert splits.test.class_names.tolist() == list("ccdd")
    assert splits.train.coarse_labels_of_classes() == ((0, 1),)
    assert splits.test.image(0, 3).getpixel((0, 0)) == (4, 0, 0)


@pytest.fixture
def birds(tmp_path):
    """A function that writes four birds, with further columns, and returns the location."""
    pictures, path = [Image.new("RGB", (9, 8), (i, 0, 0)) for i in range(4)], tmp_path / "b.parquet"

    def write(image="image", features=None, **columns):
        made = datasets.Dataset.from_dict({image: pictures, **columns})
        for name, kind in {image: datasets.Image(), **(features or {})}.items():
            made = made.cast_column(name, kind)
        made.to_parquet(str(path))
        return str(path)

    return write


def test_columns_are_known_by_types_names_and_options(birds):
    kinds = {"kind": datasets.ClassLabel(names=["robin", "wren"])}
    where = birds("photo", kinds, kind=[0, 1, 1, -1], coarse_label=["x", "y", "y", "y"])
    images = find_images(where)
    assert images.class_names.tolist() == ["robin", "wren", "wren", ""]
    assert images.coarse_labels.tolist() == ["x", "y", "y", "y"]
    assert images.image(3, 3).getpixel((0, 0)) == (3, 0, 0)
    where = birds(label=[1.0, None, 2.0, -3.0], split=["train", "test"] * 2, species=list("abab"))
    images = find_images(where)
    assert images.class_names.tolist() == ["1", "", "2", "-3"]
    assert images.splits.tolist() == ["train", "test"] * 2
    assert find_images(f"{where}?label=species").class_names.tolist() == list("abab")
    with pytest.raises(UserError, match="no column genus"):
        open_at(f"{where}?label=genus")
    for labels in ([[1]] * 4, [0.5] * 4, [b"\xff"] * 4):
        with pytest.raises(UserError, match="label of row 0: .* nor a whole number"):
            open_at(birds(label=labels))
    made = datasets.Dataset.from_dict({"label": ["a"]})
    parts = {name: made for name in ("eval", "test")}
    with pytest.raises(UserError, match="eval and test are both names of the split test"):
        labelled_images(datasets.DatasetDict(parts))


@pytest.mark.parametrize("space", [Sphere(), BALL, Lorentz(0.1, 2.3)], ids=str)
def test_a_pushed_gallery_is_a_dataset_with_the_distance(space, tmp_path):
    gallery = embeddings(clusters(space, 300), space)
    folder = tmp_path / "gallery.hf"
    with serving(tmp_path / "cache") as hub:
        where = find_export("hf://me/gallery")(gallery, folder)
        pushed = hub.commits["datasets/me/gallery"][-1].files
        assert hub.private == {"datasets/me/gallery"}
    assert "/datasets/me/gallery/commit/" in where
    assert pushed == {path.name: path.read_bytes() for path in folder.iterdir()}
    program = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[1]
    printed = []
    exec(program.replace('"me/gallery"', repr(str(folder))), {"print": printed.append})
    distances, items = search(gallery.vectors[:1], None, gallery.vectors, k=10, space=space)
    found, names = zip(*map(str.split, printed), strict=True)
    assert list(names) == gallery.ids[items[0]].tolist()
    np.testing.assert_allclose(np.float64(found), distances[0], atol=1e-3)


def test_other_files_on_the_hub_are_kept(tmp_path):
    (tmp_path / "photos.parquet").touch()
    export, gallery = find_export("hf://me/gallery"), embeddings(clusters(BALL, 30), BALL)
    with serving(tmp_path / "cache") as hub:
        hub.put("datasets/me/gallery", tmp_path)
        with pytest.raises(UserError, match="other files"):
            export(gallery, tmp_path / "gallery.hf")


def test_captions_of_datasets_and_tars(photos_folder, tmp_path):
    """From a column, or from .txt and .json files beside images; from Python, too."""
    photos = list_folder(photos_folder).take(np.arange(6))
    contents = [photos.content(i) for i in range(6)]
    texts = [[f"photo {i}", f"image {i}"] for i in range(6)]
    columns = {"image": [{"bytes": x, "path": None} for x in contents], "captions": texts}
    made = datasets.Dataset.from_dict({**columns, "txt": list("aabbcc")})
    made = made.cast_column("image", datasets.Image())
    made.to_parquet(str(tmp_path / "photos.parquet"))
    made.save_to_disk(str(tmp_path / "saved"))
    wds = pytest.importorskip("webdataset", reason="needs webdataset")

    def written(name, samples):
        with wds.TarWriter(str(tmp_path / name)) as writer:
            for i, sample in enumerate(samples):
                writer.write({"__key__": f"{i:04}", **sample})
        return str(tmp_path / name)

    joined = [" => ".join(captions) for captions in texts]
    txt = [{"png": x, "txt": y} for x, y in zip(contents, joined, strict=True)]
    facts = [{"caption": y, "label": "ab"[i % 2]} for i, y in enumerate(texts)]
    json = [{"png": x, "json": y} for x, y in zip(contents, facts, strict=True)]
    for images in (
        captioned_pairs(made),
        *(captioned_images(str(tmp_path / x), None) for x in ("photos.parquet", "saved")),
        captioned_images(written("txt.tar", txt), None),
        captioned_images(written("json.tar", json), None),
    ):
        assert images.captions.tolist() == [*map(tuple, texts)]
        np.testing.assert_array_equal(images.image(5, 3), photos.image(5, 3))
        in_json, in_txt = "json" in images.names[0], "txt" in images.names[0]
        assert images.num_classes == (2 if in_json else 6 if in_txt else 3)
    one = captioned_images(f"{tmp_path}/photos.parquet?caption=txt", None)
    assert one.captions[5] == ("c",)
    for where, sentence in (
        (
            written("few.tar", [*txt[:2], {"png": contents[2]}]),
            "0002 in .*few.tar has no .txt, unlike",
        ),
        (written("a.tar", [*txt[:2], {"txt": "a dog"}]), "0002 in .*a.tar has no .png, unlike"),
        (written("gap.tar", [*txt, {"png": contents[2]}]), "6 has an empty caption; add a text"),
        (f"{tmp_path}/photos.parquet?caption=x", "has no column x"),
    ):
        with pytest.raises(UserError, match=sentence):
            captioned_images(where, None)
    with pytest.raises(
        UserError, match="the dataset has no column caption; rename one of kind, or"
    ):
        captioned_pairs(made.remove_columns("captions").rename_column("txt", "kind"))
    alone = captioned_images(written("alone.tar", [*txt, {"txt": "a dog"}]), None)
    with pytest.raises(UserError, match="train/6 .its row has no image.; fix them"):
        measured(alone)
