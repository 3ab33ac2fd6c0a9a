"""The command that draws embeddings."""

import functools
import re

import pytest
from PIL import Image

from hypjax.errors import UserError
from tests.helpers import commands

draw = functools.partial(commands.call, "plot")


@pytest.mark.slow
def test_draws_the_parts_of_a_run(run, tmp_path, capsys):
    file = tmp_path / "disk.png"
    draw("disk", f"--workdir={run}", f"--output={file}", "--parts=train,test", "--thumbnails")
    told = capsys.readouterr()
    assert "rank correlation of distances in the picture and in the ball" in told.out
    assert "embedding 18 images" in told.err and f"wrote {file}" in told.err
    assert Image.open(file).width == 1600
    draw("hits", f"--workdir={run}", f"--output={file}", "--queries=5", "--k=3")
    printed = capsys.readouterr().out
    failures, wrong, right = map(int, re.search(r"(\d+) of .*?(\d+) of.*?(\d+)", printed).groups())
    assert wrong + right == 5 and wrong == min(max(2, 5 - (18 - failures)), failures)
    with pytest.raises(UserError, match="colour=genus"):
        draw(f"--workdir={run}", f"--output={file}", "--colour=genus")
    assert "embedding" not in capsys.readouterr().err
