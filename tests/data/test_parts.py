"""Advice on how to hold out images: all that a message names works for the data at hand."""

import dataclasses
import itertools
import re

import numpy as np
import pytest

from hypjax.data.parts import HeldOutClasses, check_classes, divide
from hypjax.errors import UserError
from tests.helpers.pictures import dataset_without_images

FIELDS = {"test_classes": "test", "validation_classes": "validation"}
BY_IMAGE = "set --config.data.split=images"
VALIDATION = "set --config.data.validation_classes=2"
FIXES = {  # Of data, not of flags: classes, images of each, and splits.
    "add classes": lambda classes, images, splits: (40, images, splits),
    "add images": lambda classes, images, splits: (max(classes, 2), 40, splits),
    "add a split named validation": lambda *state: (*state[:2], ("train", "validation", "test")),
}


def outcome(classes, images, splits, held_out):
    """The splits, or the error, of a dataset whose splits have the same classes."""
    dataset = dataset_without_images(np.repeat(np.arange(classes), images))
    try:
        divided = divide("photos", dict.fromkeys(splits, dataset), held_out, fingerprint="")
        check_classes("photos", divided)
    except UserError as error:
        return None, str(error)
    return divided, divided.no_validation


def remedies(message, state, held_out):
    """Yields what the message advises: the data and the flags afterwards."""
    state = classes, images, splits = state
    field = re.search(r"config.data.(\w+)_classes is", message)
    for low, high in re.findall(r"set it to (\d+)(?: to (\d+))?", message):
        for value in {int(low), int(high or low)}:
            yield state, dataclasses.replace(held_out, **{field[1]: value})
    for flags in re.findall(r"set (--\S+(?: --\S+)*)", message):
        changes = {}
        for name, value in re.findall(r"--config.data.(\w+)=([\w.]+\b)", flags):
            changes |= {"by_image": True} if name == "split" else {FIELDS[name]: float(value)}
        yield state, dataclasses.replace(held_out, **changes)
    if "leave out --config.data.split=images" in message:
        yield state, dataclasses.replace(held_out, by_image=False)
    for words, fixed in FIXES.items():
        if words in message:
            yield fixed(*state), dataclasses.replace(held_out, test=0.25, validation=0.1)


@pytest.mark.parametrize("splits", [("train",), ("train", "test")])
@pytest.mark.parametrize("by_image", [False, True])
def test_every_remedy_of_a_message_works(splits, by_image):
    failures = []
    for classes, images, test, validation in itertools.product(
        (1, 2, 3, 4, 5, 6, 7, 8, 9, 20), (2, 4, 7, 10, 12), (0, 0.25, 2), (0, 0.1, 1, 2, 6)
    ):
        state, held_out = (classes, images, splits), HeldOutClasses(test, validation, 0, by_image)
        if (by_image and validation >= 1) or (classes == 1 and "test" in splits):
            continue  # The configuration's rules refuse it; or there is nothing to train on.
        divided, message = outcome(*state, held_out)
        if not message:
            continue
        advice = [*remedies(message, state, held_out)]
        assert advice, message
        for remedied, flags in advice:
            mended, error = outcome(*remedied, flags)
            case = f"{state}, {held_out}: {message}\n{remedied}, {flags}: {error}"
            wrong = mended is None or (flags.by_image and flags.validation >= 1)
            if divided is not None:  # Only validation images were missing.
                wrong |= mended.validation is None
            failures += [case] * wrong
    assert not failures, "\n\n".join(failures)


@pytest.mark.parametrize(
    ("sizes", "validation", "line"),
    [
        ((4, 12), 0.1, f"none is held out for validation; add classes or {BY_IMAGE}"),
        ((6, 3), 0.1, "none is held out for validation; add classes"),
        ((7, 12), 0.1, f"there are only 5 to train on; {VALIDATION} or {BY_IMAGE}"),
        ((7, 12), 0, None),
    ],
)
def test_few_classes_are_told_in_one_line(sizes, validation, line, capsys):
    outcome(*sizes, ("train",), HeldOutClasses(0.25, validation))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (line is not None) and all(said.endswith(line) for said in lines)
