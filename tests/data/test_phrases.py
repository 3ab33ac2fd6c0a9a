"""More general texts of captions, beside a golden file of invented captions."""

import pathlib

import pytest

from hypjax.data.phrases import MAX_PHRASES, parents

GOLDEN = [
    line.split("\t")
    for line in pathlib.Path(__file__).with_name("phrases.tsv").read_text("utf-8").splitlines()
]


@pytest.mark.parametrize(("caption", "expected"), [(x, y) for x, *y in GOLDEN])
def test_parents_are_those_of_the_golden_file(caption, expected):
    assert [*parents(caption)] == expected


def test_a_caption_is_never_its_own_parent():
    for caption, *expected in GOLDEN:
        for text in (caption, *expected):
            assert text.strip(" .!").lower() not in parents(text)


def test_case_and_final_stops_change_nothing():
    assert parents("A Red Apple.") == parents("a red apple") == ("red apple", "apple")


def test_long_captions_have_few_parents():
    found = parents(", ".join(f"stone {i}" for i in range(100)))
    assert len(found) <= 2 * MAX_PHRASES
