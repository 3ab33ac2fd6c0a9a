"""Commands, flags and fields in README.md, docs/ and launch/ exist, and all are shown."""

import csv
import importlib.util
import re

import pytest

from hypjax import command
from hypjax.config import choices, default_config, flatten, variants
from hypjax.geometry import SPACES
from hypjax.objectives import OBJECTIVES
from hypjax.objectives.create import declaration
from hypjax.objectives.pair_losses import PAIR_LOSSES
from hypjax.objectives.pairwise import PAIRWISE_LOSSES
from hypjax.objectives.proxy_losses import PROXY_LOSSES
from tests.helpers import commands
from tests.helpers.commands import REPOSITORY
from tests.helpers.manual import read_page

PAGES = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md"), *REPOSITORY.glob("launch/*")]
PAGES += [REPOSITORY / "papers/studies.csv", *REPOSITORY.glob("docs/*.csv")]  # Rows of tables.
MISTYPED = {"train.total_stepz"}  # The manual shows what is said of it.


@pytest.mark.hygiene
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_flags_and_fields_of_a_page_exist(page):
    text = re.sub(r"\\\n\s*", "", page.read_text())
    for name, words in re.findall(r"python -m hypjax\.([a-z_.]*[a-z])([^`|&;#\n]*)", text):
        if name != "analysis.spread":  # The example of docs/extending.md.
            assert name in commands.names()
            flags = {*re.findall(r" --(?:no)?(\w+)(?=[= ]|$)", words)} - {"help"}
            assert flags <= {*command.flags_of(commands.module(name).main)}, words
    fields = set().union(*(flatten(default_config(name)) for name in OBJECTIVES))
    fields |= flatten(default_config("hier+proxy_anchor")).keys()
    assert {*re.findall(r"--config\.([a-z_]+\.[a-z_.]*[a-z])=", text)} <= fields | MISTYPED


def test_the_first_example_prints_what_the_readme_says(capsys):
    text = (REPOSITORY / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(example, {})
    printed = capsys.readouterr().out.splitlines()
    shown = re.findall(r"^print\(.*\)  # (.+)$", example, re.MULTILINE)
    assert len(shown) == len(printed) == example.count("print(") == 3
    numbers = [re.findall(r"[\d.]+", " ".join(lines)) for lines in (printed, shown)]
    assert [*map(float, numbers[0])] == pytest.approx([*map(float, numbers[1])], abs=0.02)


@pytest.mark.slow
def test_the_library_example_runs():
    text = read_page("python.md")
    (example,) = re.findall(r"```python\n(import jax\n.*?)```", text, re.DOTALL)
    names = {}
    exec(example, names)
    assert names["gradients"].shape == names["features"].shape and names["loss"] > 0


@pytest.mark.hygiene
def test_the_table_of_commands_is_complete():
    table = _tables().expand_files((REPOSITORY / "docs/commands.md").read_text())
    shown = re.findall(r"^\| `python -m hypjax\.([\w.]+)", table, re.MULTILINE)
    assert {*shown} == {*commands.names()}


@pytest.mark.hygiene
def test_each_field_has_one_row_with_its_default_its_choices_and_its_meaning():
    page = _tables().expand_fields((REPOSITORY / "docs/configuration.md").read_text())
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \| ([^|]+) \| [^|]+ \|$", page, re.MULTILINE)
    assert {field: eval(default, {}) for field, default, _ in rows} == flatten(default_config())
    with open(REPOSITORY / "docs/fields.csv", newline="") as file:
        assert {row["field"] for row in csv.DictReader(file)} <= {field for field, *_ in rows}
    listed = {field: sorted(re.findall("`([^`]+)`", values)) for field, _, values in rows}
    assert listed["data.name"] == sorted(choices.DATASETS)
    assert listed["objective.space"] == sorted(SPACES)
    assert listed["train.sampling"] == sorted(choices.SAMPLINGS)
    assert listed["eval.metrics"] == sorted({*choices.METRICS} - {"recall"})


@pytest.mark.hygiene
def test_each_loss_has_a_row_with_its_formula_and_fields():
    page = (REPOSITORY / "docs/losses.md").read_text()
    named = re.findall(r"^\| `(\w+)` \| [^|]+ \|", page, re.MULTILINE)
    losses = PAIRWISE_LOSSES | PAIR_LOSSES | PROXY_LOSSES
    assert sorted(named) == sorted(losses)
    written = {*re.findall(r"`(\w+)=", page + _tables().loss_rows())}
    assert set().union(*(declaration(name).fields for name in OBJECTIVES)) <= written


@pytest.mark.hygiene
def test_the_drawing_is_what_its_script_draws_and_its_files_exist():
    drawings = _module("drawings")
    assert (REPOSITORY / "docs/system.svg").read_text() == drawings.system()
    boxes = (*drawings.SHARED, *drawings.TRAINED, *drawings.SEARCHED)
    assert all((REPOSITORY / "hypjax" / file).exists() for box in boxes for file in box.files)


def _tables():
    return _module("tables")


def _module(name):
    """Imports a module of docs/, which is not a package."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / f"docs/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_variants_is_complete():
    page = (REPOSITORY / "docs/training.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `configs/")]
    listed = re.findall(r"`configs/(\w+)\.py`", "".join(row.split("|")[1] for row in rows))
    assert sorted(listed) == sorted(path.stem for path in (REPOSITORY / "configs").glob("*.py"))
    encoders = re.findall(r"^\| (`\w.*) \| (.+) \|$", page.split("| encoder | losses |")[1], re.M)
    of_encoder = {
        name: losses for names, losses in encoders for name in re.findall("`([^`]+)`", names)
    }
    for encoder, losses in variants.ENCODERS.items():
        if not of_encoder[encoder].startswith("all"):
            assert sorted(re.findall("`([^`]+)`", of_encoder[encoder])) == sorted(losses)
    assert max(len(cell) for row in rows for cell in row.split("|")) < 120
