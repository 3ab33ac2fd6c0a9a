"""The commands zero_shot, captions and walk, with a model whose texts and images are made up."""

import json
import pathlib
import tarfile
import zlib

import numpy as np
import pytest
from PIL import Image

from hypjax.data.captions import read_captions
from hypjax.data.photos import given_images
from hypjax.errors import UserError
from hypjax.galleries.embeddings import Embeddings
from hypjax.geometry import Lorentz, Sphere
from hypjax.inference import model
from hypjax.inference import released as released_models
from tests.helpers import commands
from tests.helpers.texts import released, write_tokenizer

DIM = 16
CHAINS = "bird => blue bird => blue bird on a branch"


def features(text):
    """The sum of a direction for each word: longer texts lie farther out."""
    words = [np.random.default_rng(zlib.crc32(x.encode())).normal(size=DIM) for x in text.split()]
    return 0.2 * np.sum(words, axis=0) if words else np.full(DIM, 1e-3)


class Model:
    """An image lies where the text in its file's name or its class does."""

    def __init__(self, space):
        self.space, self.asked = space, []

    def _points(self, rows):
        return np.asarray(self.space.embed(np.float32(rows)))

    def embed_texts(self, texts, templates=()):
        self.asked.append((list(texts), list(templates)))
        prompts = [[x.replace("{}", text) for x in templates or ["{}"]] for text in texts]
        points = self._points([np.mean([*map(features, several)], axis=0) for several in prompts])
        return Embeddings(points, np.array(texts), np.array([""] * len(texts)), self.space)

    def embed_images(self, images, few=False):
        unreadable = {}
        for i in range(len(images)):
            try:
                images.image(i, 3)
            except UserError as error:
                unreadable[images.name(i)] = str(error)
        names = [x for x in images.names.tolist() if x not in unreadable]
        labels = [*map(str, images.class_names[[x not in unreadable for x in images.names]])]
        texts = [x or pathlib.Path(y).stem for x, y in zip(labels, names, strict=True)]
        rows = [1.5 * features(text.replace("_", " ")) for text in texts]
        points = self._points(rows) if rows else np.empty((0, DIM), np.float32)
        return Embeddings(
            points, np.array(names), np.array(labels), self.space, unreadable=unreadable
        )

    def gallery(self, image):
        return self.embed_images(given_images(image))


