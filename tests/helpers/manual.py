"""Programs that the manual shows."""

import re
import textwrap

from tests.helpers.commands import REPOSITORY


def programs(page: str, section: str) -> list[str]:
    """The Python programs of a section of docs/, in order."""
    text = (REPOSITORY / "docs" / page).read_text()
    body = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    shown = re.findall(r"^ *```python\n(.*?)^ *```$", body, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(program) for program in shown]


def program_with(page: str, word: str) -> str:
    """The Python program of a page of docs/ that contains a word."""
    blocks = (REPOSITORY / "docs" / page).read_text().split("```")[1::2]
    (program,) = (block for block in blocks if word in block)
    return program.removeprefix("python")
