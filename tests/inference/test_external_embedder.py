"""Encoders of other libraries embed, resume, search and are scored; here a few lines stand for one.

tests/integrations/test_other_encoders.py compares features with those of the libraries themselves.
"""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from hypjax.data import fetching, opening
from hypjax.data.photos import find_images
from hypjax.data.splits import Splits
from hypjax.errors import UserError
from hypjax.experiment.scoring import task_of
from hypjax.galleries.embeddings import Embeddings
from hypjax.geometry import Sphere
from hypjax.inference import image_embedder
from hypjax.inference.image_embedder import ExternalEmbedder, open_encoder
from hypjax.inference.model import load
from hypjax.models import architectures, create_encoder
from hypjax.models.architectures import encoder_shapes
from hypjax.models.pretrained import timm_state_dict
from hypjax.retrieval import relevance_at, relevance_scores
from hypjax.types import GroundTruth
from tests.helpers import commands
from tests.helpers.pictures import write_squares


class Thumbnails:
    """An encoder: the pixels of an image at 4×4."""

    output = "thumbnail"
    facts = ["thumbnail"]

    def prepare(self, image):
        return np.asarray(image.resize((4, 4)), np.float32).reshape(-1)

    def features(self, prepared):
        return np.stack(prepared) - 100


@pytest.fixture
def embedder():
    return ExternalEmbedder("own:thumbnail", Thumbnails(), batch_size=16)


