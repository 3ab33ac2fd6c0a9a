"""Adds what lies outside docs/ to the site: the table of commands, the changelog, the notebooks."""

import json
import pathlib
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).parents[1]
_TABLE = "<!-- commands -->"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the changelog, and a page for each notebook."""
    pages = {"changelog.md": _moved((ROOT / "CHANGELOG.md").read_text())}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        pages[f"notebooks/{path.stem}.md"] = notebook_page(path, config.repo_url)
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Inserts the table of commands where a page asks for it."""
    del page, config, files
    return markdown.replace(_TABLE, command_table())


def command_table() -> str:
    """The table of commands in README.md, with links as in docs/."""
    section = (ROOT / "README.md").read_text().partition("\n## Commands\n")[2]
    return _moved(section.partition("\n## ")[0].strip())


def notebook_page(path: pathlib.Path, repository: str | None) -> str:
    """A notebook in Markdown.

    Args:
        path: The notebook.
        repository: Address of the repository on GitHub; with it, the page links to Colab.
    """
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            parts.append(f"```python\n{source}\n```")
        else:
            source = re.sub(r"\]\((\w+)\.ipynb\)", r"](\1.md)", source)
            parts.append(source.replace("](../docs/", "](../"))
    if repository:
        name = repository.removeprefix("https://github.com/").strip("/")
        opened = f"https://colab.research.google.com/github/{name}/blob/main/notebooks/{path.name}"
        title, _, rest = parts[0].partition("\n")
        parts[0] = f"{title}\n\n[Open in Colab]({opened})\n{rest}"
    return "\n\n".join(parts) + "\n"


def _moved(text: str) -> str:
    """The text of a file beside docs/, with links as in docs/."""
    return text.replace("](docs/", "](")
