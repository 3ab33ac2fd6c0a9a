"""Programs that the manual shows."""

import re
import textwrap

from tests.helpers.commands import REPOSITORY


def read_page(page: str) -> str:
    """A page of docs/, with the files of docs/examples that it includes."""
    text = (REPOSITORY / "docs" / page).read_text()

    def included(match: re.Match[str]) -> str:
        return textwrap.indent((REPOSITORY / match[2]).read_text().rstrip("\n"), match[1])

    return re.sub(
        r"^( *)# The program in (docs/examples/\w+\.py)\.$", included, text, flags=re.MULTILINE
    )


def programs(page: str, section: str) -> list[str]:
    """The Python programs of a section of docs/, in order."""
    body = read_page(page).split(f"\n## {section}\n")[1].split("\n## ")[0]
    shown = re.findall(r"^ *```python\n(.*?)^ *```$", body, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(program) for program in shown]


def program_with(page: str, word: str) -> str:
    """The Python program of a page of docs/ that contains a word."""
    blocks = read_page(page).split("```")[1::2]
    (program,) = (block for block in blocks if word in block)
    return program.removeprefix("python")
