"""docs/configuration.md lists the fields that there are, with their defaults and choices."""

import re
import sys

import pytest

from hypjax.config import choices, default_config, flatten
from hypjax.config.choices import GROUPS
from hypjax.geometry import SPACES
from hypjax.models.architectures import FAMILIES
from hypjax.objectives import OBJECTIVES
from hypjax.objectives.pair_losses import PAIR_LOSSES
from tests.helpers.small_runs import REPOSITORY

pytestmark = pytest.mark.hygiene
# Without HIER, Matryoshka and cones, which are made of each.
LOSSES = {name: entry for name, entry in OBJECTIVES.items() if "+" not in name}
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


sys.path.insert(0, str(REPOSITORY / "docs"))
hooks = pytest.importorskip("hooks")
SOURCE = (REPOSITORY / "docs/configuration.md").read_text()
PAGE = hooks.on_page_markdown(SOURCE, None, None, None)


def test_each_field_has_one_row_with_its_default_and_its_choices():
    form = r"^\| `([^`]+)` \| `([^`]+)` \| ([^|]+) \| [^|]+ \|$"
    rows = re.findall(form, PAGE, re.MULTILINE)
    assert len(rows) == PAGE.count("\n| `"), "a row has another form"
    written = {field: eval(default, {}) for field, default, _ in rows}
    assert len(written) == len(rows) and written == flatten(default_config())
    listed = {field: re.findall("`([^`]+)`", values) for field, _, values in rows}
    for field, expected in _CHOICES.items():
        assert sorted(listed[field]) == sorted(expected), field


def defaults(entry):
    return {name: field.default for name, field in entry.fields.items()}


def test_the_losses_and_their_fields_are_those_of_the_code():
    table = PAGE.partition("| loss | name |")[2].partition("\n\n")[0]
    rows = [row.split(" | ") for row in table.splitlines()[2:]]
    written = {
        name.strip("`"): eval(f"dict({fields.replace('`', '')})") for _, name, fields, _ in rows
    }
    in_code = {name: defaults(entry) for name, entry in LOSSES.items()}
    added = {prefix: written.pop(f"{prefix}+...") for prefix in ("hier", "cones", "matryoshka")}
    of_pairs = written.pop("losses of pairs")
    for name, fields in written.items():
        if name in PAIR_LOSSES and "koleo_weight" not in fields:
            written[name] = fields | of_pairs
    assert written == in_code
    for name, entry in OBJECTIVES.items():
        prefix, _, base = name.rpartition("+")
        if prefix:
            assert defaults(entry) == in_code[base] | added[prefix]


def test_each_family_of_encoders_has_its_row():
    page = (REPOSITORY / "docs/encoders.md").read_text()
    table = page.partition("\n|---")[2].partition("\n\n")[0].splitlines()[1:]
    for family, row in zip(FAMILIES, table, strict=True):
        title, members, _, pooling, _, licences = row.strip("| ").split(" | ")
        assert (title, pooling) == (family.title, f"`{family.pooling}`")
        assert re.findall("`([^`]+)`", members) == list(family.members)
        assert set(licences.split(", ")) == {weights.licence for weights in family.weights}
