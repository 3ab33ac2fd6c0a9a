"""The commands, flags and fields that README.md, docs/ and the launch scripts show exist."""

import json
import re

import pytest

from hypjax.config import default_config, flatten
from tests.helpers import commands
from tests.helpers.commands import REPOSITORY

PAGES = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")]


@pytest.fixture(autouse=True)
def in_repository(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


@pytest.mark.hygiene
@pytest.mark.parametrize(
    "page", [pytest.param(page, id=str(page.relative_to(REPOSITORY))) for page in sorted(PAGES)]
)
def test_what_a_page_shows_exists(page):
    assert commands.problems(page.read_text()) == []


@pytest.mark.hygiene
def test_the_comments_and_the_fields_of_scripts_exist():
    text = "\n".join(script.read_text() for script in (REPOSITORY / "launch").iterdir())
    shown = "\n".join(re.findall(r"^# *(.*)$", text, re.MULTILINE))
    assert commands.problems(f"```\n{shown}\n```\n") == []
    fields = {*re.findall(r"--config\.([a-z_.]+)=", text)}
    known = (default_config(), default_config("hier+proxy_anchor"))
    assert "run.data_dir" in fields and fields <= set().union(*map(flatten, known))


@pytest.mark.hygiene
def test_what_does_not_exist_is_found():
    page = "```bash\npip install x && python -m hypjax.main --config=configs/cub.py \\\n"
    page += "    --config.train.batch_siz=2  # few\n```\nand `--exports=faiss`"
    assert [problem.split(": ")[1] for problem in commands.problems(page)] == [
        "unknown field config.train.batch_siz; did you mean train.batch_size?",
        "no command has the flag --exports",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_the_library_example_runs(page):
    text = (REPOSITORY / page).read_text()
    (example,) = re.findall(r"```python\n(import jax\n.*?)```", text, re.DOTALL)
    names = {}
    exec(example, names)
    assert names["gradients"].shape == names["features"].shape and names["loss"] > 0


@pytest.mark.hygiene
def test_the_page_shows_the_loop_of_the_notebook():
    page = (REPOSITORY / "docs/python.md").read_text().partition("\n## Your own loop\n")[2]
    shown = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    notebook = json.loads((REPOSITORY / "notebooks/own_loop.ipynb").read_text())
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"][1:-1]
    assert re.split("\n+", shown.strip()) == re.split("\n+", "\n".join(cells))


@pytest.mark.hygiene
def test_the_table_of_commands_is_complete():
    table = (REPOSITORY / "docs/commands.md").read_text()
    shown = re.findall(r"^\| `python -m hypjax\.([\w.]+)", table, re.MULTILINE)
    assert {*shown} == {*commands.names()}
