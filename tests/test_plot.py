"""The command that draws embeddings."""

import functools
import re

import numpy as np
import pytest
from PIL import Image

from hypjax.analysis import disk
from hypjax.errors import UserError
from tests.helpers import commands


@pytest.mark.slow
def test_draws_the_parts_of_a_run(run, tmp_path, capsys):
    file = tmp_path / "disk.png"
    draw = functools.partial(commands.call, "plot")
    draw("disk", f"--workdir={run}", f"--output={file}", "--parts=train,test", "--thumbnails")
    printed = capsys.readouterr()
    assert "rank correlation of distances in the picture and in the ball" in printed.out
    assert "embedding 18 images" in printed.err and f"wrote {file}" in printed.err
    assert Image.open(file).width == 1600
    draw("hits", f"--workdir={run}", f"--output={file}", "--queries=5", "--k=3")
    printed = capsys.readouterr().out
    failures, wrong, right = map(int, re.search(r"(\d+) of .*?(\d+) of.*?(\d+)", printed).groups())
    assert wrong + right == 5 and wrong == min(max(3, 5 - (18 - failures)), failures)
    with pytest.raises(UserError, match="colour=genus"):
        draw(f"--workdir={run}", f"--output={file}", "--colour=genus")
    assert "embedding" not in capsys.readouterr().err


def test_ancestors_in_a_layout_by_umap_are_proxies_nearer_to_the_centre(monkeypatch):
    layout = np.array([0.5, 0.5j, 0.05, 0.3, 0.1, 0.4j])  # Three images, then three proxies.
    monkeypatch.setattr(disk.layouts, "lay_out_by_umap", lambda *_, **__: layout)
    monkeypatch.setattr(disk.layouts, "faithfulness", lambda *_: None)
    points = np.zeros((3, 2), np.float32)
    panel = disk.Panel("", points, np.zeros(3, int), None)
    drawing = disk.Drawing([panel], ["a"], "class", disk.Proxies(points, np.zeros(3, int)))
    proxies = disk.place_in_disk(drawing, None, "umap", neighbours=80)[0].proxies
    assert (proxies.image_parents.tolist(), proxies.parents.tolist()) == ([0, 2, -1], [1, -1, 1])
