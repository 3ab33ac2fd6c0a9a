"""Files that anyone may have made are read, or refused in a sentence.

HYPJAX_FUZZ=5000 pytest tests/test_fuzzing.py -m hygiene tries so many examples of each kind.
"""

import os

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import save_file

from hypjax.config import default_config, for_files, load_config
from hypjax.data.photos import read_table
from hypjax.data.splits import Decoding, HeldOutClasses, open_photos
from hypjax.errors import UserError
from hypjax.geometry import PoincareBall
from hypjax.models import VisionTransformer
from hypjax.models.architectures import encoder_shapes
from hypjax.models.pretrained import load_timm, timm_state_dict
from hypjax.retrieval.embeddings import Embeddings
from tests.helpers.pictures import write_pictures, write_table
from tests.helpers.small_runs import REPOSITORY

pytestmark = pytest.mark.hygiene
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
        other = draw(st.sampled_from([b"", 2 * part]) | st.binary(max_size=40))
        content = content[:at] + other + draw(st.sampled_from([end, end, end, b""]))
    return content


def tolerates(action, *arguments):
    """Runs an action, which succeeds or says in one sentence why not."""
    try:
        return action(*arguments)
    except UserError as error:
        assert str(error) and "\n" not in str(error)


def write_gallery(path):
    vectors = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32) / 10
    names = np.array([f"{i}.png" for i in range(5)])
    Embeddings(vectors, names, names, PoincareBall(), "f", "i", {"b.png": "no"}).save(path)


def write_weights(path):
    rng, shapes = np.random.default_rng(0), encoder_shapes(ENCODER)
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)
    save_file(timm_state_dict(params, ENCODER), path)


def write_rows(path):
    first = {"path": "a.png", "label": "x", "split": "train"}
    write_table(path, [first, {"path": "b,c.png", "label": "y", "split": "test"}])


def write_image(path):
    write_pictures(path.parent.parent, [f"{label}/{i}.png" for label in "abcd" for i in (1, 2)])
    noise = np.random.default_rng(0).integers(0, 255, (9, 7, 3), np.uint8)
    Image.fromarray(noise).save(path)


def read_images(path):
    splits = open_photos(str(path.parent.parent), Decoding(3, False, None), HeldOutClasses(2, 0, 0))
    for i in range(len(splits.train)):
        splits.train.image(i, 3)


FILES = {
    "gallery.npz": (write_gallery, Embeddings.load),
    "weights.safetensors": (write_weights, lambda path: load_timm(str(path), ENCODER)),
    "table.csv": (write_rows, read_table),
    "table.parquet": (write_rows, read_table),
    **{f"a/1.{suffix}": (write_image, read_images) for suffix in ("jpg", "png", "webp", "tif")},
}


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_read_or_refused(name, tmp_path):
    (write, read), path = FILES[name], tmp_path / name
    path.parent.mkdir(exist_ok=True)
    write(path)
    read(path)

    @fuzzed
    @given(damaged(path.read_bytes()))
    def check(content):
        path.write_bytes(content)
        tolerates(read, path)

    check()


@fuzzed
@given(st.sampled_from(sorted(for_files(default_config()))), st.text() | st.floats().map(repr))
def test_fields_take_a_value_or_refuse_it(field, text):
    tolerates(load_config, str(REPOSITORY / "configs/glyphs.py"), [f"{field}={text}"])
