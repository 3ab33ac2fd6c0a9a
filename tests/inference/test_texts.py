"""Models of images and texts: embedding texts, searching by them, and folders of such models."""

import dataclasses
import json
from pathlib import PurePath

import jax
import numpy as np
import pytest

import hypjax
from hypjax.config import default_config
from hypjax.errors import UserError
from hypjax.galleries.embeddings import Embeddings
from hypjax.geometry import Sphere
from hypjax.inference import released as released_models
from tests.helpers.commands import call
from tests.helpers.texts import CONTEXT, released, write_tokenizer

TEXTS = ["a plum", "x", "the green apple", "a plum on a plate", "b"]


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """A file of weights with a tokenizer beside it, whose reader is tested elsewhere."""
    monkeypatch.setattr(released_models, "read_language_image", lambda _: released())
    write_tokenizer(tmp_path)
    (tmp_path / "meru.pth").write_bytes(b"weights")
    return tmp_path / "meru.pth"


def features(model, texts):
    """The head's outputs for texts, one at a time, by the module itself."""
    tower, params = model.module.towers["texts"], model.params["towers_texts"]
    rows = []
    for text in texts:
        # Letters without merges; the last of a word ends it.
        words = [[x - 33 for x in map(ord, word)] for word in text.split()]
        ids = [512, *(t for word in words for t in [*word[:-1], word[-1] + 256]), 513]
        padded = np.zeros((1, CONTEXT), np.int32)
        padded[0, : len(ids)] = ids
        rows.append(tower.apply({"params": params}, padded).projected[0])
    return np.stack(rows)


