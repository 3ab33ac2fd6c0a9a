"""Ground-truth files of Revisited Oxford and Paris: what is read, and what is refused."""

import os
import pickle

import numpy as np
import pytest

from hypjax.data import safe_pickle
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


@pytest.mark.parametrize("protocol", (2, pickle.HIGHEST_PROTOCOL))
def test_a_ground_truth_is_read(tmp_path, protocol):
    path = tmp_path / "gnd_roxford5k.pkl"
    path.write_bytes(pickle.dumps(CONTENTS, protocol))
    truth = read_ground_truth(path)
    assert (truth.queries, truth.gallery) == (("q", "r"), ("a", "b", "c", "d"))
    assert truth.boxes.tolist() == [[1.5, 2, 30, 40], [0, 0, 3, 4]]
    lists = [[items.tolist() for items in part] for part in truth.judgements]
    assert lists == [[[0], []], [[1], [3]], [[], [2]]]


class Reduced:
    """Something that is pickled as a call."""

    def __init__(self, *reduced):
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize("call", [os.system, eval, getattr, np.load], ids=lambda f: f.__name__)
def test_what_could_run_code_is_refused(tmp_path, call):
    marker, path = tmp_path / "ran", tmp_path / "gnd.pkl"
    path.write_bytes(pickle.dumps({**CONTENTS, "gnd": Reduced(call, (f"touch {marker}",))}))
    with pytest.raises(UserError, match=rf"gnd.pkl is refused: .*{call.__name__}"):
        read_ground_truth(path)
    assert not marker.exists()


def test_damaged_pickles_are_one_sentence():
    content = pickle.dumps(CONTENTS)
    for end in (0, 5, len(content) // 2, len(content) - 1):
        with pytest.raises(UserError, match="x is damaged"):
            safe_pickle.loads(content[:end], "x")


def changed(i, **fields):
    judged = list(CONTENTS["gnd"])
    judged[i] = judged[i] | fields
    return {**CONTENTS, "gnd": judged}


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"imlist": ["a"]}, "is not a ground truth"),
        ({**CONTENTS, "qimlist": ["q"]}, "is not a ground truth"),
        (changed(1, junk=[4]), "is damaged"),
        (changed(0, easy=[0.5]), "is not a ground truth"),
    ],
)
def test_other_contents_are_an_error(tmp_path, contents, message):
    path = tmp_path / "gnd.pkl"
    path.write_bytes(pickle.dumps(contents))
    with pytest.raises(UserError, match=message):
        read_ground_truth(path)
