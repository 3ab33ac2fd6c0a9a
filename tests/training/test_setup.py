"""What is refused before a run begins."""

import pytest

from hypjax import train
from hypjax.errors import UserError


def test_an_objective_that_does_not_suit_the_data_leaves_no_folder(load_glyphs, tmp_path):
    config = load_glyphs("objective.memory=1e9", variant="irt-r")
    with pytest.raises(UserError, match="memory is 1e.09, .* at most all .* training images"):
        train.train_and_evaluate(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
