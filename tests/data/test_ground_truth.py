"""Ground-truth files of Revisited Oxford and Paris: what is read, and what is refused."""

import os
import pickle
import struct
import tracemalloc

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


protocols = pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))


@protocols
def test_a_ground_truth_is_read(tmp_path, protocol):
    path = tmp_path / "gnd_roxford5k.pkl"
    path.write_bytes(pickle.dumps(CONTENTS, protocol))
    truth = read_ground_truth(path)
    assert (truth.queries, truth.gallery) == (("q", "r"), ("a", "b", "c", "d"))
    assert truth.boxes.tolist() == [[1.5, 2, 30, 40], [0, 0, 3, 4]]
    lists = [[items.tolist() for items in part] for part in truth.judgements]
    assert lists == [[[0], []], [[1], [3]], [[], [2]]]


@protocols
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
    for value in (0.1, [*range(3000)], {"a": [True, None, -1, "ü"]}):
        assert safe_pickle.loads(pickle.dumps(value, protocol), "x") == value
    assert safe_pickle.loads(pickle.dumps(np.float64(0.1), protocol), "x") == 0.1


@pytest.mark.parametrize(
    ("call", "name"),
    [(os.system, "system"), (eval, "eval"), (getattr, "getattr"), (np.load, "load")],
)
def test_what_could_run_code_is_refused(tmp_path, call, name):
    marker, path = tmp_path / "ran", tmp_path / "gnd.pkl"
    path.write_bytes(pickle.dumps({**CONTENTS, "gnd": Reduced(call, (f"touch {marker}",))}))
    with pytest.raises(UserError, match=rf"gnd.pkl is refused: it refers to \S*{name}, and loadi"):
        read_ground_truth(path)
    assert not marker.exists()


def size(number):
    return struct.pack("<I", number)


class Reduced:
    """Something that is pickled as a call, perhaps with a state."""

    def __init__(self, *reduced):
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced


def array_of(content):
    """A pickle of an array that announces 3 GB, with another content."""
    made = np._core.multiarray._reconstruct, (np.ndarray, (0,), b"b")
    return pickle.dumps(Reduced(*made, (1, (3 * 10**9,), np.dtype("u1"), False, content)))


LONG = b"U" + b"\xff" + b"x" * 255  # A string.
ATTACKS = {
    "an index of 400 million": b"Nr" + size(400_000_000) + b".",
    "a key of a million tuples": b"})" + b"\x85" * 10**6 + b"Ns.",
    "a list in a list in a list, and so on": b"]" * 10**4 + b"a" * (10**4 - 1) + b".",
    "an array of nothing but a size": array_of(3 * 10**9),
    "an array larger than its bytes": array_of(b"abc"),
    "a long number that is cut off": b"\x8b" + size(2**31 - 1) + b".",
    "bytes that are cut off": b"\x96" + struct.pack("<Q", 6 * 10**9) + b".",
    "a tuple of two equal tuples, and so on": b")q\0" + b"h\0h\0\x86q\0" * 60 + b".",
    "a list that is referred to and then grows": b"".join(
        [b"]q\0](", b"h\0" * 10**4, b"eh\0(", LONG * 99, b"e\x86."]
    ),
    "a string that is copied again and again": b"".join(
        [b"X", size(10**5), b"x" * 10**5, b"q\0", b"c_codecs\nencode\nq\1"]
        + [b"h\1h\0U\6latin1\x86R" * 10**4, b"."]
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_small_pickles_take_little_memory(name):
    """Some are read, since what they hold is harmless."""
    tracemalloc.start()
    try:
        safe_pickle.loads(ATTACKS[name], "x")
    except UserError as error:
        assert str(error) == "x is damaged: it cannot be read as a pickle"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20 + 200 * len(ATTACKS[name])


def test_data_that_refers_to_a_part_twice_is_read():
    part = [np.arange(3), ("a", {"b": 1.5})]
    found = safe_pickle.loads(pickle.dumps([part, part, part]), "x")
    assert [x[1] for x in found] == [("a", {"b": 1.5})] * 3
    assert all(x[0].value.tolist() == [0, 1, 2] for x in found)


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
