"""A gallery that is being embedded: finished parts in a folder next to the file."""

import contextlib
import fcntl
import pathlib
import shutil
import time
from collections.abc import Iterable, Iterator
from typing import Self

import numpy as np
from jaxtyping import Float

from hypjax.errors import UserError
from hypjax.system.files import read_npz, write_text

_SECONDS_BETWEEN_SAVES = 60


class UnfinishedGallery:
    """Embeddings done so far; a context manager that holds the folder's lock.

    Attributes:
        done: Number of images whose embeddings are saved.
    """

    def __init__(self, path: pathlib.Path, facts: str) -> None:
        """Resumes earlier work on the same images by the same model, and drops anything else.

        Args:
            path: The file that the gallery will be.
            facts: Names model and images.

        Raises:
            UserError: The folder cannot be written, or another process uses it.
        """
        self._folder = path.with_name(f"{path.name}.unfinished")
        self._pending: list[tuple[np.ndarray, dict[int, str]]] = []
        self._saved = time.monotonic()
        owner = self._folder / "facts"
        with _explained(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self._folder / "lock").open("w")
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(f"{path} is being written by another process") from error
            if not owner.exists() or owner.read_bytes() != facts.encode():
                for part in self._folder.glob("*.npz"):
                    part.unlink()
                write_text(owner, facts)
            self.done = sum(len(points) for points, _ in self._load())
            for part in self._folder.glob("*.npz"):
                if part.stem >= _stem(self.done):
                    part.unlink()  # Damaged, or after a damaged one.

    def __enter__(self) -> Self:
        """Returns the gallery; its lock is held already."""
        return self

    def __exit__(self, *error: object) -> None:
        """Releases the lock."""
        self._lock.close()

    def _load(self) -> Iterator[tuple[np.ndarray, dict[int, str]]]:
        """Yields the parts in order, up to the first damaged one."""
        done = 0
        for path in sorted(self._folder.glob("*.npz")):
            try:
                part = read_npz(path)
                points = part["points"]
                reasons = dict(zip(part["places"].tolist(), part["reasons"].tolist(), strict=True))
            except (OSError, ValueError, KeyError, TypeError):
                return
            if path.stem != _stem(done) or points.ndim != 2:
                return
            done += len(points)
            yield points, reasons

    def add(
        self, points: Float[np.ndarray, "batch d"], broken: dict[int, str], *, saving: bool
    ) -> None:
        """Adds a batch; saves the pending ones once a minute, or now if `saving` is set."""
        self._pending.append((points, broken))
        if saving or time.monotonic() - self._saved >= _SECONDS_BETWEEN_SAVES:
            self._save()

    def _save(self) -> None:
        points, broken = concatenated(self._pending)
        path = self._folder / f"{_stem(self.done)}.npz"
        with _explained(self._folder):
            unfinished = path.with_suffix(".unfinished")
            with unfinished.open("wb") as file:
                places, reasons = np.array(list(broken), int), np.array(list(broken.values()), str)
                np.savez(file, points=points, places=places, reasons=reasons)
            unfinished.replace(path)
        self.done += len(points)
        self._pending, self._saved = [], time.monotonic()

    def contents(self) -> tuple[Float[np.ndarray, "n d"], dict[int, str]]:
        """All embeddings done so far, and the images that could not be read."""
        return concatenated([*self._load(), *self._pending])

    def remove(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


def concatenated(
    batches: Iterable[tuple[Float[np.ndarray, "batch d"], dict[int, str]]],
) -> tuple[Float[np.ndarray, "n d"], dict[int, str]]:
    """Joins batches of embeddings, and numbers their unreadable images over all of them."""
    points, broken, count = [], {}, 0
    for batch, reasons in batches:
        points.append(batch)
        broken |= {count + index: reason for index, reason in reasons.items()}
        count += len(batch)
    return np.concatenate(points), broken


def _stem(done: int) -> str:
    """Name of the part that follows so many images."""
    return f"{done:012d}"


@contextlib.contextmanager
def _explained(folder: pathlib.Path) -> Iterator[None]:
    """Turns a failure to write into a `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error.strerror or error})") from error
