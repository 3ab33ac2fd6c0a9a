"""The commands, flags and fields that README.md, docs/ and the launch scripts show exist."""

import json
import pathlib
import re

import pytest

from tests.helpers import commands
from tests.helpers.commands import REPOSITORY

PAGES = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")]


@pytest.fixture(autouse=True)
def in_repository(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=str(page.relative_to(REPOSITORY))) for page in sorted(PAGES)]
)
def test_what_a_page_shows_exists(page):
    assert commands.problems(page.read_text()) == []


@pytest.mark.parametrize(
    "script", sorted((REPOSITORY / "launch").iterdir()), ids=lambda script: script.name
)
def test_what_the_comments_of_a_script_show_exists(script):
    comments = [line for line in script.read_text().splitlines() if line.startswith("#")]
    shown = "\n".join(line.removeprefix("#").strip() for line in comments)
    assert commands.problems(f"```\n{shown}\n```\n") == []


@pytest.mark.parametrize(
    ("shown", "problem"),
    [
        ("python -m hypjax.main --confg=configs/glyphs.py", "flag 'confg'"),
        (
            "pip install x && python -m hypjax.main --config=configs/cub.py \\\n"
            "    --config.train.batch_siz=2  # too few",
            "unknown field config.train.batch_siz",
        ),
        ("launch/cpus.sh --config=configs/cub.py", "there is no launch/cpus.sh"),
        ("`run.cached`", "unknown field config.run.cached"),
        ("`--exports=faiss`", "no command has the flag --exports"),
    ],
)
def test_what_does_not_exist_is_found(shown, problem):
    page = f"| {shown} | words |" if "`" in shown else f"# Title\n\n```bash\n{shown}\n```\n"
    (found,) = commands.problems(page)
    assert problem in found


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_the_library_example_runs(page):
    text = (REPOSITORY / page).read_text()
    (example,) = re.findall(r"```python\n(import jax\n.*?)```", text, re.DOTALL)
    names = {}
    exec(example, names)
    assert names["gradients"].shape == names["features"].shape and names["loss"] > 0


def test_the_page_shows_the_loop_of_the_notebook():
    page = (REPOSITORY / "docs/python.md").read_text().partition("\n## Your own loop\n")[2]
    shown = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    notebook = json.loads((REPOSITORY / "notebooks/own_loop.ipynb").read_text())
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"][1:-1]
    assert re.split("\n+", shown.strip()) == re.split("\n+", "\n".join(cells))


def test_the_site_has_all_commands_and_the_notebooks(monkeypatch):
    pytest.importorskip("mkdocs", reason="needs the docs extra")
    monkeypatch.syspath_prepend(REPOSITORY / "docs")
    import hooks

    page = hooks.notebook_page(REPOSITORY / "notebooks/quickstart.ipynb", "https://github.com/a/b")
    opened = "https://colab.research.google.com/github/a/b/blob/main/notebooks/quickstart.ipynb"
    assert page.startswith("# Quickstart\n\n[Open in Colab](" + opened + ")\n")
    assert "](first_photos.md)" in page and "```python\n!python -m hypjax.main" in page
    table = (REPOSITORY / "docs/commands.md").read_text()
    shown = set(re.findall(r"^\| `python -m hypjax\.([\w.]+)", table, re.MULTILINE))
    assert shown == set(commands.names())


def test_every_picture_is_drawn_by_the_script():
    script = (REPOSITORY / "launch/pictures.sh").read_text()
    drawn = re.findall(r'--output="\$(?:output|scratch)/([\w-]+\.(?:png|jpg))"', script)
    drawn += [f"hierarchy-{name}.png" for name in ("disk", "affinity", "leaves")]
    drawn += ["grocery-trees.png"]  # Beside hierarchy.json.
    drawn += ["negatives-hardest.png"]  # Beside negatives.png.
    drawn += ["serve.png"]  # By a browser.
    drawn += ["recall-speed.png"]  # Beside recall-speed.json.
    pages = [REPOSITORY / "README.md", *REPOSITORY.glob("docs/*.md")]
    shown = [name for page in pages for name in re.findall(r"!\[.*\]\((.*)\)", page.read_text())]
    assert {pathlib.Path(name).name for name in shown} == set(drawn)
    assert {path.name for path in REPOSITORY.glob("docs/*.[pj][np]g")} == set(drawn)