@pytest.fixture(params=[Sphere(), Lorentz(1.0, None)], ids=str)
def loaded(request, monkeypatch, tmp_path):
    """The model that each command loads, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    loaded = Model(request.param)
    monkeypatch.setattr(model, "load", lambda source, tokenizer: loaded)
    return loaded


def write_images(*names):
    for name in names:
        pathlib.Path(name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), "blue").save(name)


def scores_of(command, *flags):
    commands.call(command, "--workdir=m", "--output=scores.json", *flags)
    return json.loads(pathlib.Path("scores.json").read_text())


def test_images_are_classified_by_texts(loaded, capsys):
    write_images("a/red_plum/1.png", "a/red_plum/2.png", "a/dog/1.png", "a/wolf/1.png")
    scores = scores_of("zero_shot", "--images=a")
    assert loaded.asked == [(["dog", "red plum", "wolf"], [])]
    perfect = {"accuracy": 1, "accuracy@5": 1, "image_accuracy": 1}
    assert scores == perfect | {"images": 4, "classes": 3, "unreadable": 0}
    assert f"4 images among 3 classes, {loaded.space}:\naccuracy" in capsys.readouterr().out
    # Dogs and wolves take each other's texts.
    pathlib.Path("classes").write_text("dog\twolf\n\nwolf\tdog\nred_plum\tred plum\tplum\n")
    pathlib.Path("tree").write_text("dog\tcanine\nwolf\tcanine\nred_plum\tfruit\n")
    templates = "--template={}", "--template=a photo of a {}."
    scores = scores_of("zero_shot", "--images=a", "--classes=classes", "--tree=tree", *templates)
    assert loaded.asked[1:] == [
        (["wolf", "dog", "red plum"], ["{}", "a photo of a {}."]),
        ([""], ["red plum{}", "a photo of a red plum.{}", "plum{}", "a photo of a plum.{}"]),
    ]
    assert (scores["accuracy"], scores["image_accuracy"]) == (pytest.approx(1 / 3), 0.5)
    assert (scores["tie"], scores["lca"], scores["jaccard"]) == (1, 1, 1)


def test_coarse_classes_are_a_tree(loaded):
    write_images("1.png", "2.png", "3.png")
    table = "path,label,coarse_label\n1.png,dog,Animal/Pet\n2.png,cat,Animal/Pet\n3.png,plum,Food"
    pathlib.Path("a.csv").write_text(table)
    pathlib.Path("classes").write_text("dog\tplum\nplum\tdog\ncat\n")
    scores = scores_of("zero_shot", "--images=a.csv", "--classes=classes")
    assert scores["image_accuracy"] == pytest.approx(1 / 3)
    assert scores["tie"] == pytest.approx((5 + 5 + 0) / 3)
    assert scores["lca"] == pytest.approx((2 + 3 + 1) / 3)  # From plum, from dog; right.


def test_captions_search_and_are_searched(loaded):
    write_images("photos/dog.png", "photos/red_plum.png")
    table = "photo\tcaption\ndog.png\ta fish\ndog.png\tdog\nred_plum.png\tred plum\n"
    pathlib.Path("pairs.tsv").write_text(table)
    scores = scores_of("captions", "--pairs=pairs.tsv?path=photo", "--images=photos")
    assert loaded.asked == [(["a fish", "dog", "red plum"], [])]
    assert scores["image_to_text"] == {"recall@1": 1} and "hierarcaps" not in scores
    assert scores["text_to_image"]["recall@1"] >= 2 / 3
    assert (scores["images"], scores["captions"]) == (2, 3)


def test_chains_are_scored_as_in_hierarcaps(loaded):
    write_images("images/blue bird on a branch.png", "images/dog.png")
    url = "http://images.org/val"
    table = f'id,captions,image_url\n0,"{CHAINS}",{url}/blue bird on a branch.png\n'
    table += f"1,animal => dog => a dog,{url}/dog.png\n"
    pathlib.Path("pairs.csv").write_text(table)
    scores = scores_of("captions", "--pairs=pairs.csv", "--images=images")
    assert scores["captions"] == 6 and {*scores["hierarcaps"]} == {"precision", "recall", "d_corr"}
    assert (loaded.asked[1:] == [([""], [])]) == loaded.space.normalized
    assert scores["hierarcaps"]["recall"] >= 1 / 3


def test_a_walk_shows_the_texts_that_it_passes(loaded, capsys, figures):
    write_images("photos/dog.png")
    pathlib.Path("words").write_text("dog\na $5 fish\n\n")
    flags = "--image=photos/dog.png", "--texts=words", "--output=a.png"
    commands.call("walk", "--workdir=m", *flags)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "dog" and lines[-1] == "[ROOT]" and "" not in lines
    assert figures[0].axes[0].get_title() == "\n".join(reversed(lines))
    assert pathlib.Path("a.png").exists()


MISTAKES = [
    ("zero_shot --images=a", "each image needs a class, and some have none"),
    ("zero_shot --images=b --classes=words", "words lacks the class dog"),
    ("zero_shot --images=b --classes=empty", "empty holds no texts"),
    ("zero_shot --images=b --classes=none", "none does not exist"),
    ("zero_shot --images=damaged", "no image can be read: "),
    ("zero_shot --images=b --tree=tree", "the class dog is not in the tree"),
    ("captions --pairs=none.csv", "cannot read none.csv (No such file"),
    ("captions --pairs=words", "needs the columns path and caption"),
    ("captions --pairs=header.csv", "header.csv has no rows"),
    ("captions --pairs=pairs.csv?caption=text", "has no column text"),
    ("captions --pairs=pairs.csv", "row 2 needs a path and a caption"),
    ("captions --pairs=texts.csv", "row 1 needs a path"),
    ("captions --pairs=chains.csv", "row 2 needs 3 captions, like all rows"),
    ("captions --pairs=gone.csv", "gone.png"),
    ("walk --image=b --texts=words", "must be one image"),
    ("walk --image=a/dog.png --texts=empty", "empty holds no texts"),
    ("walk --image=a/none.png --texts=words", "a/none.png does not exist"),
    ("walk --image=a/dog.png --texts=words --output=a.txt", "must be a file that ends in .png"),
]


@pytest.mark.parametrize(("line", "sentence"), MISTAKES)
@pytest.mark.parametrize("loaded", [Sphere()], indirect=True)
def test_mistakes_are_one_sentence(loaded, line, sentence):
    write_images("a/dog.png", "b/dog/1.png", "b/cat/1.png")
    for name, text in (
        ("words", "cat\nfish\n"),
        ("empty", "\n \n"),
        ("tree", "cat\tanimal\n"),
        ("header.csv", "path,caption\n"),
        ("pairs.csv", "path,caption\na/dog.png,dog\na/dog.png,\n"),
        ("texts.csv", "path,caption\n,dog\n"),
        ("chains.csv", f"path,caption\na/dog.png,{CHAINS}\na/dog.png,dog\n"),
        ("gone.csv", "path,caption\na/dog.png,dog\na/gone.png,dog\n"),
    ):
        pathlib.Path(name).write_text(text)
    pathlib.Path("damaged/dog").mkdir(parents=True)
    pathlib.Path("damaged/dog/1.png").touch()
    command, *flags = line.split()
    with pytest.raises(UserError) as error:
        commands.call(command, "--workdir=m", *flags)
    assert sentence in str(error.value)


def test_a_released_model_is_evaluated(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(released_models, "read_language_image", lambda _: released())
    (tmp_path / "m.pth").write_bytes(b"weights")
    pathlib.Path("bpe").mkdir()
    write_tokenizer(pathlib.Path("bpe"))
    write_images("a/dog/1.png", "a/cat/1.png")
    pathlib.Path("classes").write_text("dog\tdog\ta pup\ncat\n")
    pathlib.Path("pairs.csv").write_text("path,caption\na/dog/1.png,a dog\na/cat/1.png,a cat\n")
    flags = "--workdir=m.pth", "--tokenizer=bpe"
    commands.call("zero_shot", *flags, "--images=a", "--classes=classes", "--template=a {}")
    commands.call("captions", *flags, "--pairs=pairs.csv")
    commands.call("walk", *flags, "--image=a/dog/1.png", "--texts=classes")
    printed = capsys.readouterr().out
    assert "accuracy        0.5000" in printed and "text_to_image  recall@1  0.5000" in printed
    assert printed.endswith("[ROOT]\n")


def test_hierarcaps_is_read(tmp_path):
    parents = [commands.REPOSITORY, *commands.REPOSITORY.parents]
    archives = [x for x in (y / "shared/data/hierarcaps.tar" for y in parents) if x.exists()]
    if not archives:
        pytest.skip("needs shared/data/hierarcaps.tar")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / "hierarcaps"
    captions = read_captions(str(folder / "hierarcaps_test.csv"), str(folder / "images"))
    assert captions.chains.shape == (1000, 4) and len({*captions.texts}) == 3132
    assert len(captions.images) == 1000 and sorted(captions.owners) == [*range(1000)]
    assert [captions.texts[i] for i in captions.chains[1, :2]] == ["bird", "blue bird"]
    assert captions.images.name(captions.owners[1]).endswith("/COCO_val2014_000000100489.jpg")
    assert all(pathlib.Path(name).exists() for name in captions.images.names)
