"""What a search found, as text."""

import os
from typing import NamedTuple

from hypjax.errors import on_one_line


class Hits(NamedTuple):
    """The hits of a query.

    Attributes:
        query: Path of the query image.
        label: Its class, or '' if unknown.
        paths: Paths of the hits, nearest first.
        labels: Their classes, or '' if unknown.
        distances: Their distances from the query.
        remark: What to say of the nearest of them, such as that it is far away; '' for nothing.
    """

    query: str
    label: str
    paths: list[str]
    labels: list[str]
    distances: list[float]
    remark: str = ""

    def mark(self, i: int) -> str:
        """Returns 'right' or 'wrong' for a hit, or '' if a class is unknown."""
        if not (self.label and self.labels[i]):
            return ""
        return "right" if self.label == self.labels[i] else "wrong"

    def __str__(self) -> str:
        """The table of the hits."""
        return self.table()

    def table(self) -> str:
        """Returns one line per hit: rank, distance, whether it is right, and path."""
        known = f" ({on_one_line(self.label)})" if self.label else ""
        lines = [
            f"{_shown(self.query)}{known}",
            "rank   distance  " + ("       " if known else "") + "path",
        ]
        for i, (path, distance) in enumerate(zip(self.paths, self.distances, strict=True)):
            mark = f"{self.mark(i):<7}" if known else ""
            lines.append(f"{i + 1:>4} {distance:>10.4f}  {mark}{_shown(path)}")
        return "\n".join(filter(None, [*lines, self.remark]))


def _shown(path: str) -> str:
    """Returns a path on one line, relative to the working directory if it is below it."""
    shorter = os.path.relpath(path)
    return on_one_line(path if shorter.startswith(os.pardir) else shorter)
