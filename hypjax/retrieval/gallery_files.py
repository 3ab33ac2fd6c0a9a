"""Galleries by their location: files of embeddings, and the formats of other engines."""

import functools
import os
import pathlib
from collections.abc import Callable

from hypjax.errors import UserError, require_utf8
from hypjax.retrieval.embeddings import Embeddings
from hypjax.retrieval.galleries import Gallery
from hypjax.system import hub, integrations


def open_gallery(location: str | os.PathLike[str]) -> Gallery:
    """Opens a gallery: a .npz file, an exported file or folder, or a collection at a URL.

    Raises UserError if it is missing, damaged or something else, or a package is not installed.
    """
    location = os.fspath(location)
    path = pathlib.Path(location).expanduser()
    if engine := _engine(location):
        return integrations.find("open", engine)(location if "://" in location else path)
    return Embeddings.load(path)


def is_gallery(location: str | os.PathLike[str]) -> bool:
    """Whether `open_gallery` opens such locations."""
    location = os.fspath(location)
    return location.endswith(".npz") or _engine(location) in integrations.names("open")


def _engine(location: str) -> str:
    """Name of the engine that opens a location; '' for a file of embeddings."""
    suffix = pathlib.Path(location).suffix.removeprefix(".")
    known = suffix in integrations.names("open")
    return integrations.scheme(location) or (suffix if known else "")


def find_export(name: str) -> Callable[[Embeddings, pathlib.Path], str]:
    """Finds the export to a format or a URL.

    The function that it returns writes embeddings beside a path, or to the URL, and returns a
    sentence that says where they are. Raises UserError if the format is unknown, or a package is
    not installed.
    """
    scheme = integrations.scheme(name)
    if scheme == hub.SCHEME and not hub.is_name(name.removeprefix(scheme)):
        raise UserError(f"{name} names no repository to write; write {scheme}OWNER/NAME")
    write = integrations.find("export", scheme or name)
    if scheme:
        write = functools.partial(write, url=name)

    def export(embeddings: Embeddings, path: pathlib.Path) -> str:
        require_utf8(embeddings.ids.tolist())
        if not len(embeddings):
            raise UserError("there are no embeddings to export")
        embeddings.check()
        return write(embeddings, path)

    return export
