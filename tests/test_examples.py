"""The tutorial in examples/ trains, and says so."""

import runpy

from tests.helpers.commands import REPOSITORY


def test_training_by_hand_finds_unseen_classes(capsys):
    names = runpy.run_path(str(REPOSITORY / "examples/train_by_hand.py"))
    assert names["scores"].mean() > 0.8 and names["low"] < names["scores"].mean() < names["high"]
    assert names["ids"][:, 0].tolist() == [0, 1]  # An image finds itself.
    before, *_, after, nearest = capsys.readouterr().out.splitlines()
    assert before.startswith("before: recall@1 0.2") and after.startswith("after: recall@1 0.8")
    assert nearest.startswith("classes of the nearest: [[0, 0, 0,")
