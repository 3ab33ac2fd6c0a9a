"""docs/configuration.md lists the fields that there are, with their defaults and choices."""

import re

import pytest

from hypjax.config import choices, default_config, flatten
from hypjax.config.choices import GROUPS
from hypjax.geometry import SPACES
from hypjax.models.architectures import FAMILIES
from tests.helpers.small_runs import REPOSITORY

pytestmark = pytest.mark.hygiene
_CHOICES = {
    "data.name": choices.DATASETS,
    "data.split": choices.SPLITS_BY,
    "data.test_view": choices.TEST_VIEWS,
    "data.train_view": choices.TRAIN_VIEWS,
    "model.head": choices.HEADS,
    "objective.name": ("hier+", "cones+", "matryoshka+", "hypmix", "arcface"),
    "objective.space": tuple(SPACES),
    "optim.frozen": tuple(GROUPS),
    "train.sampling": choices.SAMPLINGS,
    "eval.metrics": choices.METRICS,
}


def test_each_field_has_one_row_with_its_default_and_its_choices():
    page = (REPOSITORY / "docs/configuration.md").read_text()
    form = r"^\| `([^`]+)` \| `([^`]+)` \| ([^|]+) \| [^|]+ \|$"
    rows = re.findall(form, page, re.MULTILINE)
    assert len(rows) == page.count("\n| `"), "a row has another form"
    written = {field: eval(default, {}) for field, default, _ in rows}
    assert len(written) == len(rows) and written == flatten(default_config())
    listed = {field: re.findall("`([^`]+)`", values) for field, _, values in rows}
    for field, expected in _CHOICES.items():
        assert sorted(listed[field]) == sorted(expected), field


def test_each_family_of_encoders_has_its_row():
    page = (REPOSITORY / "docs/encoders.md").read_text()
    table = page.partition("\n|---")[2].partition("\n\n")[0].splitlines()[1:]
    for family, row in zip(FAMILIES, table, strict=True):
        title, members, _, pooling, _, licences = row.strip("| ").split(" | ")
        assert (title, pooling) == (family.title, f"`{family.pooling}`")
        assert re.findall("`([^`]+)`", members) == list(family.members)
        assert set(licences.split(", ")) == {weights.licence for weights in family.weights}
