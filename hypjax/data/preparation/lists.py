"""Tools to read official image lists, which name the file and line of any damage."""

import functools
import re
from typing import NamedTuple

from hypjax.data.preparation.official import ListedImage
from hypjax.data.preparation.sources import FileTree
from hypjax.errors import UserError
from hypjax.system import console


class Row(NamedTuple):
    """A line of a list.

    Attributes:
        place: File and line number, for messages.
        text: The line, stripped.
    """

    place: str
    text: str


def read_rows(tree: FileTree, name: str) -> list[Row]:
    """Reads the non-empty lines of a list.

    Raises:
        UserError: If the list is missing, unreadable or not UTF-8.
    """
    try:
        lines = tree.read_list(name).decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{tree.root / name} is damaged: it is not a text file; fetch it again"
        ) from error
    numbered = enumerate((line.strip() for line in lines), 1)
    return [Row(f"{tree.root / name}, line {n}", line) for n, line in numbered if line]


def damaged_list(place: str, problem: str) -> UserError:
    """Returns the error for a damaged list.

    Args:
        place: File, and line if known.
        problem: What is wrong there.
    """
    return UserError(f"{place}: {problem}; the list is damaged, fetch it again")


def match_row(pattern: str, row: Row, example: str) -> re.Match[str]:
    """Parses a line by a regular expression.

    Args:
        pattern: Must match the whole line.
        row: The line.
        example: A valid line, for the message.

    Raises:
        UserError: If the line does not match.
    """
    match = re.fullmatch(pattern, row.text)
    if match is None:
        raise damaged_list(row.place, f"{row.text[:100]!r} is not of the form {example!r}")
    return match


class NameChecker:
    """Checks the image names of a dataset, and collects those without a file."""

    def __init__(self) -> None:
        """Starts with no names."""
        self._seen: set[str] = set()
        self._missing: list[str] = []

    def check(self, name: str, place: str) -> None:
        """Rejects duplicates, and names that point outside the dataset's folder.

        Raises:
            UserError: If the name is invalid.
        """
        if name.startswith("/") or ".." in name.split("/"):
            raise damaged_list(place, f"{name!r} points outside the dataset's folder")
        if name in self._seen:
            raise damaged_list(place, f"{name!r} is listed twice")
        self._seen.add(name)

    def has_file(self, name: str, tree: FileTree) -> bool:
        """Whether the name has a file; remembers the name if not."""
        if name not in tree.files:
            self._missing.append(name)
        return name in tree.files

    def warn_of_missing(self) -> None:
        """Warns of names without a file."""
        if self._missing:
            more = f", and {len(self._missing) - 1} more" if len(self._missing) > 1 else ""
            console.warn(f"listed but missing: {self._missing[0]}{more}")


def listed_image(
    tree: FileTree, name: str, label: str, superlabel: str = "", *, file: str | None = None
) -> ListedImage:
    """Returns a listed image that is read from the tree.

    Args:
        tree: The dataset's files.
        name: Path within the dataset.
        label: Name of the class.
        superlabel: Name of the coarser class, if any.
        file: Path within the tree, if it differs from the name.
    """
    return ListedImage(name, label, functools.partial(tree.read, file or name), superlabel)
