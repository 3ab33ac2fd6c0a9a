"""Files that anyone may have made are read, or refused in a sentence."""

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import save_file

from hypjax.data.photos import read_table
from hypjax.data.splits import Decoding, HeldOutClasses, open_photos
from hypjax.errors import UserError
from hypjax.geometry import PoincareBall
from hypjax.models import VisionTransformer
from hypjax.models.architectures import encoder_shapes
from hypjax.models.pretrained import load_timm, timm_state_dict
from hypjax.retrieval.embeddings import Embeddings
from tests.helpers.pictures import write_pictures, write_table

ENCODER = VisionTransformer(image_size=16, patch_size=8, width=8, depth=1, num_heads=2)


@st.composite
def damaged(draw, content):
    """The content with some bytes replaced or repeated, or cut off."""
    at, length = draw(st.integers(0, len(content))), draw(st.integers(0, 40))
    part, end = content[at : at + length], content[at + length :]
    other = draw(st.sampled_from([b"", 2 * part]) | st.binary(max_size=40))
    return content[:at] + other + draw(st.sampled_from([end, end, end, b""]))


def write_gallery(path):
    vectors = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32) / 10
    names = np.array([f"{i}.png" for i in range(5)])
    Embeddings(vectors, names, names, PoincareBall(), "f", "i", {"b.png": "no"}).save(path)


def write_weights(path):
    params = jax.tree.map(lambda x: np.ones(x.shape, np.float32), encoder_shapes(ENCODER))
    save_file(timm_state_dict(params, ENCODER), path)


def write_rows(path):
    write_table(path, [{"path": f"{i},a.png", "label": "x", "split": "train"} for i in range(3)])


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
    "a/1.jpg": (write_image, read_images),
    "a/1.tif": (write_image, read_images),
}


@pytest.mark.hygiene
@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_read_or_refused(name, tmp_path):
    (write, read), path = FILES[name], tmp_path / name
    path.parent.mkdir(exist_ok=True)
    write(path)
    read(path)

    @settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(damaged(path.read_bytes()))
    def check(content):
        path.write_bytes(content)
        try:
            read(path)
        except UserError as error:
            assert str(error) and "\n" not in str(error)

    check()
