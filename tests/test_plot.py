"""The command that draws embeddings."""

import functools
import re
import shutil
import sys

import numpy as np
import pytest
from PIL import Image

from hypjax.errors import UserError
from hypjax.inference.model import load
from tests.helpers import commands, small_runs

draw = functools.partial(commands.call, "plot")


@pytest.fixture(scope="module")
def run(photos_folder, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run")
    small_runs.save_untrained(small_runs.load(photos_folder), workdir)
    return workdir


def test_draws_the_parts_of_a_run(run, tmp_path, capsys):
    file = tmp_path / "disk.png"
    draw("disk", f"--workdir={run}", f"--output={file}", "--parts=train,test", "--thumbnails")
    told = capsys.readouterr()
    assert "rank correlation of distances in the picture and in the ball" in told.out
    assert "embedding 18 images" in told.err and f"wrote {file}" in told.err
    assert Image.open(file).width == 1600
    draw("hits", f"--workdir={run}", f"--output={file}", "--queries=5", "--k=3")
    printed = capsys.readouterr().out
    failures, wrong, right = map(int, re.match(r"(\d+) of .*?(\d+) of.*?(\d+)", printed).groups())
    assert wrong + right == 5 and wrong == min(max(2, 5 - (18 - failures)), failures)
    with pytest.raises(UserError, match="colour=genus"):
        draw(f"--workdir={run}", f"--output={file}", "--colour=genus")


@pytest.mark.slow
def test_draws_a_gallery_in_which_moved_images_are_grey(run, photos_folder, tmp_path, capsys):
    shutil.copytree(photos_folder, tmp_path / "photos")
    load(run).gallery(tmp_path / "photos").save(tmp_path / "gallery.npz")
    where = f"--embeddings={tmp_path / 'gallery.npz'}"
    draw("grid", where, f"--output={tmp_path / 'grid.png'}", "--images=16")
    pixels = np.asarray(Image.open(tmp_path / "grid.png"))
    assert pixels.shape[:2] == (256, 256) and pixels.std() > 20
    assert "cannot be read" not in capsys.readouterr().err
    shutil.rmtree(tmp_path / "photos")
    draw("disk", where, f"--output={tmp_path / 'disk.svg'}", "--thumbnails")
    assert "class3" in (tmp_path / "disk.svg").read_text()
    assert "images that cannot be read; were they moved?" in capsys.readouterr().err


def test_missing_packages_are_named_first(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bokeh", None)
    with pytest.raises(UserError, match=r"hypjax\[viz\]"):
        draw("disk", "--workdir=none", f"--output={tmp_path / 'disk.html'}")
