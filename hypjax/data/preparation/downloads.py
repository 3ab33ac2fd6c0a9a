"""Downloads that are verified, and appear only when complete."""

import logging
import pathlib
import urllib.parse
from collections.abc import Callable

import tqdm

from hypjax.system import console

_TIMEOUT = 30  # Seconds without a byte before a download is abandoned.


def download(
    url: str, path: pathlib.Path, *, sha256: str, scratch: Callable[[], pathlib.Path]
) -> None:
    """Downloads a file, unless it exists with the right checksum.

    Args:
        url: Address of the file.
        path: Destination.
        sha256: Expected checksum.
        scratch: Returns a folder on the same disk, for the unfinished download.

    Raises:
        OSError: If the file cannot be downloaded or written.
        ValueError: If the checksum differs.
    """
    import pooch

    if path.is_file() and pooch.file_hash(str(path)) == sha256:
        return
    unfinished = scratch() / path.name
    console.say(f"downloading {url} to {path.parent}")
    pooch.get_logger().setLevel(logging.WARNING)
    bar = {"unit": "B", "unit_scale": True, "disable": None, "leave": False}
    with tqdm.tqdm(total=1, desc=path.name, **bar) as progress:  # Pooch sets the total.
        downloader = pooch.HTTPDownloader(progress, chunk_size=1 << 20, timeout=_TIMEOUT)
        known = f"sha256:{sha256}"
        pooch.retrieve(url, known, path.name, str(unfinished.parent), downloader=downloader)
    unfinished.replace(path)


def reason(error: OSError | ValueError, url: str) -> str:
    """Returns in a few words why a download failed."""
    import requests

    host = urllib.parse.urlsplit(url).netloc
    if isinstance(error, requests.HTTPError):
        return f"{host} answered {error.response.status_code} {error.response.reason}"
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return f"the connection to {host} broke"
    if isinstance(error, requests.RequestException):
        return f"no connection to {host}"
    if isinstance(error, ValueError):
        return "its SHA-256 differs from that of the official file"
    return error.strerror or str(error)
