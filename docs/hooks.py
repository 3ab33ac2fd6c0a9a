"""Adds changelog, notebooks and made tables to the site, and widens its navigation."""

import json
import pathlib
import re
import textwrap

import tables  # docs/tables.py: MkDocs looks for modules beside a hook.
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from hypjax.objectives.pair_losses import PAIR_LOSSES
from hypjax.objectives.proxy_losses import PROXY_LOSSES

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


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fills in programs, losses, fields and files of rows where a page names them."""
    del page, config, files
    markdown = re.sub(
        r"^( *)# The program in (docs/examples/\w+\.py)\.$", _program, markdown, flags=re.MULTILINE
    )
    for kind, losses in (("pairs", PAIR_LOSSES), ("proxies", PROXY_LOSSES)):
        functions = [f"::: hypjax.objectives.{loss.function.__name__}" for loss in losses.values()]
        markdown = markdown.replace(f"<!-- losses of {kind} -->", "\n\n".join(functions))
    if "<!-- encoders -->" in markdown:
        markdown = markdown.replace("<!-- encoders -->", tables.encoder_table())
    markdown = markdown.replace("<!-- losses -->\n", tables.loss_rows() + "\n")
    return tables.expand_files(tables.expand_fields(markdown))


def _program(match: re.Match[str]) -> str:
    """A program that a block of code names, with the block's indentation."""
    return textwrap.indent((ROOT / match[2]).read_text().rstrip("\n"), match[1])


def on_post_build(config: MkDocsConfig) -> None:
    """Shows the navigation from 1,100 pixels on; Material's rules hide it below 1,220."""
    for path in pathlib.Path(config.site_dir, "assets").rglob("*.min.*s"):
        text = path.read_text()
        narrower = text.replace("76.25em", "68.75em").replace("76.234375em", "68.734375em")
        if narrower != text:
            path.write_text(narrower)


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
