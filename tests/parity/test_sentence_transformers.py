"""Folders for sentence-transformers give what hypjax computes, and rank as its spaces do."""

import numpy as np
import pytest
from PIL import Image

import hypjax
from tests.helpers import commands, small_runs

sentence_transformers = pytest.importorskip(
    "sentence_transformers", reason="needs sentence-transformers"
)
pytest.importorskip("timm", reason="needs timm")

GREY = ("data.channels=1", "data.mean=(0.4,)", "data.std=(0.2,)", "data.test_view=squash")
CLIPPED, WHOLE = "objective.clip_radius=0.001", "objective.clip_radius=None"


def convert(photos, folder, *fields, flags=()):
    """Converts a run of random weights; returns the folder and what the command prints."""
    small_runs.save_untrained(small_runs.load(photos, *fields), folder / "run")
    output = folder / "model"
    said = commands.call(
        "convert", "--format=sentence-transformers", f"--workdir={folder / 'run'}",
        f"--output={output}", *flags,
    )  # fmt: skip
    return output, said


def opened(photos):
    return [Image.open(path) for path in sorted(photos.rglob("*.png"))]


@pytest.mark.parametrize(
    "fields",
    [
        ("objective.space=sphere",),
        (CLIPPED, "model.head=norm_dense"),
        (CLIPPED, "objective.space=lorentz", *GREY),
        (CLIPPED, "model.head=none"),
    ],
)
def test_cosines_rank_as_the_space(photos_folder, tmp_path, fields):
    output, _ = convert(photos_folder, tmp_path, *fields)
    peer = sentence_transformers.SentenceTransformer(str(output), device="cpu")
    model = hypjax.load(tmp_path / "run")
    images = opened(photos_folder)
    vectors, points = peer.encode(images), model.embed(images)
    directions = points / np.linalg.norm(points, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors, directions, atol=1e-2 if GREY[0] in fields else 2e-5)
