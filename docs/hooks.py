"""Adds what lies outside docs/ to the site: the changelog and the notebooks."""

import json
import pathlib
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).parents[1]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the changelog, and a page for each notebook."""
    changelog = (ROOT / "CHANGELOG.md").read_text().replace("](docs/", "](")
    pages = {"changelog.md": changelog}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        pages[f"notebooks/{path.stem}.md"] = notebook_page(path, config.repo_url)
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


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