@pytest.fixture
def execute(photos_folder, tmp_path, monkeypatch):
    """Calls commands with --encoder, in a folder with photos, one of which is broken."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(photos_folder, "photos")
    (tmp_path / "photos/class1/broken.jpg").write_text("no image")

    def opened(spec, space=None, batch_size=None, **pixels):
        return ExternalEmbedder(spec, Thumbnails(), space, batch_size)

    monkeypatch.setattr(image_embedder, "open_encoder", opened)
    return lambda name, *flags: commands.call(name, "--encoder=own:thumbnail", *flags)


def test_a_gallery_is_searched_by_the_encoder_that_embedded_it(execute, monkeypatch, capsys):
    execute("embed", "--images=photos", "--output=g.npz")
    assert "broken.jpg (not an image)" in capsys.readouterr().out
    execute("embed", "--images=photos", "--output=g.npz")
    assert "holds the embeddings of 60 images, so nothing was" in capsys.readouterr().out
    execute("search", "--gallery=g.npz", "--query=photos/class3/2.png", "--k=5")
    shown = [line.split()[-1] for line in capsys.readouterr().out.splitlines()[2:]]
    x = Embeddings.load("g.npz")
    own = x.ids.tolist().index(str(find_images("photos/class3/2.png").names[0]))
    unit = x.features() / np.linalg.norm(x.features(), axis=1, keepdims=True)
    nearest = x.ids[np.argsort(-unit @ unit[own])[1:6]]
    assert all(map(str.endswith, nearest.tolist(), shown)) and len(shown) == 5
    monkeypatch.setattr(Thumbnails, "facts", ["other"])
    with pytest.raises(UserError, match="embedded by own:thumbnail, as it was before"):
        execute("search", "--gallery=g.npz", "--query=photos/class3/2.png")


def test_queries_are_cropped_and_scored_by_their_ground_truth(execute, photos_folder, monkeypatch):
    photos = find_images(str(photos_folder))
    whole = dataclasses.replace(
        photos,
        labels=np.zeros(len(photos), int),
        class_names=np.full(len(photos), "", object),
        sizes=np.array([Image.open(path).size[::-1] for path in photos.names]),
    )
    boxes = np.array([[2, 3, 12, 19], [0, 0, 8, 8]])
    queries = dataclasses.replace(whole.take(np.array([0, 30])), boxes=boxes)
    gallery = whole.take(np.arange(1, 30))
    items = [[0, 1], [2]], [[9], []], [[5], [7, 8]]  # Easy, hard and junk, of each query.
    truth = GroundTruth(*([np.array(x, int) for x in of_level] for of_level in items))
    splits = Splits(None, None, queries, gallery, "print", ground_truth=truth, name="judged")
    monkeypatch.setattr(opening, "open_prepared", lambda *_: splits)

    execute("score", "--dataset=roxford5k", "--metrics=map", "--output=s.json")
    shown = zip((0, 30), boxes.tolist(), strict=True)
    crops = [Image.open(photos.names[i]).crop(tuple(box)) for i, box in shown]
    images = crops, [Image.open(path) for path in photos.names[1:30]]
    prepared = ([Thumbnails().prepare(image.convert("RGB")) for image in x] for x in images)
    points, items = (np.asarray(Sphere().embed(Thumbnails().features(x))) for x in prepared)
    written = json.load(open("s.json"))
    for level in ("easy", "medium"):
        relevance = relevance_at(level, truth)
        scores = relevance_scores(points, items, relevance, metrics=["map"], space=Sphere())
        assert written[f"{level}/map"] == pytest.approx(scores["map"].mean(), abs=1e-6)

    execute("embed", "--dataset=roxford5k", "--output=g.npz")
    damaged = dataclasses.replace(Embeddings.load("g.npz"), unreadable={"a": "b"})
    with pytest.raises(UserError, match="1 of the images with ground truth could not"):
        task_of(damaged, ground_truth=truth)


def test_lines_are_left_out_and_dark_images_named(embedder, tmp_path, capsys):
    """Encoders of libraries enlarge a line as a whole, which takes gigabytes, and then crop it."""
    Image.new("L", (20_000, 1)).save(tmp_path / "line.png")
    for name in "ab":
        Image.fromarray(np.full((9, 9), 4095, np.uint16)).save(tmp_path / f"{name}.tif")
    embeddings = embedder.embed_images(find_images(str(tmp_path)))
    line = str(tmp_path / "line.png")
    assert embeddings.unreadable == {line: "it is a line of 20000 × 1 pixels; crop it"}
    warning = f"2 of 3 images, such as {tmp_path / 'a.tif'}, stay below a sixteenth"
    assert capsys.readouterr().err.count(warning) == 1


def test_what_is_no_encoder_is_refused(embedder, photos_folder, monkeypatch):
    with pytest.raises(
        UserError, match="it must be lite, dinov2, .*, timm:NAME, hf:NAME or onnx:FILE"
    ):
        open_encoder("vit_small")
    with pytest.raises(UserError, match=r"onnx:FILE; did you mean lite\?$"):
        open_encoder("lte")
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(UserError, match=r"needs torch: .*hf.*without a GPU, first pip .*cpu"):
            open_encoder("hf:someone/encoder")
    for features, message in (
        (lambda self, x: np.stack(x)[:, None], r"has the shape \[1, 1, 48\] for one image"),
        (lambda self, x: np.random.normal(size=(len(x), 3)), "embeds one image in different ways"),
    ):
        monkeypatch.setattr(Thumbnails, "features", features)
        with pytest.raises(UserError, match=message):
            ExternalEmbedder("own:thumbnail", Thumbnails())
    monkeypatch.setattr(Thumbnails, "features", lambda self, x: np.stack(x) * np.inf)
    with pytest.raises(UserError, match="class0/0.png is not finite"):
        embedder.embed_images(find_images(str(photos_folder)), few=True)


@pytest.fixture
def append(embedder, photos_folder, tmp_path):
    """Adds photos of a table, such as '1,cat,test 2,dog,test', to a gallery; returns its rows."""
    shutil.copytree(photos_folder / "class1", tmp_path / "photos")

    def append(rows):
        count = rows.split()[0].count(",") + 1
        lines = [",".join(["path", "label", "split", "coarse_label"][:count])]
        lines += [f"photos/{row[0]}.png{row[1:]}" for row in rows.split()]
        (tmp_path / "table.csv").write_text("\n".join(lines))
        embedder.embed_to(tmp_path / "g.npz", find_images(str(tmp_path / "table.csv")), append=True)
        return rows_of(Embeddings.load(tmp_path / "g.npz"))

    return append


def rows_of(gallery):
    names = np.array([path[-5] for path in gallery.ids.tolist()])
    columns = names, gallery.labels, gallery.splits, gallery.coarse_labels
    rows = zip(*(x.tolist() for x in columns if x is not None), strict=True)
    return " ".join(sorted(map(",".join, rows)))


@pytest.mark.parametrize(
    ("first", "then", "expected", "said"),
    [
        ("1,a 1,b 2,a", "1,a 1,c 2,a", "1,a 1,c 2,a", "1 new image, reused 2, replaced 1"),
        ("1,a,gallery 1,a,test", "1,a,gallery 1,a,val", "1,a,gallery 1,a,validation", "reused 1"),
        ("1,a 1,b 2,a", "2,a 3,a", "1,a 1,b 2,a 3,a", "1 new image, reused 3, replaced 0"),
        ("1,a,test", "2,b", "1,a,test 2,b,", "splits of 1 image are unknown"),
        ("1,a", "2,b,test", "1,a, 2,b,test", "splits of 1 image are unknown"),
        ("1,a,test,x", "2,b,test", "1,a,test,x 2,b,test,", "coarse_labels of 1 image are unknown"),
        ("1,a,test", "1,a", "1,a", "1 new image, reused 0, replaced 1"),
    ],
)
def test_added_images_replace_only_their_own_rows(append, capsys, first, then, expected, said):
    assert append(first) == first
    assert append(then) == append(then) == expected
    assert said in capsys.readouterr().err


def test_damaged_images_and_unknown_versions_lose_no_rows(append, tmp_path, capsys):
    append("1,a 2,a")
    (tmp_path / "photos/1.png").write_text("no image")
    for rows in "1,a 2,a", "1,a 3,a":
        append(rows)
        assert "1.png any more (not an image); its earlier row stays" in capsys.readouterr().err
    gallery = Embeddings.load(tmp_path / "g.npz")
    assert rows_of(gallery) == "1,a 2,a 3,a" and not gallery.unreadable
    dataclasses.replace(gallery, versions=None).save(tmp_path / "g.npz")
    for said in ("1 new image, reused 2, replaced 1", "0 new images, reused 3"):
        assert append("2,a") == "1,a 2,a 3,a"
        assert said in capsys.readouterr().err


def test_images_that_moved_are_not_added_twice(embedder, photos_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(fetching, "cache_folder", lambda: tmp_path / "cache")
    photos, moved = tmp_path / "photos", tmp_path / "moved"

    def check(where):
        images = find_images(str(where))
        added = embedder.embed_to(tmp_path / "g.npz", images, append=True)
        assert sorted(added.ids.tolist()) == sorted(images.names.tolist())

    for name in ("class1", "class2"):
        shutil.copytree(photos_folder / name, photos / name)
        check(shutil.make_archive(tmp_path / "packed", "zip", photos))
    shutil.copy(photos / "class1/1.png", photos / "class1/copy.png")
    check(photos)
    check(photos.rename(moved))


def test_an_encoder_of_hypjax_embeds_by_its_name(tmp_path, monkeypatch, capsys):
    """Its file holds the features of the encoder, on pixels scaled as in its pretraining."""
    monkeypatch.chdir(tmp_path)
    name = "vit_tiny_patch16_224"
    sizes = architectures._FAMILY_OF[name].members
    monkeypatch.setitem(sizes, name, sizes[name] | {"depth": 1, "image_size": 32})
    encoder = create_encoder(name)
    draw = lambda leaf: np.random.default_rng(leaf.size).normal(0, 0.05, leaf.shape)  # noqa: E731
    params = jax.tree.map(lambda leaf: np.float32(draw(leaf)), encoder_shapes(encoder, 3))
    save_file(timm_state_dict(params, encoder), "weights.safetensors")
    spec, images = "vit_tiny_patch16_224.augreg_in21k@weights.safetensors", tmp_path / "photos"
    images.mkdir()
    flags = f"--encoder={spec}", f"--images={write_squares(images, 9) / 'b'}"
    commands.call("embed", *flags, "--output=g.npz", "--batch_size=4", "--engine=jax")
    assert commands.call("embed", *flags, "--output=g.npz") is None  # Embeds nothing again.
    gallery, found = Embeddings.load("g.npz"), find_images(str(images / "b"))
    pictures = [Image.open(name).convert("RGB").resize((32, 32), 3) for name in found.names]
    pixels = np.stack([*map(np.asarray, pictures)]) / np.float32(127.5) - 1
    expected = np.asarray(jax.jit(encoder.apply)({"params": params}, pixels))
    np.testing.assert_allclose(gallery.features(), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.linalg.norm(gallery.vectors, axis=1), 1, rtol=1e-6)
    commands.call("search", flags[0], "--gallery=g.npz", f"--query={found.names[2]}", "--k=1")
    unit = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    nearest = np.argsort(-unit @ unit[2])[1]
    assert str(gallery.ids[nearest]).endswith(capsys.readouterr().out.split()[-1])
    assert "vit_tiny_patch16_224, 32 × 32 pixels, in the sphere" in repr(load(spec))
    (tmp_path / "lite").mkdir()  # A path comes first.
    with pytest.raises(UserError, match="lite holds no run"):
        load("lite")
    for name, message in (("resnet50d", "it must be lite, "), ("convnext_tiny", "add the tag")):
        with pytest.raises(UserError, match=message):
            commands.call("embed", f"--encoder={name}", flags[1], "--output=other.npz")
