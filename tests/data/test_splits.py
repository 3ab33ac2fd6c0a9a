"""Parts that are held out of a dataset without splits, and what a message advises."""

import numpy as np
import pytest

from hypjax.data.splits import HeldOutClasses, divide
from hypjax.errors import UserError
from tests.helpers.pictures import dataset_without_images


def divided(classes, test, validation):
    dataset = dataset_without_images(np.repeat(np.arange(classes), 4))
    held_out = HeldOutClasses(test, validation)
    return divide("photos", {"train": dataset}, held_out, fingerprint="")


@pytest.mark.parametrize(
    ("classes", "test", "validation", "message"),
    [
        (8, 0.25, 9, "validation_classes is 9, 9 of 6 classes, .* set it to 2 to 4"),
        (4, 0.25, 2, "validation_classes is 2, 2 of 2 classes, .* set it to 0"),
        (4, 3, 0, "test_classes is 3, 3 of 4 classes"),
        (4, 0, 0, "4 classes and no test images; set --config.data.test_classes=0.25"),
        (3, 0.25, 0, "3 classes and no test images; .*data.split=images"),
    ],
)
def test_too_few_classes_are_refused(classes, test, validation, message):
    with pytest.raises(UserError, match=message):
        divided(classes, test, validation)


@pytest.mark.parametrize(
    ("classes", "validation", "reason"),
    [
        (40, 0.1, ""),
        (7, 0, "validation_classes is 0; set --config.data.validation_classes=2"),
        (7, 0.1, "there are only 5 to train on; set --config.data.validation_classes=2"),
        (4, 0.1, "there are only 2 to train on; add classes"),
    ],
)
def test_a_reason_says_why_nothing_is_held_out_to_validate(classes, validation, reason, capsys):
    splits = divided(classes, 0.25, validation)
    assert splits.no_validation.endswith(reason) and (splits.validation is None) == bool(reason)
    said = capsys.readouterr().err
    too_few = splits.train.num_classes < 5  # Advice on classes for training comes first.
    assert ("no class is held out" in said) == bool(reason and validation and not too_few)
    assert ("too few to learn" in said) == too_few