def test_a_text_has_one_embedding_whatever_it_is_embedded_with(weights):
    model = hypjax.load(weights)
    found = model.embed_texts(TEXTS)
    assert found.ids.tolist() == TEXTS and found.vectors.dtype == np.float32
    expected = model.space.embed(features(model, TEXTS))
    np.testing.assert_allclose(found.vectors, expected, rtol=1e-5, atol=5e-6)
    for i, text in enumerate(TEXTS):
        np.testing.assert_allclose(
            model.embed_texts(text).vectors[0], found.vectors[i], rtol=1e-5, atol=5e-6
        )
    many = model.embed_texts([*TEXTS, *[f"a{i}" for i in range(70)]])
    np.testing.assert_allclose(many.vectors[: len(TEXTS)], found.vectors, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("space", [None, Sphere()], ids=["hyperboloid", "sphere"])
def test_prompts_are_averaged_before_the_map_into_the_space(weights, monkeypatch, space):
    monkeypatch.setattr(released_models, "read_language_image", lambda _: released(space))
    model = hypjax.load(weights)
    templates = ["a {}", "pic {}"]
    prompts = features(model, [t.replace("{}", "plum") for t in templates])
    if space == Sphere():
        prompts = prompts / np.linalg.norm(prompts, axis=1, keepdims=True)
    expected = model.space.embed(prompts.mean(axis=0))
    found = model.embed_texts("plum", templates).vectors[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=5e-6)
    np.testing.assert_array_equal(
        model.embed_texts("plum", "a {}").vectors, model.embed_texts("plum", ["a {}"]).vectors
    )
    with pytest.raises(UserError, match="must contain {} once"):
        model.embed_texts("plum", ["a photo"])


def test_words_find_images_and_images_find_words(weights, photos_folder, tmp_path):
    model = hypjax.load(weights)
    gallery, texts = model.gallery(photos_folder), model.embed_texts(TEXTS)
    apart = np.asarray(model.space.distance_matrix(texts.vectors, gallery.vectors))
    for row, hits in enumerate(model.search(gallery, text=TEXTS, k=3)):
        nearest = np.argsort(apart[row])[:3]
        assert hits.query == TEXTS[row] and hits.paths == gallery.ids[nearest].tolist()
        np.testing.assert_allclose(hits.distances, apart[row, nearest], rtol=1e-5, atol=1e-5)
    image = gallery.ids[0]
    (hits,) = model.search(texts, image, k=2)
    assert hits.paths == texts.ids[np.argsort(apart[:, 0])[:2]].tolist()
    assert "the green apple" in str(model.search(texts, image, k=5)[0])
    with pytest.raises(UserError, match="for images or for texts"):
        model.search(gallery)


def test_commands_take_words_and_files_of_weights(weights, photos_folder, tmp_path, capsys):
    gallery, captions = tmp_path / "g.npz", tmp_path / "captions.csv"
    captions.write_text("title,split\na plum,x\nthe green apple,y\n")
    common = f"--workdir={weights}"
    call("embed", common, f"--images={photos_folder}", f"--output={gallery}")
    capsys.readouterr()
    call(
        *("search", common, f"--gallery={gallery}", "--k=2", "--text=a plum", "--text=x"),
        f"--query={photos_folder}/class1/2.png",
    )
    shown = capsys.readouterr().out
    assert shown.startswith("a plum\nrank") and "\nx\nrank" in shown and "2.png (class1)" in shown
    call("embed", common, f"--texts={captions}", f"--output={tmp_path / 't.npz'}")
    assert "wrote the embeddings of 2 texts" in capsys.readouterr().out
    call("embed", common, f"--texts={captions}", f"--output={tmp_path / 't.npz'}")
    with pytest.raises(UserError, match="exists already and holds other embeddings"):
        call("embed", common, f"--texts={captions}", f"--output={gallery}")
    model = hypjax.load(weights)
    (hits,) = model.search(tmp_path / "t.npz", text="a plum", k=1)
    assert hits.paths == ["a plum"] and hits.distances[0] < 1e-5
    assert json.loads(str(np.load(tmp_path / "t.npz")["space"]))["name"] == "lorentz"
    flags = f"--gallery={tmp_path / 't.npz'}", "--text=x", f"--output={tmp_path / 'hits.png'}"
    call("search", common, *flags)
    assert "hits.png is not drawn: its hits are texts, such as " in capsys.readouterr().err
    texts, images = (Embeddings.load(tmp_path / name) for name in ("t.npz", "g.npz"))
    assert (texts.noun, images.noun) == ("text", "image")
    for table in (texts, images):
        with pytest.raises(UserError, match=f"there are no {table.noun}s in the gallery"):
            model.search(table.take(np.array([], int)), text="x")


def test_an_unreadable_query_does_not_stop_words(weights, photos_folder, tmp_path, capsys):
    (tmp_path / "broken.png").write_bytes(b"damaged")
    hypjax.load(weights).gallery(photos_folder).save(tmp_path / "g.npz")
    flags = f"--workdir={weights}", f"--gallery={tmp_path / 'g.npz'}", "--text=a plum", "--k=1"
    call("search", *flags, f"--query={tmp_path / 'broken.png'}")
    shown = capsys.readouterr()
    assert shown.out.startswith("a plum\nrank") and "cannot read" in shown.err


def test_a_released_model_becomes_a_folder_that_commands_and_push_take(weights, tmp_path, capsys):
    folder = tmp_path / "meru-s"
    call("convert", f"--workdir={weights}", "--format=hypjax", f"--output={folder}")
    assert "MERU" in capsys.readouterr().out
    model, copy = hypjax.load(weights), hypjax.load(folder)
    np.testing.assert_array_equal(copy.embed_texts(TEXTS).vectors, model.embed_texts(TEXTS).vectors)
    assert copy.fingerprint == model.fingerprint and copy.space == model.space
    assert jax.tree.all(jax.tree.map(np.array_equal, copy.params, model.params))
    with pytest.raises(UserError, match="timm builds no encoder with these norms"):
        call("convert", f"--workdir={folder}", f"--output={tmp_path / 'timm.safetensors'}")
    assert not (tmp_path / "timm.safetensors").exists()
    pushed = hypjax.load(hypjax.push(folder, "me/meru", folder=tmp_path / "hub"))
    card = (tmp_path / "hub" / "README.md").read_text()
    assert "others have trained" in card and "Trained by hypjax" not in card
    assert "timm" not in (tmp_path / "hub/README.md").read_text()
    np.testing.assert_array_equal(
        pushed.embed_texts(TEXTS).vectors, model.embed_texts(TEXTS).vectors
    )


def test_files_beside_weights_on_the_hub_are_fetched(weights, monkeypatch, tmp_path):
    """They tell pixels, activations and tokens; weights of other programs stay there."""
    names = {"config.json", "preprocessor_config.json", "open_clip_config.json", "merges.txt"}
    fetched = []

    def download(location, patterns):
        fetched.append({x for x in (*names, "x.bin") if any(map(PurePath(x).match, patterns))})
        return tmp_path

    monkeypatch.setattr(released_models.hub, "download", download)
    for source in ("hf://me/meru/meru.pth", "hf://me/meru"):
        released_models.find_released(source)
    assert fetched == [names] * 2


def test_images_are_squashed_where_papers_do(weights, monkeypatch):
    rng = np.random.default_rng(0)
    wide = rng.integers(256, size=(40, 90, 3), dtype=np.uint8)
    model = hypjax.load(weights)
    squashing = model.squashing()
    view = released().pixels.view._replace(test="squash")
    pixels = dataclasses.replace(released().pixels, view=view)
    other = released()._replace(pixels=pixels)
    monkeypatch.setattr(released_models, "read_language_image", lambda _: other)
    expected = hypjax.load(weights)
    np.testing.assert_array_equal(squashing.embed(wide), expected.embed(wide))
    assert squashing.fingerprint == expected.fingerprint != model.fingerprint
    assert np.abs(model.embed(wide) - squashing.embed(wide)).max() > 1e-3


def test_long_texts_are_cut_and_counted(weights, capsys):
    hypjax.load(weights).embed_texts(["a" * 50, "b"])
    assert f"1 of 2 texts cut to {CONTEXT} tokens" in capsys.readouterr().err


def test_what_is_missing_is_one_sentence(weights, run, tmp_path):
    with pytest.raises(UserError, match="embeds no texts; load the head"):
        hypjax.load(run).embed_texts("a plum")
    with pytest.raises(UserError, match="embeds no texts; load the head"):
        hypjax.load(weights, "encoder").embed_texts("a plum")
    model = hypjax.load(weights)
    for texts, problem in ([], "there are no texts"), (["a", 3], "text 1 is int"):
        with pytest.raises(UserError, match=problem):
            model.embed_texts(texts)
    with pytest.raises(UserError, match="absent does not exist"):
        hypjax.load(weights, tokenizer=tmp_path / "absent")
    with pytest.raises(UserError, match="weights by its authors"):
        call("convert", "--workdir=nowhere", "--format=hypjax", f"--output={tmp_path / 'o'}")
    next(tmp_path.glob("bpe*")).unlink()
    with pytest.raises(UserError, match="has no tokenizer; put tokenizer.json, vocab"):
        hypjax.load(weights).embed_texts("a plum")
    config = default_config()
    config.model.text.width = 64
    with pytest.raises(UserError, match="model.text.width is 64; it must be 0"):
        hypjax.train_and_evaluate(config, tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.csv", "path,kind\na.png,b\n", "has no column caption"),
        ("a.csv", "text\na\n \n", "row 2 has no text"),
        ("a.txt", "\n \n", "holds no texts"),
        ("b.txt", None, "does not exist"),
    ],
)
def test_files_without_texts_are_refused(weights, tmp_path, name, content, problem):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=problem):
        hypjax.data.texts.read_texts(str(tmp_path / name))
