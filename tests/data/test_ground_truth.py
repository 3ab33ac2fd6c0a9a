"""Ground-truth files of Revisited Oxford and Paris: what is read, and what is refused."""

import os
import pickle

import numpy as np
import pytest

from hypjax.data.ground_truth import read_ground_truth
from hypjax.errors import UserError

CONTENTS = {
    "imlist": ["a", "b", "c", "d"],
    "qimlist": ["q", "r"],
    "gnd": [
        {"bbx": [1.5, 2, 30, 40], "easy": np.array([0]), "hard": [1], "junk": np.array([], int)},
        {"bbx": np.array([0, 0, 3, 4.0]), "easy": [], "hard": np.array([3], ">i2"), "junk": [2]},
    ],
}


def test_a_ground_truth_is_read(tmp_path):
    path = tmp_path / "gnd_roxford5k.pkl"
    path.write_bytes(pickle.dumps(CONTENTS, protocol=2))
    truth = read_ground_truth(path)
    assert (truth.queries, truth.gallery) == (("q", "r"), ("a", "b", "c", "d"))
    assert truth.boxes.tolist() == [[1.5, 2, 30, 40], [0, 0, 3, 4]]
    lists = [[items.tolist() for items in part] for part in truth.ground_truth]
    assert lists == [[[0], []], [[1], [3]], [[], [2]]]


def test_what_is_no_ground_truth_is_refused(tmp_path):
    path, content = tmp_path / "gnd.pkl", pickle.dumps(CONTENTS)
    first = CONTENTS["gnd"][1]
    for written, message in [
        (pickle.dumps(CONTENTS | {"gnd": os.system}), r"gnd.pkl is refused: .*system"),
        (pickle.dumps(CONTENTS | {"qimlist": ["q"]}), "is not a ground truth"),
        (pickle.dumps(CONTENTS | {"gnd": [first, first | {"easy": [0.5]}]}), "not a ground truth"),
        (pickle.dumps(CONTENTS | {"gnd": [first, first | {"junk": [4]}]}), "is damaged"),
        (content[: len(content) // 2], "is damaged"),
    ]:
        path.write_bytes(written)
        with pytest.raises(UserError, match=message):
            read_ground_truth(path)
