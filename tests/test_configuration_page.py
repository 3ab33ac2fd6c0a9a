"""docs/configuration.md lists the fields that there are, with their defaults and choices."""

import re

import pytest

from hypjax.config import choices, default_config, flatten
from hypjax.geometry import SPACES
from tests.helpers.small_runs import REPOSITORY

CHOICES = {
    "data.name": choices.DATASETS,
    "objective.space": tuple(SPACES),
    "train.sampling": choices.SAMPLINGS,
    "eval.metrics": choices.METRICS,
}


@pytest.mark.hygiene
def test_each_field_has_one_row_with_its_default_and_its_choices():
    page = (REPOSITORY / "docs/configuration.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \| ([^|]+) \| [^|]+ \|$", page, re.MULTILINE)
    assert {field: eval(default, {}) for field, default, _ in rows} == flatten(default_config())
    listed = {field: re.findall("`([^`]+)`", values) for field, _, values in rows}
    for field, expected in CHOICES.items():
        assert sorted(listed[field]) == sorted(expected), field
