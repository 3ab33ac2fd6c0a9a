"""Embedding in parts."""

import functools
import shutil

import numpy as np
import pytest

from hypjax.errors import UserError
from hypjax.retrieval.embeddings import Embeddings
from tests.helpers import commands
from tests.helpers.process_pair import python


@pytest.fixture
def execute(run, photos_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(photos_folder, "photos")
    (tmp_path / "photos/class1/broken.jpg").write_text("no image")
    where = ["--images=photos", f"--workdir={run}", "--output=g.npz"]
    return functools.partial(commands.call, "embed", *where)


def test_merged_parts_are_the_gallery_bit_for_bit(execute, tmp_path):
    execute("--output=whole.npz")
    execute("--shard=2/2")
    with pytest.raises(UserError, match="g-1-of-2.npz is missing; embed it with --shard=1/2"):
        execute("--merge")
    execute("--shard=1/2")
    with pytest.raises(UserError, match="61 images in batches of 16 are too few for 9 parts"):
        execute("--shard=1/9", "--batch_size=16")
    renamed = (tmp_path / "photos/class3").rename("photos/class_3")
    with pytest.raises(UserError, match="holds other images than --images lists now"):
        execute("--merge")
    renamed.rename("photos/class3")
    execute("--merge")
    with np.load("g.npz") as merged, np.load("whole.npz") as whole:
        assert merged.files == whole.files
        assert all(np.array_equal(merged[name], whole[name]) for name in whole.files)
    assert len(Embeddings.load(tmp_path / "g.npz").unreadable) == 1


@pytest.mark.slow
def test_several_devices_embed_the_same_bit_for_bit(execute, run, tmp_path):
    execute("--output=one.npz")
    arguments = ("--images=photos", f"--workdir={run}", "--output=three.npz")
    python("-m", "hypjax.embed", *arguments, devices=3, cwd=tmp_path).check_returncode()
    with np.load("one.npz") as one, np.load("three.npz") as three:
        assert all(np.array_equal(one[name], three[name]) for name in one.files)
    assert len(Embeddings.load(tmp_path / "three.npz").unreadable) == 1
