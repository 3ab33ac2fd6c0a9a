"""docs/configuration.md lists the fields that there are, with their defaults and choices."""

import pathlib
import re

import pytest

from hypjax.config import choices, default_config, flatten, recipes
from hypjax.config.choices import GROUPS
from hypjax.geometry import SPACES
from hypjax.objectives import OBJECTIVES
from hypjax.objectives.pair_losses import PAIR_LOSSES

# Without HIER, which is added to each.
LOSSES = {name: entry for name, entry in OBJECTIVES.items() if not name.startswith("hier+")}
_CHOICES = {
    "data.name": choices.DATASETS,
    "data.split": choices.SPLITS_BY,
    "data.test_view": choices.TEST_VIEWS,
    "data.train_view": choices.TRAIN_VIEWS,
    "model.head": choices.HEADS,
    "objective.name": (*LOSSES, "hier+", "hypmix"),
    "objective.space": tuple(SPACES),
    "optim.frozen": tuple(GROUPS),
    "train.sampling": choices.SAMPLINGS,
    "eval.metrics": choices.METRICS,
}


def table_rows() -> list[tuple[str, str, str]]:
    """Field, default and values of each row, as they are written on the page."""
    page = pathlib.Path(__file__).parents[1] / "docs/configuration.md"
    rows = re.findall(
        r"^\| `([^`]+)` \| `([^`]+)` \| ([^|]+) \| [^|]+ \|$", page.read_text(), re.MULTILINE
    )
    assert len(rows) == page.read_text().count("\n| `"), "a row has another form"
    return rows


def test_each_field_has_one_row():
    listed = [field for field, _, _ in table_rows()]
    assert sorted(listed) == sorted(flatten(default_config()))


def test_defaults_are_those_of_the_code():
    written = {field: eval(default, {}) for field, default, _ in table_rows()}
    assert written == flatten(default_config())


@pytest.mark.parametrize("field", _CHOICES)
def test_values_are_those_of_the_code(field):
    (values,) = [values for name, _, values in table_rows() if name == field]
    assert sorted(re.findall("`([^`]+)`", values)) == sorted(_CHOICES[field])


def test_the_losses_and_their_fields_are_those_of_the_code():
    page = (pathlib.Path(__file__).parents[1] / "docs/configuration.md").read_text()
    table = page.partition("| loss | name |")[2].partition("\n\n")[0]
    rows = [row.split(" | ") for row in table.splitlines()[2:]]
    written = {
        name.strip("`"): eval(f"dict({fields.replace('`', '')})") for _, name, fields, _ in rows
    }
    in_code = {
        name: {field: own.default for field, own in entry.fields.items()}
        for name, entry in LOSSES.items()
    }
    of_hier, of_pairs = written.pop("hier+..."), written.pop("losses of pairs")
    written = {
        name: fields | of_pairs if name in PAIR_LOSSES and "koleo_weight" not in fields else fields
        for name, fields in written.items()
    }
    assert written == in_code
    for name, entry in OBJECTIVES.items():
        if name.startswith("hier+"):
            fields = {field: own.default for field, own in entry.fields.items()}
            assert fields == in_code[name.removeprefix("hier+")] | of_hier
    variants = [re.findall("`([^`]+)`", row[3]) for row in rows]
    assert sorted(sum(variants, [])) == sorted(
        (*recipes.SPACES, "mix", "hier", *recipes.KOLEO_WEIGHTS, *recipes.LOSSES)
    )
