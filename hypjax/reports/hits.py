"""What a search found, as text."""

import os
from typing import NamedTuple


class Hits(NamedTuple):
    """What was found for a query.

    Attributes:
        query: Path of the image.
        label: Its class; '' where it is not known.
        paths: Of the images found, the nearest first.
        labels: Their classes; '' where they are not known.
        distances: From the query.
    """

    query: str
    label: str
    paths: list[str]
    labels: list[str]
    distances: list[float]

    def mark(self, i: int) -> str:
        """Whether a hit is 'right' or 'wrong'; '' where that is not known."""
        if not (self.label and self.labels[i]):
            return ""
        return "right" if self.label == self.labels[i] else "wrong"

    def table(self) -> str:
        """Rank, distance, whether it is right, and path, a line a hit."""
        known = f" ({self.label})" if self.label else ""
        lines = [
            f"{_shown(self.query)}{known}",
            "rank   distance  " + ("       " if known else "") + "path",
        ]
        for i, (path, distance) in enumerate(zip(self.paths, self.distances, strict=True)):
            mark = f"{self.mark(i):<7}" if known else ""
            lines.append(f"{i + 1:>4} {distance:>10.4f}  {mark}{_shown(path)}")
        return "\n".join(lines)


def _shown(path: str) -> str:
    """A path as one would type it here."""
    shorter = os.path.relpath(path)
    return path if shorter.startswith(os.pardir) else shorter
