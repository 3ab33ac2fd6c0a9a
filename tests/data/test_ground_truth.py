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


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_ground_truth_is_read(tmp_path, protocol):
    path = tmp_path / "gnd_roxford5k.pkl"
    path.write_bytes(pickle.dumps(CONTENTS, protocol))
    truth = read_ground_truth(path)
    assert (truth.queries, truth.gallery) == (("q", "r"), ("a", "b", "c", "d"))
    assert truth.boxes.tolist() == [[1.5, 2, 30, 40], [0, 0, 3, 4]]
    lists = [[items.tolist() for items in part] for part in truth.judgements]
    assert lists == [[[0], []], [[1], [3]], [[], [2]]]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_arrays_are_read_as_numpy_reads_them(protocol):
    arrays = [
        np.arange(6, dtype=">f8").reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array(["ab", "ü"]),
        np.array([{"a": 1}, None], object),
        np.array(True),
    ]
    for array in arrays:
        found = safe_pickle.loads(pickle.dumps(array, protocol), "x").value
        np.testing.assert_array_equal(found, array)
        assert found.shape == array.shape
    assert safe_pickle.loads(pickle.dumps(np.float64(0.1), protocol), "x") == 0.1


class Runs:
    """Calls something when it is loaded."""

    def __init__(self, call, *arguments):
        self.call = call, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    ("call", "name"),
    [(os.system, "system"), (eval, "eval"), (getattr, "getattr"), (np.load, "load")],
)
def test_what_could_run_code_is_refused(tmp_path, call, name):
    marker, path = tmp_path / "ran", tmp_path / "gnd.pkl"
    path.write_bytes(pickle.dumps({**CONTENTS, "gnd": Runs(call, f"touch {marker}")}))
    with pytest.raises(UserError, match=rf"gnd.pkl is refused: it refers to \S*{name}, and loadi"):
        read_ground_truth(path)
    assert not marker.exists()


def changed(i, **fields):
    judged = list(CONTENTS["gnd"])
    judged[i] = judged[i] | fields
    return {**CONTENTS, "gnd": judged}


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ([1], "is not a ground truth of Revisited Oxford or Paris: it needs imlist, qimlist, and"),
        ({"imlist": ["a"]}, "is not a ground truth of Revisited"),
        ({**CONTENTS, "qimlist": ["q"]}, "is damaged: it judges 2 queries but names 1; fetch it"),
        ({**CONTENTS, "imlist": []}, "is damaged: imlist is not a list of names"),
        ({**CONTENTS, "imlist": ["a", "b", "a", "d"]}, "is damaged: imlist has a name twice"),
        (changed(1, junk=[4]), "is damaged: query r lists an image outside 0 to 3"),
        (changed(1, junk=[3]), "is damaged: query r lists an image twice"),
        (changed(0, bbx=[3, 3, 2, 4]), r"is damaged: the box of query q is \[3.0, 3.0, 2.0, 4.0\]"),
        (changed(0, easy=[0.5]), "is not a ground truth of Revisited"),
        (changed(0, easy="0"), "is not a ground truth of Revisited"),
    ],
)
def test_other_contents_are_an_error(tmp_path, contents, message):
    path = tmp_path / "gnd.pkl"
    path.write_bytes(pickle.dumps(contents))
    with pytest.raises(UserError, match=message) as caught:
        read_ground_truth(path)
    assert "\n" not in str(caught.value)


def test_files_that_are_cut_off_or_missing_are_an_error(tmp_path):
    path, whole = tmp_path / "gnd.pkl", pickle.dumps(CONTENTS)
    for size in range(0, len(whole) - 1, 7):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match="is damaged: it cannot be read as a pickle"):
            read_ground_truth(path)
    with pytest.raises(UserError, match="cannot read .*other.pkl"):
        read_ground_truth(tmp_path / "other.pkl")
