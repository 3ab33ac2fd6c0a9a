"""Files that anyone may have made: they are read, or refused in a sentence, never a traceback.

HYPJAX_FUZZ=5000 pytest tests/test_fuzzing.py -m slow tries so many examples of each kind.
"""

import json
import os
import pathlib

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import save_file

from hypjax.config import default_config, for_files, load_config
from hypjax.data.photo_dataset import open_photos
from hypjax.data.photos import find_photos, read_table
from hypjax.data.splits import Decoding, HeldOutClasses
from hypjax.errors import UserError
from hypjax.geometry import PoincareBall
from hypjax.inference.partial_gallery import PartialGallery
from hypjax.models import VisionTransformer
from hypjax.models.architectures import encoder_shapes
from hypjax.models.pretrained import load_timm, timm_state_dict
from hypjax.retrieval.embeddings import Embeddings
from tests.helpers.pictures import write_pictures, write_table

pytestmark = pytest.mark.slow
fuzzed = settings(
    max_examples=int(os.environ.get("HYPJAX_FUZZ", 60)),
    deadline=None,
    derandomize="HYPJAX_FUZZ" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
ENCODER = VisionTransformer(image_size=16, patch_size=8, width=8, depth=1, num_heads=2)


@st.composite
def damaged(draw, content):
    """The content with some bytes changed, removed, inserted or repeated, or cut off."""
    for _ in range(draw(st.integers(1, 4))):
        at, length = draw(st.integers(0, len(content))), draw(st.integers(0, 40))
        part, end = content[at : at + length], content[at + length :]
        flipped = bytes(byte ^ 1 << i % 8 for i, byte in enumerate(part[:1]))
        other = draw(st.sampled_from([b"", 2 * part, flipped + part[1:]]) | st.binary(max_size=40))
        content = content[:at] + other + draw(st.sampled_from([end, end, end, b""]))
    return content


def values():
    """Any JSON value."""
    simple = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    return st.recursive(
        simple,
        lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=4), x),
        max_leaves=5,
    )


@st.composite
def altered(draw, tree):
    """A JSON object in which one value, at any depth, is another, or is missing."""
    tree = json.loads(json.dumps(tree))
    place = tree
    while True:
        name = draw(st.sampled_from(sorted(place)))
        deeper = isinstance(place[name], dict) and place[name]
        if not deeper or draw(st.booleans()):
            break
        place = place[name]
    if draw(st.booleans()):
        del place[name]
    else:
        place[name] = draw(values())
    return tree


def tolerates(action, *arguments):
    """Whether an action succeeds, or says in one sentence why not."""
    try:
        return action(*arguments)
    except UserError as error:
        assert str(error) and "\n" not in str(error)


def write_gallery(path):
    vectors = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32) / 10
    names = np.array([f"{i}.png" for i in range(5)])
    Embeddings(vectors, names, names, PoincareBall(), "f", "i", {"b.png": "no"}).save(path)


def write_weights(path):
    shapes = encoder_shapes(ENCODER)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)
    state = timm_state_dict(params, ENCODER)
    save_file(state, path) if path.suffix == ".safetensors" else np.savez(path, **state)


def write_rows(path):
    first = {"path": "a.png", "label": "x", "split": "train"}
    write_table(path, [first, {"path": "b,c.png", "label": "y", "split": "test"}])


def read_gallery(path):
    gallery = Embeddings.load(path)
    gallery.space.check(gallery.vectors)
    gallery.search_vectors()


FILES = {
    "gallery.npz": (write_gallery, read_gallery),
    "weights.npz": (write_weights, lambda path: load_timm(str(path), ENCODER)),
    "weights.safetensors": (write_weights, lambda path: load_timm(str(path), ENCODER)),
    "table.csv": (write_rows, read_table),
    "table.parquet": (write_rows, read_table),
    "list.txt": (
        lambda path: path.write_text("a.png\nb.png\n"),
        lambda path: find_photos(str(path)),
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_read_or_refused(name, tmp_path):
    (write, read), path = FILES[name], tmp_path / name
    write(path)
    read(path)

    @fuzzed
    @given(damaged(path.read_bytes()))
    def check(content):
        path.write_bytes(content)
        tolerates(read, path)

    check()


@pytest.mark.parametrize("name", ["1.jpg", "1.png", "1.webp", "1.bmp", "1.gif", "1.tif"])
def test_damaged_images_are_named(name, tmp_path):
    exif = Image.Exif()
    exif[0x0112], exif[0x010E], exif[0x011A] = 6, "text", 72.0
    write_pictures(tmp_path, [f"{label}/{i}.png" for label in "abcd" for i in (1, 2)])
    noise = np.random.default_rng(0).integers(0, 255, (9, 7, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "a" / name, exif=exif)
    content = (tmp_path / "a" / name).read_bytes()
    held_out = HeldOutClasses(2, 0, 0)

    @fuzzed
    @given(damaged(content))
    def check(content):
        (tmp_path / "a" / name).write_bytes(content)
        splits = tolerates(open_photos, tmp_path, Decoding(3, False, None), held_out)
        if splits is not None:
            for i in range(len(splits.train)):
                splits.train.image(i, 3)

    check()


def test_parts_of_a_gallery_are_read_or_embedded_again(tmp_path):
    def start():
        return PartialGallery(tmp_path / "gallery.npz", "facts")

    with start() as unfinished:
        unfinished.add(np.ones((3, 2), np.float32), {1: "broken"}, saving=True)
        folder = unfinished._folder
    (part,) = folder.glob("*.npz")
    content = part.read_bytes()

    @fuzzed
    @given(damaged(content))
    def check(content):
        part.write_bytes(content)
        with start() as unfinished:
            assert unfinished.done in (0, 3)

    check()


@fuzzed
@given(st.sampled_from(sorted(for_files(default_config()))), st.text() | values().map(repr))
def test_fields_take_a_value_or_refuse_it(field, text):
    spec = str(pathlib.Path(__file__).parents[1] / "configs/glyphs.py")
    tolerates(load_config, spec, [f"{field}={text}"])
